"""Perplexity on long documents, by position and on key tokens.

A key token is one that a judge predicts well with all earlier tokens and badly with a short context. Source: LongPPL
(arXiv 2410.23771; github.com/PKU-ML/LongPPL).

Legend: T tokens of a document · t tokens at a time · V vocabulary.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anchorline.errors import UserError, quoted
from torchtrain.data.corpus import Document, read
from torchtrain.evaluation.results import Answer
from torchtrain.evaluation.suite import KeyTokensConfig, PerplexityConfig
from torchtrain.modeling.placement import input_device
from torchtrain.modeling.source import open_tokenizer, resolve_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_TOKENS = 2048  # that the model reads at a time
_LOGITS = 256  # tokens whose logits are in float32 at a time
_FIRST_BUCKET = 256
KEY_TOKENS = "key tokens"
_ADDED = 16  # tokens that are of no byte: special ones, a space in front


def check_finite(finite: Tensor | bool, model: "PreTrainedModel") -> None:
    """Raise UserError for a model whose logits are not finite: it would answer with one token alone."""
    if not finite:
        name = quoted(model.name_or_path) if model.name_or_path else "the model"
        raise UserError(f"{name}: its logits are not finite; the checkpoint has diverged, evaluate an earlier one")


def long_documents(config: PerplexityConfig, tokenizer: "PreTrainedTokenizerFast", length: int) -> list[list[int]]:
    """Return the first long documents, cut to `length` tokens. Raises UserError: an unreadable source, or too few."""
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
    """Return [first, end) of positions: the first 256, then each as many as all before; last all of them."""
    ends = [_FIRST_BUCKET]
    while ends[-1] < length:
        ends.append(2 * ends[-1])
    parts = zip([1, *ends[:-1]], [*ends[:-1], length], strict=True)
    return [*dict.fromkeys([*parts, (1, length)])]


def resolve_judge(judge: str, cache: str, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the folder of a judge. Raises UserError: there is none, or it has other tokens."""
    try:
        folder = resolve_source(judge, cache)
    except UserError as error:
        raise UserError(str(error).replace("model.source", "perplexity.key_tokens.judge", 1)) from None
    if open_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"perplexity.key_tokens.judge {quoted(judge)}: has another vocabulary than the evaluated model; give a "
            "judge with the same tokenizer"
        )
    return folder


def find_key_tokens(
    losses_of: Callable[[Sequence[int]], Tensor], ids: Sequence[int], config: KeyTokensConfig
) -> list[int]:
    """Return the indices of a document's key tokens, by what returns a text's losses; the first `context` tokens are
    none. Of the rest, every `stride` tokens have a short context that begins `context` tokens before.
    """
    long_T, found = losses_of(ids), []
    for start in range(0, len(ids) - config.context, config.stride):
        first = start + config.context
        short_t = losses_of(ids[start : first + config.stride])[config.context - 1 :]
        long_t = long_T[first - 1 : first - 1 + len(short_t)]
        is_key_t = (short_t - long_t > config.gain) & (long_t < config.most_loss)
        found += [first + i for i in is_key_t.nonzero().flatten().tolist()]
    return found


@torch.inference_mode()
def document_losses(model: "PreTrainedModel", ids: Sequence[int]) -> Tensor:
    """Return the loss of each token but the first, nats, float32 [T - 1] on the CPU. Raises UserError: not finite."""
    from transformers import DynamicCache

    cache, losses, device = DynamicCache(config=model.config), [], input_device(model)
    ids_1T = torch.tensor([ids], device=device)
    for first in range(0, len(ids) - 1, _TOKENS):
        part_1t = ids_1T[:, first : min(first + _TOKENS, len(ids) - 1)]
        end = first + part_1t.shape[1]
        positions_1t = torch.arange(first, end, device=device)[None]
        out = model(input_ids=part_1t, position_ids=positions_1t, past_key_values=cache, use_cache=True)
        targets_t = ids_1T[0, first + 1 : end + 1].to(out.logits.device)
        losses += [*map(token_losses, out.logits[0].split(_LOGITS), targets_t.split(_LOGITS))]
    losses_T = torch.cat(losses)
    check_finite(losses_T.isfinite().all(), model)
    return losses_T


def token_losses(logits_tV: Tensor, targets_t: Tensor) -> Tensor:
    """Return -log p of each target [t] in float32, on the CPU. F.cross_entropy is biased at large vocabularies."""
    logits_tV = logits_tV.float()
    return (logits_tV.logsumexp(-1) - logits_tV.gather(-1, targets_t[:, None])[:, 0]).cpu()


def measure_perplexity(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    config: PerplexityConfig,
    length: int,
    pulse: Callable[[], None],
    judged: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Return a TaskResult's fields: losses by document (of `length` tokens) and position, and of key tokens, which
    `judged` has of each document (None: the model finds them). `pulse` is called after each. Raises UserError: a loss
    is not finite.
    """
    documents, answers, of_keys = long_documents(config, tokenizer, length), [], []
    for index, ids in enumerate(documents):
        losses = document_losses(model, ids).double()  # of the tokens from the second
        for first, end in buckets(length):
            part, mean = f"{first:,} to {end - 1:,}", float(losses[first - 1 : end - 1].mean())
            answers.append(Answer(index=index, prediction="", score=mean, part=part))
        if config.key_tokens is not None:
            find = partial(find_key_tokens, partial(document_losses, model), ids, config.key_tokens)
            keys = find() if judged is None else judged[index]
            of_keys += (own := [float(losses[key - 1]) for key in keys])
            if own:
                answers.append(Answer(index=index, prediction="", score=sum(own) / len(own), part=KEY_TOKENS))
        pulse()
    whole = [answer.score for answer in answers if answer.part == f"1 to {length - 1:,}"]
    values = {"loss": sum(whole) / len(whole)}
    if of_keys:  # over all documents together, as LongPPL
        values |= {"key_tokens": len(of_keys), "key_token_loss": sum(of_keys) / len(of_keys)}
    return {"samples": digest_of(documents), "metric": "loss", "values": values, "answers": answers}
