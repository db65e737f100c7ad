"""Batched greedy generation with a KV cache: what prompts share at their start is computed once.

Prompts are taken in lexical order, so that each shares with the one before all that it shares with any before: what is
computed is the tree of a batch's prompts. Then they go on together, a token each a step. A prompt that is too long for
company is answered where the one before was, so that what they share stays, and keys exist once. Attention is plain
causal attention, whatever the model was trained with.

Legend: B prompts at a time · T tokens of the longest · H key heads · D head size.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anchorline.errors import UserError, quoted
from torchtrain.modeling.placement import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFILL = 4096  # tokens of the rest of a prompt at a time: its mask is a matrix of so many rows


@dataclass(frozen=True)
class AnswerCost:
    """What a batch cost: prompt tokens as they stand, those computed, and tokens generated."""

    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int


class Generator:
    """Greedy answers of one model.

    Args:
        model: in evaluation mode, with transformers' own attention.
        batch_tokens: tokens whose keys and values are held at a time; a prompt that needs more goes alone.
        stop: ids that end an answer.
        opens: whether an answer has a token at least, so that none of `stop` is its first.
    """

    def __init__(self, model: "PreTrainedModel", batch_tokens: int, stop: Sequence[int], opens: bool = False) -> None:
        self._model, self._batch_tokens, self._stop = model, batch_tokens, frozenset(stop)
        self._never_first = sorted(self._stop) if opens else []
        self.shares_prefixes = _holds_all_keys(model)

    def answers(
        self, prompts: Sequence[Sequence[int]], room: int, on_batch: Callable[[int, AnswerCost], None] = lambda *_: None
    ) -> list[list[int]]:
        """Return what follows each prompt: at most `room` tokens, without the one that ends it.

        Args:
            prompts: token ids, special ones included.
            room: tokens of an answer.
            on_batch: called with how many prompts are done, and the work of the last batch.

        Raises:
            UserError: logits are not finite.
        """
        found: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda i: list(prompts[i]))
        most = max(map(len, prompts), default=0) + room
        trunk: _Trunk | None = None  # of prompts that go alone: what they share stays from one to the next
        for batch in self._batches(order, prompts, room):
            if len(batch) == 1 and self.shares_prefixes:
                trunk = trunk or _Trunk(_roomy_cache(self._model, most), ())
                answer, computed = self._answer_alone(prompts[batch[0]], room, trunk)
                found[batch[0]] = answer
            else:
                trunk = None
                parts, computed = self._read([prompts[i] for i in batch])
                for i, answer in zip(batch, self._go_on(parts, room), strict=True):
                    found[i] = answer
            tokens = sum(len(prompts[i]) for i in batch)
            on_batch(len(found), AnswerCost(tokens, computed, sum(len(found[i]) for i in batch)))
        return [found[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def log_likelihoods(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        on_batch: Callable[[int, AnswerCost], None] = lambda *_: None,
    ) -> list[float]:
        """Return log p of what follows each context, in nats: float32 logits, one context and continuation at a time.

        Args:
            pairs: token ids of contexts (one at least) and of what follows (one at least).
            on_batch: called with how many pairs are done, and the work of the last.

        Raises:
            UserError: logits are not finite.
        """
        from transformers import DynamicCache

        found: dict[int, float] = {}
        order = sorted(range(len(pairs)), key=lambda i: [*pairs[i][0], *pairs[i][1]])
        cache, before = DynamicCache(config=self._model.config), []
        logits_tV = torch.empty(0)
        for i in order:
            context, continuation = list(pairs[i][0]), list(pairs[i][1])
            ids = context + continuation[:-1]
            computed = 0
            if ids != before or len(logits_tV) < len(continuation):  # of MMLU's four, one is computed
                shared = min(_shared(before, ids), len(context) - 1) if self.shares_prefixes else 0
                if not self.shares_prefixes:
                    cache = DynamicCache(config=self._model.config)
                elif len(before) > shared:
                    _cut(cache, shared)
                parts = []
                for first in range(shared, len(ids), _PREFILL):
                    part = ids[first : first + _PREFILL]
                    wanted = first + len(part) - max(len(context) - 1, first)
                    logits = self._logits(torch.tensor([part]), first, cache, max(wanted, 1))[0]
                    parts += [logits] if wanted > 0 else []
                logits_tV, before, computed = torch.cat(parts), ids, len(ids) - shared
            targets_t = torch.tensor(continuation, device=logits_tV.device)
            log_p_tV = logits_tV[-len(continuation) :].float().log_softmax(-1)
            found[i] = float(log_p_tV.gather(-1, targets_t[:, None]).double().sum())
            check_finite(math.isfinite(found[i]), self._model)
            on_batch(len(found), AnswerCost(len(context) + len(continuation), computed, 0))
        return [found[i] for i in range(len(pairs))]

    def _batches(self, order: list[int], prompts: Sequence[Sequence[int]], room: int) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in order:
            longest = max(len(prompts[j]) for j in [*batch, i]) + room
            if batch and (not self.shares_prefixes or longest * (len(batch) + 1) > self._batch_tokens):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    @torch.inference_mode()
    def _read(self, prompts: list[Sequence[int]]) -> tuple[list["_Read"], int]:
        """Run prompts through the model, each from where it differs from the one before."""
        from transformers import DynamicCache

        read: list[_Read] = []
        before: Sequence[int] = ()
        cache, computed = DynamicCache(config=self._model.config), 0
        for prompt in prompts:
            token, new = self._read_on(before, prompt, cache)
            before, computed = prompt, computed + new
            read.append(_Read(len(prompt), token, *((None, _keys(cache)) if self.shares_prefixes else (cache, []))))
        return read, computed

    def _read_on(self, before: Sequence[int], prompt: Sequence[int], cache: object) -> tuple[int, int]:
        """Let a cache that holds `before` hold a prompt: the token that follows, and how many were computed."""
        # The last token runs even where all are shared: its logits are needed.
        shared = min(_shared(before, prompt), len(prompt) - 1) if self.shares_prefixes else 0
        if len(before) > shared:
            _cut(cache, shared)
        logits_V: Tensor | None = None
        most = _PREFILL if shared else len(prompt)  # from the first token on attention needs no mask
        for first in range(shared, len(prompt), most):
            logits_V = self._step(torch.tensor([prompt[first : first + most]]), first, cache)[0]
        assert logits_V is not None, "a prompt has a token"
        check_finite(_is_finite(logits_V), self._model)
        if self._never_first:
            logits_V[self._never_first] = -torch.inf
        return int(logits_V.argmax()), len(prompt) - shared

    @torch.inference_mode()
    def _answer_alone(self, prompt: Sequence[int], room: int, trunk: "_Trunk") -> tuple[list[int], int]:
        """Answer a prompt in the place where the one before was answered: its keys exist once, and are never copied."""
        token, computed = self._read_on(trunk.holds, prompt, trunk.cache)
        answer = [] if token in self._stop else [token]
        answer = self._go_on_alone(trunk.cache, len(prompt), answer, room)
        trunk.holds = prompt
        _cut(trunk.cache, len(prompt))
        return answer, computed

    def _step(self, ids_BT: Tensor, first: int, cache: object) -> Tensor:
        return self._logits(ids_BT, first, cache, 1)[:, -1]

    def _logits(self, ids_BT: Tensor, first: int, cache: object, keep: int) -> Tensor:
        """Run tokens from position `first` on; return the logits of the last `keep` of them."""
        ids_BT = ids_BT.to(input_device(self._model))
        positions_1T = torch.arange(first, first + ids_BT.shape[1], device=ids_BT.device)[None]
        out = self._model(
            input_ids=ids_BT, position_ids=positions_1T, past_key_values=cache, use_cache=True, logits_to_keep=keep
        )
        return out.logits

    @torch.inference_mode()
    def _go_on(self, read: list["_Read"], room: int) -> list[list[int]]:
        """Generate for all prompts of a batch together."""
        answers = [[] if part.next in self._stop else [part.next] for part in read]
        open_B = [bool(answer) for answer in answers]
        if not self.shares_prefixes:
            return [self._go_on_alone(read[0].cache, read[0].tokens, answers[0], room)]
        cache, mask_BT = _stack(read, room, self._model)
        device = input_device(self._model)
        next_B = torch.tensor([part.next for part in read], device=device)
        positions_B = torch.tensor([part.tokens for part in read], device=device)
        finite = torch.ones((), dtype=torch.bool, device=device)  # read once, behind the last token
        for _ in range(room - 1):
            if not any(open_B):
                break
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(read), 1)], 1)
            out = self._model(
                input_ids=next_B[:, None],
                position_ids=positions_B[:, None],
                attention_mask=mask_BT,
                past_key_values=cache,
                use_cache=True,
            )
            next_B, positions_B = out.logits[:, -1].argmax(-1), positions_B + 1
            finite = finite & _is_finite(out.logits[:, -1]).to(device)
            for b, token in enumerate(next_B.tolist()):
                open_B[b] = open_B[b] and token not in self._stop
                if open_B[b]:
                    answers[b].append(token)
        check_finite(finite, self._model)
        return answers

    def _go_on_alone(self, cache: object, tokens: int, answer: list[int], room: int) -> list[int]:
        finite: Tensor | bool = True
        while answer and len(answer) < room:
            logits_V = self._step(torch.tensor([answer[-1:]]), tokens + len(answer) - 1, cache)[0]
            finite = _is_finite(logits_V) & finite
            token = int(logits_V.argmax())
            if token in self._stop:
                break
            answer.append(token)
        check_finite(finite, self._model)
        return answer


def check_finite(finite: Tensor | bool, model: "PreTrainedModel") -> None:
    """Refuse a model whose logits are not finite: all that it says is one token, and worth nothing.

    Raises:
        UserError: they are not.
    """
    if not finite:
        name = quoted(model.name_or_path) if model.name_or_path else "the model"
        raise UserError(f"{name}: its logits are not finite; the checkpoint has diverged, evaluate an earlier one")


def _is_finite(logits: Tensor) -> Tensor:
    """Whether the largest logit is a number, which it is not beside NaN. A word may be masked by -inf."""
    return logits.amax(-1).isfinite().all()


@dataclass(frozen=True)
class _Read:
    """A prompt that was read: its tokens, the token that follows, and the keys and values [1, H, T, D] of each layer;
    the cache itself of a model whose layers hold more than these.
    """

    tokens: int
    next: int
    cache: object | None
    keys: list[tuple[Tensor, Tensor]]


@dataclass
class _Trunk:
    """A cache with room behind what it holds, and the tokens of that."""

    cache: object
    holds: Sequence[int]


def _holds_all_keys(model: "PreTrainedModel") -> bool:
    """Whether every layer keeps every key, so that a cache can be cut and stacked: no windows, no states."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    layers = DynamicCache(config=model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two prompts share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _cut(cache: object, tokens: int) -> None:
    for layer in cache.layers:  # pyright: ignore[reportAttributeAccessIssue]
        layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]


def _keys(cache: object) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _roomy_layer() -> Any:
    """Return a kind of cache layer, made once: transformers takes long to import."""
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):
        """Keys and values [B, H, T, D] with room behind them: the layer it stands for copies all of them each token."""

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
            keys, values = (whole[:, :, :tokens] for whole in self._whole)
            self.keys, self.values = keys, values
            return keys, values

    return RoomyLayer


def _roomy_cache(model: "PreTrainedModel", room: int) -> object:
    """Return a cache of one prompt with its answer, of at most `room` tokens. `_cut` keeps the room."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.layers = [_roomy_layer()(room) for _ in cache.layers]
    return cache


def _stack(read: list[_Read], room: int, model: "PreTrainedModel") -> tuple[object, Tensor]:
    """Lay caches side by side, shorter ones filled up on the left: the cache, and what of it is seen [B, T].

    Each layer of `read` goes as it is copied: of long prompts there is not room for two.
    """
    from transformers import DynamicCache

    longest = max(part.tokens for part in read)
    cache = DynamicCache()
    layers: list[Any] = []
    for _ in list(read[0].keys):
        sides = [
            torch.cat([torch.nn.functional.pad(kind, (0, 0, longest - kind.shape[2], 0)) for kind in kinds])
            for kinds in zip(*(part.keys.pop(0) for part in read), strict=True)
        ]
        layers.append(_roomy_layer()(longest + room))
        layers[-1].update(*sides)
    cache.layers = layers
    mask_BT = torch.ones(len(read), longest, dtype=torch.long, device=input_device(model))
    for b, part in enumerate(read):
        mask_BT[b, : longest - part.tokens] = 0
    return cache, mask_BT
