"""lm-eval's HFLM with three changes: the start that prompts share is computed once, an anchor may precede each prompt,
and logits that are not finite end the evaluation.

Prompts are read in lexical order into one cache. Each prompt then shares with the one before it all that it shares with
any earlier prompt, so that the tree of all prompts is computed, and nothing twice. The prompts of a batch are continued
together, one token each a step. A prompt that is alone in its batch is continued in the cache itself, so that its keys
exist once. Attention is plain causal attention, whatever the model was trained with.

Legend: B prompts at a time · T tokens of the longest · H key heads · D head size · V vocabulary.
"""

# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportTypedDictNotRequiredAccess=false
# (lm-eval's decorators hide the types of its classes)

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from torchtrain.evaluation.perplexity import check_finite
from torchtrain.modeling.placement import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_PREFILL = 4096  # tokens of the rest of a prompt at a time: its mask is a matrix of so many rows
_TAIL = 32  # tokens of an answer that are searched for a text that ends it


class SharedPrefixLM(HFLM):
    """A model for lm-eval.

    Args:
        model: in evaluation mode, with transformers' own attention.
        tokenizer: of the model.
        batch_tokens: tokens whose keys and values are held at a time; a prompt that needs more goes alone.
        length: tokens of a prompt and its answer, at most; `set_length` changes it.
        anchor: ids that are put before each prompt that does not begin with them.
        pulse: called after each batch of answers.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerFast",
        batch_tokens: int,
        length: int,
        anchor: Sequence[int] = (),
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer)
        self._device, self._pulse = input_device(model), pulse
        self._batch_tokens, self._anchor = batch_tokens, list(anchor)
        self.shares_prefixes = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
        self.set_length(length)

    def set_length(self, length: int, cut_middle: bool = False) -> None:
        """Set the most tokens of a prompt and its answer, and where a longer prompt is cut: left, or in its middle."""
        self._max_length, self._cut_middle = length, cut_middle
        self.batch_size_per_gpu = max(1, self._batch_tokens // length)
        self.cut_prompts = self.prompt_tokens = self.computed_tokens = 0

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a prompt, the anchor in front; without special tokens where lm-eval asks for none."""
        ids = list(super().tok_encode(string, add_special_tokens, **kwargs))
        if add_special_tokens is False or ids[: len(self._anchor)] == self._anchor:
            return ids
        return [*self._anchor, *ids]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See `HFLM`, which puts a token in front itself: no anchor here."""
        anchor, self._anchor = self._anchor, []
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self._anchor = anchor

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        self.cut_prompts += sum(len(context) + len(after) > self.max_length + 1 for _, context, after in requests)
        with torch.inference_mode():
            found = super()._loglikelihood_tokens(requests, *args, **kwargs)
        check_finite(all(math.isfinite(log_p) for log_p, _ in found), self.model)
        self._pulse()
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See `HFLM`. Requests that sample, search beams, penalise or differ in that go to HFLM's own generation.

        Raises:
            UserError: logits are not finite.
        """
        if not requests:
            return []
        first = requests[0].args[1]
        settings = normalize_gen_kwargs(dict(first), self.max_gen_toks)
        others = settings.keys() - {"do_sample", "temperature", "until", "max_gen_toks"}
        if settings["do_sample"] or others or any(request.args[1] != first for request in requests):
            return super().generate_until(requests, disable_tqdm)
        return self._greedy(requests, settings["max_gen_toks"], settings["until"] or [])

    def _greedy(self, requests: list[Any], room: int, until: str | list[str]) -> list[str]:
        until = [until] if isinstance(until, str) else until
        prompts = [self._cut(self.tok_encode(request.args[0]), room) for request in requests]
        done: list[str] = [""] * len(prompts)
        with tqdm(total=len(prompts), desc="Running generate_until requests", mininterval=2) as bar:
            for batch, answers in self.answers(prompts, room, until):
                for i, answer in zip(batch, answers, strict=True):
                    text = self.tok_decode(answer)  # pyright: ignore[reportArgumentType]
                    done[i] = postprocess_generated_text(text, until, None)
                    self.cache_hook.add_partial("generate_until", requests[i].args, done[i])
                bar.update(len(batch))
                self._pulse()
        return done

    def _cut(self, ids: list[int], room: int) -> list[int]:
        most = max(self.max_length - room, 1)
        if len(ids) <= most:
            return ids
        self.cut_prompts += 1
        if not self._cut_middle:
            return ids[-most:]
        return ids[: (most + 1) // 2] + ids[len(ids) - most // 2 :]

    @torch.inference_mode()
    def answers(
        self, prompts: Sequence[Sequence[int]], room: int, until: Sequence[str] = ()
    ) -> Iterator[tuple[list[int], list[list[int]]]]:
        """Yield the places of a batch's prompts and what follows each: at most `room` tokens, greedy.

        An answer does not hold the token that ends it. A text of `until` that ends it is a part of it.
        """
        order, holds = sorted(range(len(prompts)), key=lambda i: list(prompts[i])), ()
        trunk = self._new_cache(max(map(len, prompts), default=0) + room) if self.shares_prefixes else None
        for batch in self._batches(order, prompts, room):
            cache, first, read = trunk or DynamicCache(config=self.model.config), [], []
            for i in batch:
                first.append(self._read_on(holds, prompts[i], cache))
                holds = prompts[i] if trunk else ()
                if len(batch) > 1:
                    read.append([(layer.keys.clone(), layer.values.clone()) for layer in cache.layers])  # pyright: ignore
            lengths = [len(prompts[i]) for i in batch]
            said = self._go_on(first, lengths, self._stack(read, max(lengths), room) if read else cache, room, until)
            if trunk:
                _shorten(trunk, len(holds))
            self.prompt_tokens += sum(lengths)
            yield batch, said

    def _batches(self, order: list[int], prompts: Sequence[Sequence[int]], room: int) -> list[list[int]]:
        batches: list[list[int]] = []
        longest = 0
        for i in order:
            longest = max(longest, len(prompts[i]) + room)
            if batches and self.shares_prefixes and longest * (len(batches[-1]) + 1) <= self._batch_tokens:
                batches[-1].append(i)
            else:
                batches.append([i])
                longest = len(prompts[i]) + room
        return batches

    def _new_cache(self, room: int) -> DynamicCache:
        """Return a cache with room for so many tokens; transformers' own copies all keys for each token."""
        cache = DynamicCache(config=self.model.config)
        cache.layers = [_RoomyLayer(room) for _ in cache.layers]
        return cache

    def _read_on(self, before: Sequence[int], prompt: Sequence[int], cache: DynamicCache) -> int:
        """Let a cache that holds `before` hold a prompt; return the token that follows."""
        same = (i for i, (x, y) in enumerate(zip(before, prompt, strict=False)) if x != y)
        shared = next(same, min(len(before), len(prompt)))
        # The last token runs even where all are shared: its logits are needed.
        shared = min(shared, len(prompt) - 1) if self.shares_prefixes else 0
        if len(before) > shared:
            _shorten(cache, shared)
        self.computed_tokens += len(prompt) - shared
        part = _PREFILL if shared else len(prompt)  # from the first token on attention needs no mask
        logits_V = torch.empty(0)
        for first in range(shared, len(prompt), part):
            ids_1T = torch.tensor([list(prompt[first : first + part])], device=self._device)
            positions_1T = torch.arange(first, first + ids_1T.shape[1], device=self._device)[None]
            out = self.model(
                input_ids=ids_1T, position_ids=positions_1T, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            logits_V = out.logits[0, -1]
        check_finite(_is_finite(logits_V), self.model)
        return int(logits_V.argmax())

    def _ends(self, answer: list[int], ends: frozenset[int], until: Sequence[str]) -> bool:
        """Whether an answer is over; the token that ends it is taken away."""
        if answer[-1] in ends:
            answer.pop()
            return True
        return bool(until) and any(text in self.tok_decode(answer[-_TAIL:]) for text in until)  # pyright: ignore

    def _end_ids(self) -> frozenset[int]:
        kinds = (self.model.generation_config, self.model.config, self.tokenizer)
        found = next((end for kind in kinds if (end := getattr(kind, "eos_token_id", None)) is not None), [])
        return frozenset([found] if isinstance(found, int) else found)

    def _go_on(
        self, first: list[int], lengths: list[int], cache: DynamicCache, room: int, until: Sequence[str]
    ) -> list[list[int]]:
        """Return answers that begin with the tokens `first`, to prompts [B] of these lengths that the cache holds."""
        ends, answers, device = self._end_ids(), [[token] for token in first], self._device
        lengths_B, next_B = torch.tensor(lengths, device=device), torch.tensor(first, device=device)
        longest = max(lengths)
        mask_BT = (torch.arange(longest, device=device) >= longest - lengths_B[:, None]).long()
        open_B = [not self._ends(answer, ends, until) for answer in answers]
        finite = torch.ones((), dtype=torch.bool, device=device)  # read once, behind the last token
        for step in range(room - 1):
            if not any(open_B):
                break
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(first), 1)], 1)
            logits_BV = self.model(
                input_ids=next_B[:, None],
                position_ids=(lengths_B + step)[:, None],
                attention_mask=mask_BT if len(first) > 1 else None,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
            next_B = logits_BV.argmax(-1).to(device)
            finite = finite & _is_finite(logits_BV).to(device)
            for b, token in enumerate(next_B.tolist()):
                if open_B[b]:
                    answers[b].append(token)
                    open_B[b] = not self._ends(answers[b], ends, until)
        check_finite(finite, self.model)
        return answers

    def _stack(self, read: list[list[tuple[Tensor, Tensor]]], longest: int, room: int) -> DynamicCache:
        """Lay keys and values side by side, shorter ones filled up on the left; each layer of `read` goes as it is
        copied, because there may not be room for two.
        """
        cache = self._new_cache(longest + room)
        for layer in cache.layers:
            sides = [
                torch.cat([torch.nn.functional.pad(kind, (0, 0, longest - kind.shape[2], 0)) for kind in kinds])
                for kinds in zip(*(part.pop(0) for part in read), strict=True)
            ]
            layer.update(*sides)
        return cache


class _RoomyLayer(DynamicLayer):
    """Keys and values [B, H, T, D] with room behind them."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._whole = [x.new_empty(*x.shape[:2], self._room, x.shape[3]) for x in (key_states, value_states)]
        self.keys, self.values = (whole[:, :, :0] for whole in self._whole)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        held = self.keys.shape[2]
        tokens = held + key_states.shape[2]
        for whole, new in zip(self._whole, (key_states, value_states), strict=True):
            whole[:, :, held:tokens] = new
        self.keys, self.values = (whole[:, :, :tokens] for whole in self._whole)
        return self.keys, self.values


def _shorten(cache: DynamicCache, tokens: int) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]  # pyright: ignore


def _is_finite(logits: Tensor) -> Tensor:
    """Whether the largest logit is a number, which it is not where one is NaN. A word may be masked by -inf."""
    return logits.amax(-1).isfinite().all()
