"""From texts to tokens: text is text, whatever it looks like, and a long one takes no more memory than a short one.

A tokenizer needs some 200 bytes for every character of a call, so a long document is cut into pieces, each is tokenised
alone, and their tokens are joined. A cut is exact where no step of the tokenizer looks across it: no added token of the
vocabulary lies there, the normalizer works character by character, and the pre-tokenizer always ends a word there. If
there is no pre-tokenizer, no token may hold the two characters side by side, so that no merge joins them. Where this is
not known, a document is not cut.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from anchorline.errors import UserError, quoted

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# Text handed to the tokenizer at one time: enough for all its threads, little beside the model.
BATCH_CHARACTERS = 1_000_000
PIECE = 1 << 16
MOST_WITHOUT_CUT = 1 << 24  # characters: 3 GB or so for the tokenizer


class Encoder:
    """Encodes texts by a fast tokenizer. Nothing is put in front of them or behind.

    Args:
        tokenizer: one with a `tokenizers` backend.
        special_tokens: what a special token that is written in a text is: `text` like any other, or `control`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", special_tokens: Literal["text", "control"]) -> None:
        self._tokenizer, self._as_text = tokenizer, special_tokens == "text"
        self._cuts = cuts_of(tokenizer.backend_tokenizer)
        self._plain = _is_plain(type(tokenizer))
        self._control = control_tokens(tokenizer)
        names = sorted(special_tokens_of(tokenizer), key=len, reverse=True)
        self._looks = re.compile("|".join(map(re.escape, names))) if names else None

    def looks_special(self, text: str) -> bool:
        """Whether a text holds what is written like a special token."""
        return self._looks is not None and self._looks.search(text) is not None

    def too_long(self, text: str) -> bool:
        """Whether a text holds a stretch without a place to cut it that is more than the tokenizer should be given."""
        return len(text) > MOST_WITHOUT_CUT and max(map(len, self._pieces(text))) > MOST_WITHOUT_CUT

    def encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield the tokens of each text, int32 [tokens], in order.

        Raises:
            UserError: a text holds a special token that the tokenizer cannot write as text.
        """
        parts: list[np.ndarray] = []
        for tokens, ends in self._encode_pieces(texts):
            parts.append(tokens)
            if ends:
                yield parts[0] if len(parts) == 1 else np.concatenate(parts)
                parts = []

    def _encode_pieces(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, bool]]:
        """Yield the tokens of each piece, and whether it is the last of its text."""
        batch: list[tuple[str, bool]] = []
        characters = 0
        for text in texts:
            ahead = None
            for piece in self._pieces(text):
                if ahead is not None:
                    batch.append((ahead, False))
                ahead = piece
                characters += len(piece)
                if characters >= BATCH_CHARACTERS:
                    yield from self._encode_batch(batch)
                    batch, characters = [], len(piece)
            assert ahead is not None
            batch.append((ahead, True))
        yield from self._encode_batch(batch)

    def _encode_batch(self, batch: Sequence[tuple[str, bool]]) -> Iterator[tuple[np.ndarray, bool]]:
        if not batch:
            return
        for ids, (_, ends) in zip(self._ids_of([piece for piece, _ in batch]), batch, strict=True):
            tokens = np.asarray(ids, dtype=np.int32)
            yield (self._without_control(tokens) if self._as_text else tokens), ends

    def _ids_of(self, pieces: list[str]) -> Iterator[list[int]]:
        if not self._plain:
            # verbose=False: a document longer than the model's context is not a mistake here, so no warning about it.
            yield from self._tokenizer(
                pieces, add_special_tokens=False, split_special_tokens=self._as_text, verbose=False
            )["input_ids"]
            return
        # What the call above does of it, without where each token stands in its text.
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self._as_text
        for encoding in backend.encode_batch_fast(pieces, add_special_tokens=False):
            yield encoding.ids

    def _pieces(self, text: str) -> Iterator[str]:
        return iter((text,)) if self._cuts is None or len(text) <= PIECE else self._cuts.pieces(text)

    def _without_control(self, tokens: np.ndarray) -> np.ndarray:
        """Spell out the control tokens that the model itself makes of a text: its vocabulary may hold them like words,
        and then that the tokenizer does not look for them is not enough.
        """
        found = np.isin(tokens, list(self._control.values()))
        if not found.any():
            return tokens
        parts = [
            self._spell(token) if special else [token] for token, special in zip(tokens.tolist(), found, strict=True)
        ]
        return np.array([token for part in parts for token in part], dtype=np.int32)

    def _spell(self, token: int) -> list[int]:
        """Return the tokens of a special token's text: its first character stands by itself, or all of them do."""
        model, control = self._tokenizer.backend_tokenizer.model, set(self._control.values())
        content = next(content for content, index in self._control.items() if index == token)
        for parts in ([content[:1], content[1:]], list(content)):
            ids = [found.id for part in parts if part for found in model.tokenize(part)]
            if ids and not control & set(ids):
                return ids
        raise UserError(
            f"data.special_tokens 'text': a document holds {quoted(content)}, which this tokenizer can only write as "
            f"the control token {token}; remove it from the data, or set data.special_tokens to control"
        )


def _is_plain(kind: type) -> bool:
    """Whether a class leaves encoding to transformers, which leaves it to `tokenizers`."""
    from transformers import PreTrainedTokenizerFast

    return all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus"))


def special_tokens_of(tokenizer: "PreTrainedTokenizerFast") -> dict[str, int]:
    """Return the tokens that are not text, content -> id: those added as special, and BOS, EOS, padding and so on."""
    found = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    found |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {content: index for content, index in found.items() if content and index is not None}


def control_tokens(tokenizer: "PreTrainedTokenizerFast") -> dict[str, int]:
    """Return the special tokens that steer.

    What the model writes where it knows no token does not: text may be unknown.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    unknown = model.get("unk_id")
    if model.get("unk_token") is not None:
        unknown = tokenizer.backend_tokenizer.token_to_id(model["unk_token"])
    return {content: index for content, index in special_tokens_of(tokenizer).items() if index != unknown}


# --- where a document may be cut --------------------------------------------------------------------------------------

# Of a Latin or Chinese letter and what follows it: no word of the patterns below goes on from one to the other.
_LETTER_THEN_SPACE = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_LETTER_THEN_SPACE_OR_STOP = re.compile("(?<=[A-Za-z\u4e00-\u9fff])(?=[ \n\u3001\u3002\uff0c])")

# How byte-level tokenizers find words, each as its makers wrote it. In all of them a run of letters (and a contraction
# after it) ends a word, nothing looks behind, and what looks ahead looks at white space only.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS = (r"\s*[\r\n]+|\s+(?!\S)|\s+", r"\s*[\r\n]|\s+(?!\S)|\s+")
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORDS = {
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",  # GPT-2
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    *(  # GPT-4, Llama 3, Qwen 2 and what is like them
        rf"{contraction}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_MARKS}|{end}"
        for contraction in (_CONTRACTION, "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")
        for digits in (r"\p{N}", r"\p{N}{1,3}")
        for end in _ENDS
    ),
    # Qwen 3.5
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS[0]}",
    *(  # GPT-4o, Llama 4, Mistral's tekken
        rf"{_UPPER}*{_LOWER}+{contraction}|{_UPPER}+{_LOWER}*{contraction}|{digits}|{marks}|{_ENDS[0]}"
        for contraction in ("", _CONTRACTION + "?")
        for digits in (r"\p{N}", r"\p{N}{1,3}")
        for marks in (_MARKS, _MARKS_OR_SLASH)
    ),
}
# Split off what is not a letter, so a cut behind a letter and before no digit is none of their business.
_DIGITS = {r"\p{N}", r"\p{N}{1,3}", r"\d", r"\d{1,3}", "[0-9]"}


class Cuts(NamedTuple):
    """Where a document may be cut: `pattern` matches there, and a piece loses its first character if `drops_space`."""

    pattern: re.Pattern[str]
    drops_space: bool = False  # the normalizer puts one back in front of every piece

    def pieces(self, text: str, size: int = PIECE) -> Iterator[str]:
        """Yield the pieces of a text, each of `size` characters or, up to the next cut, more."""
        assert size > 0
        start = 0
        while cut := self.pattern.search(text, start + size):
            yield text[start : cut.start()]
            start = cut.start() + self.drops_space
        yield text[start:]


def cuts_of(tokenizer: "Tokenizer") -> Cuts | None:
    """Return where a tokenizer's documents may be cut; None where it is not known."""
    backend = json.loads(tokenizer.to_str())
    cuts = _cuts_of_words(backend) or _cuts_of_merges(backend)
    if cuts is None or backend["model"].get("dropout"):
        return None
    for token in backend["added_tokens"]:
        content = token["content"]
        # One that lies across a cut, takes in what follows it, or begins a piece where something would be put in front
        # of it.
        begins = content[:1].isalnum() or (cuts.drops_space and content[:1] in (" ", "\u2581"))
        if cuts.pattern.search(content) or begins or (token["rstrip"] and content[-1:].isalnum()):
            return None
    return cuts


def _cuts_of_words(backend: Mapping[str, Any]) -> Cuts | None:
    """Cuts for a tokenizer whose pre-tokenizer finds words."""
    if not all(_works_by_character(step) for step in _steps(backend["normalizer"], "normalizers")):
        return None
    kinds = [_kind(step) for step in _steps(backend["pre_tokenizer"], "pretokenizers")]
    if None in kinds:
        return None
    if "spaces" in kinds:
        return Cuts(_LETTER_THEN_SPACE)
    return Cuts(_LETTER_THEN_SPACE_OR_STOP) if "words" in kinds else None


def _kind(step: Mapping[str, Any]) -> str | None:
    """Return what a step of a pre-tokenizer does at a cut: ends a word at `spaces`, or at all cuts (`words`);
    `nothing`; None: it is not known.
    """
    kind, pattern = step["type"], step.get("pattern", {})
    if kind == "ByteLevel":
        # One that puts a space in front of what has none would do so to a piece that begins with a full stop.
        return (
            ("spaces" if step["add_prefix_space"] else "words")
            if step.get("use_regex", True)
            else _if_not_prefixing(step)
        )
    if kind == "Metaspace":
        return "spaces" if step.get("split", True) else None
    if kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
        return "spaces"
    if kind in ("Digits", "Punctuation"):
        return "nothing" if step.get("behavior", "Isolated") == "Isolated" else None
    if kind == "Split" and step["behavior"] in ("Isolated", "Removed"):
        if step["behavior"] == "Isolated" and pattern.get("Regex") in _DIGITS and not step["invert"]:
            return "nothing"
        whole = step["behavior"] == "Isolated" or step["invert"]
        return "words" if whole and pattern.get("Regex") in _WORDS else None
    return None


def _if_not_prefixing(step: Mapping[str, Any]) -> str | None:
    return None if step["add_prefix_space"] else "nothing"


def _cuts_of_merges(backend: Mapping[str, Any]) -> Cuts | None:
    """Cuts for a BPE over whole documents, as sentencepiece has it: before spaces that no token joins to a letter."""
    normalizer = _steps(backend["normalizer"], "normalizers")
    prefixes = [step["prepend"] for step in normalizer if step["type"] == "Prepend"]
    others = [step for step in normalizer if step["type"] != "Prepend"]
    marks = [step["content"] for step in others if _writes_spaces(step)]
    for step in _steps(backend["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Metaspace" and not step.get("split", True):
            # It puts a space in front of a text, but not in front of a piece that begins with one.
            marks.append(step["replacement"])
        elif not (
            step["type"] == "Split" and step["pattern"] == {"String": " "} and marks
        ):  # else: none is left (Gemma)
            return None
    mark, model = marks[0] if marks else " ", backend["model"]
    if model["type"] != "BPE" or len(mark) != 1 or mark not in model["vocab"] or set(marks) - {mark}:
        return None
    if prefixes not in ([], [mark]) or not all(map(_works_by_character, others)):
        return None
    joined = {token[i - 1] for token in model["vocab"] for i in range(1, len(token)) if token[i] == mark}
    if any(letter.isascii() and letter.isalpha() for letter in joined):
        return None
    return Cuts(_LETTER_THEN_SPACE, drops_space=bool(prefixes))


def _steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [one for part in step[inner] for one in _steps(part, inner)] if step["type"] == "Sequence" else [step]


def _works_by_character(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer does the same to a text and to its pieces.

    Letters and single spaces combine with nothing before.
    """
    if step["type"] == "Replace":
        pattern = step["pattern"]
        return _writes_spaces(step) or pattern.get("Regex") in (" {2,}", r"\s{2,}")
    return step["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "Precompiled")


def _writes_spaces(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Replace" and step["pattern"] == {"String": " "}
