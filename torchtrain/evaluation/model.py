"""lm-eval's HFLM with three changes: the start that prompts share is computed once, an anchor may precede each prompt,
and logits that are not finite end the evaluation.

Prompts are read in lexical order into one cache, so that the tree of all prompts is computed, and nothing twice. A
prompt alone in its batch is continued in the cache itself. Attention is plain causal attention.

Legend: B prompts at a time · T tokens of the longest · H key heads · D head size · V vocabulary.
"""

# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportTypedDictNotRequiredAccess=false
# (lm-eval's decorators hide the types of its classes)

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, LogitsProcessor
from transformers.cache_utils import DynamicLayer

from anchorline.errors import UserError, quoted_reason
from torchtrain.evaluation.perplexity import check_finite
from torchtrain.modeling.placement import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_PREFILL = 4096  # tokens of the rest of a prompt at a time: its mask is a matrix of so many rows


class SharedPrefixLM(HFLM):
    """A model for lm-eval.

    model: in evaluation mode, with transformers' own attention.
    batch_tokens: tokens whose keys and values are held at a time; a prompt that needs more goes alone.
    length: tokens of a prompt and its answer, at most; `set_length` changes it.
    anchor: ids that are put before each prompt that does not begin with them; a longer prompt is cut behind them.
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
        self._length = self._max_length = length
        self._cut_middle = cut_middle
        self.batch_size_per_gpu = max(1, self._batch_tokens // length)
        self.cut_prompts = self.prompt_tokens = self.computed_tokens = 0

    def _fit(self, ids: list[int], most: int) -> list[int]:
        """Put the anchor before the ids of a prompt, and cut them behind it to `most` tokens."""
        n = len(self._anchor)
        if ids[:n] != self._anchor:
            ids = self._anchor + ids
        if len(ids) <= most:
            return ids
        kept = (most + 1) // 2 if self._cut_middle else n
        return ids[:kept] + ids[len(ids) - max(most - kept, 1) :]

    # --- likelihoods --------------------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See `HFLM`, which puts BOS, or EOS, before a text, also where the tokenizer does. The anchor gets room."""
        self._max_length = self._length - len(self._anchor)
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self._max_length = self._length

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        self._max_length, most = self._length, self._length + 1  # the last token is not read
        self.cut_prompts += sum(len(context) + len(after) > most for _, context, after in requests)
        fitted = [(text, self._fit(context, most - len(after)), after) for text, context, after in requests]
        with torch.inference_mode():
            found = super()._loglikelihood_tokens(fitted, *args, **kwargs)
        check_finite(all(math.isfinite(log_p) for log_p, _ in found), self.model)
        self._pulse()
        return found

    # --- answers ------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See `HFLM`, called batch by batch. Raises UserError: logits that are not finite, or an unknown setting."""
        prompts = []
        for place, request in enumerate(requests):
            text, settings = request.args
            room = normalize_gen_kwargs(dict(settings), self.max_gen_toks)["max_gen_toks"]
            ids = self._fit(self.tok_encode(text), self._length - room)
            alone = not self.shares_prefixes or settings.get("num_beams", 1) > 1
            prompts.append(((repr(settings), alone), ids, len(ids) + room, place))
        prompts.sort()
        self._holds, self._trunk = [], self._new_cache(max((prompt[2] for prompt in prompts), default=0))
        done, size = [""] * len(requests), self.batch_size_per_gpu
        with torch.inference_mode(), tqdm(total=len(requests), desc="Running generate_until requests") as bar:
            for places in self._batches(prompts):
                self.batch_size_per_gpu = len(places)
                batch = [requests[place] for place in places]
                try:
                    answers = super().generate_until(batch, disable_tqdm=True)
                except UserError:
                    raise
                except (ValueError, TypeError) as error:
                    settings = f"{batch[0].task_name}: generation_kwargs {batch[0].args[1]}"
                    raise UserError(f"{settings}: {quoted_reason(error)}; correct the task file") from error
                for place, answer in zip(places, answers, strict=True):
                    done[place] = answer
                bar.update(len(places))
                self._pulse()
        self.batch_size_per_gpu = size
        del self._trunk
        return done

    def _batches(self, prompts: Sequence[tuple[tuple[str, bool], list[int], int, int]]) -> Iterator[list[int]]:
        """Yield the places of prompts that are answered together: of equal settings, within the tokens of a batch.

        prompts: of each its settings and whether it must be alone, ids, tokens with its answer, and place.
        """
        batch, longest, before = [], 0, ("", False)
        for kind, _, tokens, place in prompts:
            longest = max(longest, tokens)
            if batch and (kind != before or kind[1] or longest * (len(batch) + 1) > self._batch_tokens):
                yield batch
                batch, longest = [], tokens
            batch, before = [*batch, place], kind
        if batch:
            yield batch

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the ids of prompts and their mask, [B, T] both; shorter prompts are filled up on the left."""
        encoded = [self.tok_encode(string) for string in strings]
        fitted = [self._fit(ids, left_truncate_len or self._length) for ids in encoded]
        self.cut_prompts += sum(len(ids) > len(fit) for ids, fit in zip(encoded, fitted, strict=True))
        lengths = [len(ids) for ids in fitted]
        pad, longest = self.tokenizer.pad_token_id, max(lengths)
        ids_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in fitted])
        return ids_BT, (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        mask_BT = settings["attention_mask"]
        prompts = [ids_T[mask_T.bool()].tolist() for ids_T, mask_T in zip(context, mask_BT, strict=True)]
        self.prompt_tokens += sum(map(len, prompts))
        if self.shares_prefixes and settings.get("num_beams", 1) == 1 and min(map(len, prompts)) > 1:
            settings["past_key_values"] = self._read(prompts, max_length)
        else:
            self.computed_tokens += sum(map(len, prompts))
        settings = {"eos_token_id": self._end_ids(), "logits_processor": [_CheckFinite(self.model)], **settings}
        return super()._model_generate(context, max_length, stop, **settings)

    def _end_ids(self) -> list[int]:
        kinds = (self.model.generation_config, self.model.config, self.tokenizer)
        found = next((end for kind in kinds if (end := getattr(kind, "eos_token_id", None)) is not None), [])
        return [found] if isinstance(found, int) else found

    # --- the cache of what prompts share ------------------------------------------------------------------------------

    def _read(self, prompts: list[list[int]], room: int) -> DynamicCache:
        """Return a cache with room for so many tokens that holds prompts [B] but the last token of each."""
        read: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for b in sorted(range(len(prompts)), key=lambda b: prompts[b]):
            self._read_on(prompts[b][:-1])
            self.computed_tokens += 1
            if len(prompts) > 1:
                read[b] = [(layer.keys.clone(), layer.values.clone()) for layer in self._trunk.layers]  # pyright: ignore
        if not read:
            return self._trunk
        cache, longest = self._new_cache(room), max(map(len, prompts)) - 1
        for layer in cache.layers:  # a layer of `read` goes as it is copied, because there may not be room for two
            sides = [
                torch.cat([torch.nn.functional.pad(kind, (0, 0, longest - kind.shape[2], 0)) for kind in kinds])
                for kinds in zip(*(read[b].pop(0) for b in range(len(prompts))), strict=True)
            ]
            layer.update(*sides)
        return cache

    def _new_cache(self, room: int) -> DynamicCache:
        """Return a cache with room for so many tokens; transformers' own copies all keys for each token."""
        cache = DynamicCache(config=self.model.config)
        cache.layers = [_RoomyLayer(room) for _ in cache.layers]
        return cache

    def _read_on(self, prompt: list[int]) -> None:
        """Let the cache hold a prompt instead of the one before it."""
        same = (i for i, (x, y) in enumerate(zip(self._holds, prompt, strict=False)) if x != y)
        shared = next(same, min(len(self._holds), len(prompt)))
        for layer in self._trunk.layers if self._holds else ():
            layer.keys, layer.values = layer.keys[:, :, :shared], layer.values[:, :, :shared]  # pyright: ignore
        self._holds = prompt
        self.computed_tokens += len(prompt) - shared
        part = _PREFILL if shared else max(len(prompt), 1)  # from the first token on attention needs no mask
        for first in range(shared, len(prompt), part):
            ids_1T = torch.tensor([prompt[first : first + part]], device=self._device)
            positions_1T = torch.arange(first, first + ids_1T.shape[1], device=self._device)[None]
            self.model(
                input_ids=ids_1T,
                position_ids=positions_1T,
                past_key_values=self._trunk,
                use_cache=True,
                logits_to_keep=1,
            )


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


class _CheckFinite(LogitsProcessor):
    """Refuse logits that are not finite. A word may be masked by -inf."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        check_finite(scores.amax(-1).isfinite().all(), self._model)
        return scores
