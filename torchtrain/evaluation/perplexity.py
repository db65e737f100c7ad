"""Perplexity on long documents, by position; the logits of a token exist for a part of the vocabulary at a time.

Legend: T tokens of a document · t tokens at a time · M model width · V vocabulary.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anchorline.errors import UserError, quoted
from torchtrain.data.corpus import Document, read, source_name
from torchtrain.evaluation.results import Bucket, PerplexityResult, Training
from torchtrain.evaluation.suite import PerplexityConfig
from torchtrain.modeling.parts import head_of
from torchtrain.modeling.placement import input_device, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_TOKENS, _VOCABULARY = 2048, 16_384  # of logits that exist at a time
_FIRST_BUCKET = 256
_ADDED = 16  # tokens that are of no byte: special ones, a space in front


def check_finite(finite: Tensor | bool, model: "PreTrainedModel") -> None:
    """Refuse a model whose logits are not finite: it would answer with one token alone.

    Raises:
        UserError: they are not.
    """
    if not finite:
        name = quoted(model.name_or_path) if model.name_or_path else "the model"
        raise UserError(f"{name}: its logits are not finite; the checkpoint has diverged, evaluate an earlier one")


def long_documents(config: PerplexityConfig, tokenizer: "PreTrainedTokenizerFast", length: int) -> list[list[int]]:
    """Return the first documents that are long enough, each cut to `length` tokens.

    Raises:
        UserError: the source cannot be read, or has too few.
    """
    found: list[list[int]] = []
    for record in read(config.source):
        if isinstance(record, Document) and len(record.text.encode()) + _ADDED >= length:  # a token is a byte at least
            ids = tokenizer(record.text, verbose=False).input_ids
            if len(ids) >= length:
                found.append(list(ids[:length]))
        if len(found) == config.documents:
            return found
    raise UserError(
        f"perplexity.source: {len(found)} documents hold {length:,} tokens, and perplexity.documents asks for "
        f"{config.documents}; give longer ones, or fewer"
    )


def digest_of(documents: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 of token ids."""
    return hashlib.sha256(repr(([list(ids) for ids in documents], None)).encode()).hexdigest()


def buckets(length: int) -> list[tuple[int, int]]:
    """Return [first, end) of positions: the first 256, then each as many as all before."""
    ends = [_FIRST_BUCKET]
    while ends[-1] < length:
        ends.append(2 * ends[-1])
    return list(zip([1, *ends[:-1]], [*ends[:-1], length], strict=True))


@torch.inference_mode()
def document_losses(model: "PreTrainedModel", ids: Sequence[int]) -> Tensor:
    """Return the loss of each token of a document but the first, in nats: [T - 1] float32, on the CPU.

    Raises:
        UserError: one is not finite.
    """
    from transformers import DynamicCache

    cache, losses, device = DynamicCache(config=model.config), [], input_device(model)
    ids_1T, head = torch.tensor([ids], device=device), head_of(model)
    for first in range(0, len(ids) - 1, _TOKENS):
        part_1t = ids_1T[:, first : min(first + _TOKENS, len(ids) - 1)]
        end = first + part_1t.shape[1]
        positions_1t = torch.arange(first, end, device=device)[None]
        hidden_1tM = model.base_model(
            input_ids=part_1t, position_ids=positions_1t, past_key_values=cache, use_cache=True
        ).last_hidden_state
        with weights_of(head):  # which may lie on another device than the last layer, and the first
            place = next(head.parameters()).device
            targets_t = ids_1T[0, first + 1 : end + 1].to(place)
            losses.append(token_losses(hidden_1tM[0].to(place), head, targets_t).cpu())
    losses_T = torch.cat(losses)
    check_finite(losses_T.isfinite().all(), model)
    return losses_T


def token_losses(hidden_tM: Tensor, head: torch.nn.Module, targets_t: Tensor, vocabulary: int = _VOCABULARY) -> Tensor:
    """Return -log p of each target [t] in float32, `vocabulary` logits of each token at a time."""
    weight_VM, bias_V = head.weight, getattr(head, "bias", None)
    assert isinstance(weight_VM, Tensor)
    total_t = hidden_tM.new_full(targets_t.shape, -torch.inf, dtype=torch.float32)
    own_t = torch.zeros_like(total_t)
    for first in range(0, len(weight_VM), vocabulary):
        part = slice(first, first + vocabulary)
        logits_tv = torch.nn.functional.linear(
            hidden_tM, weight_VM[part], None if bias_V is None else bias_V[part]
        ).float()
        total_t = torch.logaddexp(total_t, logits_tv.logsumexp(-1))
        inside_t = (targets_t >= first) & (targets_t < first + logits_tv.shape[1])
        places_t = (targets_t - first).clamp(0, logits_tv.shape[1] - 1)
        own_t = torch.where(inside_t, logits_tv.gather(-1, places_t[:, None])[:, 0], own_t)
    return total_t - own_t


@torch.inference_mode()
def check_logits(model: "PreTrainedModel") -> None:
    """Refuse a model whose logits are not finite, or more than its head's: it scales or caps them.

    Raises:
        UserError: they are.
    """
    ids_BT = torch.arange(8, device=input_device(model))[None] % model.config.vocab_size
    hidden = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits = model(input_ids=ids_BT, use_cache=False).logits
    check_finite(logits.isfinite().all(), model)
    if not torch.equal(logits, head_of(model)(hidden).to(logits.device)):
        raise UserError(
            f"perplexity: {model.config.model_type} scales or caps its logits, which is not supported; leave "
            "perplexity out of the suite"
        )


def bucket_means(losses: Tensor, length: int) -> Iterator[float]:
    """Yield the mean loss of each bucket; `losses` [T - 1] are of the tokens from the second."""
    for first, end in buckets(length):
        yield float(losses[first - 1 : end - 1].double().mean())


def measure_perplexity(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    config: PerplexityConfig,
    training: Training | None,
    facts: dict[str, Any],
    pulse: Callable[[], None],
) -> PerplexityResult:
    """Return the losses of a model by position.

    Args:
        model, tokenizer: what is measured.
        config: on which documents.
        training: how the model was trained, if that is known: its result says whether it was trained on the source.
        facts: what the result holds besides, with its `length`.
        pulse: called after each document.

    Raises:
        UserError: the model scales or caps its logits, or they are not finite.
    """
    length = facts["length"]
    documents = long_documents(config, tokenizer, length)
    check_logits(model)
    losses = []
    for ids in documents:
        losses.append(list(bucket_means(document_losses(model, ids), length)))
        pulse()
    wanted = config.source.model_dump(mode="json", exclude_defaults=True)
    sources = training.data.get("sources", []) if training is not None else []
    known = ", which the run was trained on" if any(wanted.items() <= dict(of).items() for of in sources) else ""
    edges = enumerate(buckets(length))
    return PerplexityResult(
        **facts,
        samples=digest_of(documents),
        text=source_name(config.source) + known,
        buckets=[Bucket(first=a, end=b, losses=[of[i] for of in losses]) for i, (a, b) in edges],
    )
