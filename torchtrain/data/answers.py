"""From a record that says which of its tokens are answers to token ids, and a mask of those that are targets.

Four kinds of record: `messages` of a conversation; `prompt` and `completion`, texts or messages; token ids as
`input_ids` with `labels`, `completion_mask` or `assistant_masks`; token ids with `weights` of each token's loss. Only
answers are targets: what the assistant says, the completion, what the labels or the mask name, what weighs more than 0.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from anchorline.errors import quoted, quoted_reason
from torchtrain.data.encode import list_special_tokens
from torchtrain.data.files import BadItemError
from torchtrain.data.store import Documents
from torchtrain.marks import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Kind = Literal["messages", "completion", "tokens", "weights"]
_MASKS = ("labels", "completion_mask", "assistant_masks")
_MOST_WEIGHT = 1e6
_ASSISTANT = "assistant"
# How transformers finds out whether a template marks the answers.
_MARKS_ANSWERS = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
_PROMPTED_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?$")


class Answered(NamedTuple):
    """Token ids, int32 [n], and which of them are targets, bool [n]; or what each target's loss counts, float32 [n]."""

    tokens: np.ndarray
    targets: np.ndarray


NO_END = "no special token is a target, so the model learns no end of an answer (docs/fine-tuning.md)"


def trains_an_end(store: Documents, tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Whether a special token is a target in any document with answers; true where none has answers."""
    ends = [*list_special_tokens(tokenizer).values()]
    pairs = zip(store.shards, store.targets or (), strict=store.targets is not None)
    return store.targets is None or any(np.isin(ids[of > 0], ends).any() for ids, of in pairs)


def kind_of(record: Mapping[str, Any]) -> Kind | None:
    """Return which kind of record this is; None: it has no answers of its own."""
    if "messages" in record:
        return "messages"
    if "prompt" in record and "completion" in record:
        return "completion"
    if "input_ids" not in record or not any(name in record for name in (*_MASKS, "weights")):
        return None
    return "weights" if "weights" in record else "tokens"


class AnswerEncoder:
    """Makes tokens and targets of records.

    A conversation is rendered by the tokenizer's chat template. A template with `{% generation %}` marks says itself
    what the assistant says. Otherwise an answer is what rendering the conversation up to that message adds to rendering
    it up to the one before, with the prompt for an answer. It must stand in the whole conversation just so, token by
    token; a template that writes earlier answers in another way is refused. Neither an empty `<think></think>` that a
    template adds nor white space behind the token that closes an answer is a target.

    special_tokens: how to read a special token that is written in a record's text: `text` refuses it, because a
        rendered conversation has special tokens of its own; `control` takes it as the control token.
    append_eos: close a completion that is a text with the tokenizer's EOS.
    template: a chat template; None: the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        special_tokens: Literal["text", "control"],
        append_eos: bool,
        template: str | None = None,
    ) -> None:
        # Any: transformers' types leave open what its calls return.
        self._tokenizer: Any = tokenizer
        self._append_eos = append_eos
        self._special = list(list_special_tokens(tokenizer))
        self._refused = self._special if special_tokens == "text" else []
        own = getattr(tokenizer, "chat_template", None)
        self._template: str = template or (own.get("default") if isinstance(own, Mapping) else own) or ""

    def encode(self, record: Mapping[str, Any], kind: Kind) -> Answered:
        """Return a record's tokens and targets. Raises BadItemError: another kind, no target, or no rendering."""
        answered = getattr(self, f"_{kind}")(record)
        if not answered.targets[1:].any():
            raise BadItemError(
                "no token is a target (the first token of a document never is); mark an answer, or remove the record"
            )
        return answered

    def _ids(self, record: Mapping[str, Any]) -> np.ndarray:
        ids = _integers(record, "input_ids")
        if ids.min() < 0 or ids.max() >= len(self._tokenizer):
            raise BadItemError(
                f"the token ids go from {ids.min()} to {ids.max()}; give those of 0..{len(self._tokenizer) - 1}"
            )
        return ids.astype(np.int32)

    def _weights(self, record: Mapping[str, Any]) -> Answered:
        ids = self._ids(record)
        if names := [name for name in _MASKS if name in record]:
            raise BadItemError(f"has weights and {names[0]}; give weights alone, 0 where a token is no target")
        try:
            weights = np.asarray(record["weights"])
        except ValueError:
            weights = np.zeros(0)
        if weights.shape != ids.shape or weights.dtype.kind not in "iuf":
            raise BadItemError(f"weights: is no list of {len(ids)} numbers; give one for each of input_ids")
        if (wrong := np.flatnonzero(~((weights >= 0) & (weights <= _MOST_WEIGHT)))).size:
            raise BadItemError(
                f"weights[{wrong[0]}] is {weights[wrong[0]]:g}; a weight goes from 0 to {_MOST_WEIGHT:g}"
            )
        return Answered(ids, weights.astype(np.float32))

    def _tokens(self, record: Mapping[str, Any]) -> Answered:
        ids = self._ids(record)
        names = [name for name in _MASKS if name in record]
        if len(names) != 1:
            raise BadItemError(f"has {', '.join(names) or 'no mask'}; give one of {', '.join(_MASKS)}")
        mask = _integers(record, names[0])
        if len(mask) != len(ids):
            raise BadItemError(f"{names[0]} has {len(mask)} entries and input_ids {len(ids)}; give one for each token")
        if names[0] == "labels":
            targets = mask != IGNORED
            if (wrong := np.flatnonzero(targets & (mask != ids))).size:
                raise BadItemError(
                    f"labels[{wrong[0]}] is {mask[wrong[0]]} and input_ids[{wrong[0]}] {ids[wrong[0]]}; labels repeat "
                    f"the token at its own place, or are {IGNORED}"
                )
        elif not np.isin(mask, (0, 1)).all():
            raise BadItemError(f"{names[0]} holds {mask[~np.isin(mask, (0, 1))][0]}; a mask is 0 or 1")
        else:
            targets = mask == 1
        return Answered(ids, targets)

    def _completion(self, record: Mapping[str, Any]) -> Answered:
        prompt, completion = record.get("prompt"), record.get("completion")
        if not isinstance(prompt, str) and not isinstance(completion, str):
            before, after = self._checked(prompt, "prompt"), self._checked(completion, "completion")
            return self._render([*before, *after], record.get("tools"), first=len(before))
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise BadItemError("prompt and completion are not both texts, or both lists of messages")
        if not completion.strip():
            raise BadItemError("completion is blank")
        self._refuse_special(prompt, "prompt")
        self._refuse_special(completion, "completion")
        eos = self._tokenizer.eos_token if self._append_eos else None
        text = prompt + completion + (eos or "")
        return self._mark(text, [(len(prompt), len(text))], "completion")

    def _messages(self, record: Mapping[str, Any]) -> Answered:
        return self._render(self._checked(record.get("messages"), "messages"), record.get("tools"), first=0)

    def _checked(self, messages: Any, name: str) -> list[dict[str, Any]]:
        """Return messages with a role each, whose contents are text."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise BadItemError(f"{name}: is no list of messages with role and content, or empty")
        for number, message in enumerate(messages):
            where = f"{name}[{number}]"
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
                raise BadItemError(f"{where}: has no role; a message is {{role: user, content: ...}}")
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else [parts]:
                if isinstance(part, Mapping) and part.get("type", "text") != "text":
                    raise BadItemError(f"{where}: holds {quoted(part.get('type'))}; only text can be packed; remove it")
                text = part.get("text") if isinstance(part, Mapping) else part
                if text is not None and not isinstance(text, str):
                    raise BadItemError(f"{where}: content is no text but {type(text).__name__}")
                self._refuse_special(text or "", where)
        # A column of a data set has every key in every message: None where there was none.
        return [{key: value for key, value in message.items() if value is not None} for message in messages]

    def _refuse_special(self, text: str, where: str) -> None:
        if held := [content for content in self._refused if content in text]:
            raise BadItemError(
                f"{where}: holds the special token {quoted(held[0])}, which would be read as control; remove it, or "
                "set data.special_tokens to control"
            )

    def _render(self, messages: list[dict[str, Any]], tools: Any, first: int) -> Answered:
        """Render a conversation; answers before message `first` are no targets."""
        if not self._template:
            raise BadItemError("the tokenizer has no chat template; set tokenizer.chat_template (data.chat_template)")
        if tools and "tools" not in self._template:
            raise BadItemError("has tools, and the chat template writes none; remove them, or give another template")
        answers = [n for n, message in enumerate(messages) if n >= first and message["role"] == _ASSISTANT]
        if not answers:
            raise BadItemError("no message is the assistant's, so that no token is a target")
        if answers[0] == 0:
            raise BadItemError("messages[0]: is the assistant's; begin with another role")
        whole = self._rendered(messages, tools)
        if not _MARKS_ANSWERS.search(self._template):
            return self._mark(whole, [self._find(messages, n, tools, whole) for n in answers], "messages")
        marked = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._template, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = (np.array(marked[name]) for name in ("input_ids", "assistant_masks"))
        if first:
            prompt = self._rendered(messages[:first], tools, prompt=True)
            mask &= self._mark(whole, [(len(prompt), len(whole))], "completion").targets
        return Answered(ids.astype(np.int32), mask == 1)

    def _find(self, messages: list[dict[str, Any]], number: int, tools: Any, whole: str) -> tuple[int, int]:
        # A template may open or write an empty thought in the prompt, and leave it out where messages follow.
        head = _PROMPTED_THOUGHT.sub("", self._rendered(messages[:number], tools, prompt=True))
        upto = self._rendered(messages[: number + 1], tools)
        answer, content = upto[len(head) :], messages[number].get("content")
        thought = _EMPTY_THOUGHT.match(answer)
        if thought is None or (isinstance(content, str) and _EMPTY_THOUGHT.match(content)):
            starts = [head]
        else:
            starts, answer = [head + thought.group(), head], answer[thought.end() :]
        # Some templates close the last message alone with the EOS.
        answers = [answer, answer.removesuffix(self._tokenizer.eos_token or "")]
        for start in starts if upto.startswith(head) else []:
            for part in answers:
                if whole.startswith(start + part):
                    return len(start), len(start) + self._closed(part)
        raise BadItemError(
            f"messages[{number}]: the chat template writes this answer otherwise when it is not the last, so that its "
            "tokens cannot be told; give a template with {% generation %} marks"
        )

    def _closed(self, answer: str) -> int:
        """Return the length of an answer without the white space that follows a special token at its end."""
        bare = answer.rstrip()
        return len(bare) if any(bare.endswith(content) for content in self._special) else len(answer)

    def _rendered(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._template, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # whatever a template raises of messages that it was not made for
            raise BadItemError(f"the chat template refuses the messages: {quoted_reason(error)}") from None

    def _mark(self, text: str, answers: Sequence[tuple[int, int]], name: str) -> Answered:
        """Tokenise a text and mark its answers' tokens; a token on both sides of an answer's edge is refused."""
        edges = sorted({edge for answer in answers for edge in answer} - {0, len(text)})
        whole, *parts = self._tokenizer(
            [text, *(text[:edge] for edge in edges)], add_special_tokens=False, verbose=False
        )["input_ids"]
        places = {0: 0, len(text): len(whole)}
        for edge, part in zip(edges, parts, strict=True):
            if whole[: len(part)] != part:
                raise BadItemError(
                    f"{name}: a token holds text of both sides of {quoted(text[max(0, edge - 12) : edge])} | "
                    f"{quoted(text[edge : edge + 12])}; move white space from the prompt's end to the answer"
                )
            places[edge] = len(part)
        targets = np.zeros(len(whole), dtype=bool)
        for start, end in answers:
            targets[places[start] : places[end]] = True
        return Answered(np.array(whole, dtype=np.int32), targets)


def _integers(record: Mapping[str, Any], name: str) -> np.ndarray:
    """Return a list of integers, int64 [n], n at least 1."""
    try:
        values = np.asarray(record.get(name))
    except ValueError:
        values = np.zeros(0)
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
        if values.ndim == 1 and len(values) and values.dtype.kind == "b":
            return values.astype(np.int64)
        raise BadItemError(f"{name}: is no list of integers")
    return values.astype(np.int64)
