"""Bugs of the loss and its gradients: labels, chunks, micro-batches and ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity_tests.zoo import Bug, bug
from parity_tests.zoo.patch import around, attention, batches, method, swap
from torchtrain.attention.engines.gather import _GatherKeys
from torchtrain.data.rows import build_row
from torchtrain.data.weights import LossWeights
from torchtrain.distributed.world import ALONE
from torchtrain.marks import ANCHOR, IGNORED
from torchtrain.modeling.head import AS_THEY_ARE, hidden_states
from torchtrain.training.labels import Labels, find_labels
from torchtrain.training.loss import _add_gradients, _losses, chunked_cross_entropy
from torchtrain.training.losses import Losses
from torchtrain.training.optimizer import Optimizer, _move_gradients
from torchtrain.training.step import make_micro_batches, sum_weights
from torchtrain.training.strategy import Replicated


def _anchor_gradient_overwritten_backward(ctx, grad_MKD: Tensor):
    plan, (B, T, K, D) = ctx.plan, ctx.shape
    grad = grad_MKD.new_zeros(B * T, K, D)
    for slot, token in enumerate(plan.k_index_M.tolist()):
        grad[token] = grad_MKD[slot]
    return grad.view(B, T, K, D), None


anchor_gradient_overwritten = Bug(
    lambda: patch.object(_GatherKeys, "backward", staticmethod(_anchor_gradient_overwritten_backward))
)


def _anchor_detached(of):
    def detach(attend, q, k, v, plan, **options):
        is_anchor = (plan.document_ids_BT == ANCHOR)[:, :, None, None]
        k, v = (torch.where(is_anchor, x.detach(), x) if name == of else x for name, x in (("k", k), ("v", v)))
        return attend(q, k, v, plan, **options)

    return attention(detach)


anchor_key_gradient_dropped = Bug(lambda: _anchor_detached("k"))
anchor_value_gradient_dropped = Bug(lambda: _anchor_detached("v"))


@Bug
@contextmanager
def clip_before_accumulation() -> Iterator[None]:
    limit = float("inf")

    def note(init, self, model, train):
        nonlocal limit
        limit = train.clip_norm
        init(self, model, train)

    def clip(original, model, batch, plan=None):
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        return original(model, batch, plan)

    with method(Optimizer, "__init__", note), around(hidden_states, clip):
        yield


@bug(around, build_row)
def cross_document_targets(build, spans, pack, *args, **kwargs):
    return build(spans, pack.model_copy(update={"cross_document_targets": True}), *args, **kwargs)


@bug(swap, _move_gradients)
def gradient_accumulated_twice(masters, parameters):
    for master, parameter in zip(masters, parameters, strict=True):
        gradient = parameter.grad.float().clone()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)


@bug(method, Replicated, "backward")
def gradient_averaged_over_ranks(backward, self, loss, last):
    backward(self, loss, last)
    if last:
        for master in self.optimizer.masters:
            if master.grad is not None:
                master.grad /= self.world.size


@bug(batches)
def labels_shifted_twice(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"shift_labels": F.pad(batch["shift_labels"][:, 1:], (0, 1), value=IGNORED)}


@bug(around, hidden_states)
def last_micro_batch_only(original, model, batch, plan=None):
    model.zero_grad()
    return original(model, batch, plan)


@bug(around, _losses)
def logits_in_bf16(losses, logits_nV, *rest):
    return losses(logits_nV.bfloat16().to(logits_nV.dtype), *rest)


@bug(around, chunked_cross_entropy)
def loss_chunk_remainder_dropped(original, head, hidden, labels, chunk, **how):
    kept = len(labels) // chunk * chunk
    return original(head, hidden, Labels(labels.index_n[:kept], labels.labels_n[:kept]), chunk, **how)


@bug(around, chunked_cross_entropy)
def loss_gradient_of_last_chunk(original, head, hidden, labels, chunk, **how):
    before = max(len(labels) - 1, 0) // chunk * chunk
    total, each = original(head, hidden, labels, chunk, **how)
    if not before or not torch.is_grad_enabled():
        return total, each
    early = type(labels)(labels.index_n[:before], labels.labels_n[:before])
    # What the earlier chunks give the head is taken away again; hidden keeps its own.
    theirs, _ = original(head, hidden.detach(), early, chunk, **how)
    return total - (theirs - theirs.detach()), each


def _mean_losses(losses, self, part, *more):
    total, each_Bt = losses(self, part, *more)
    return total / (part["shift_labels"] != IGNORED).sum().clamp(min=1), each_Bt


@Bug
@contextmanager
def loss_per_micro_batch() -> Iterator[None]:
    with method(Replicated, "losses", _mean_losses), swap(sum_weights, lambda parts, world: len(parts)):
        yield


def _own_labels(parts, world):
    return sum_weights(parts, ALONE) * world.size


@bug(around, find_labels)
def labels_of_first_row(original, shift_labels, *more):
    first = torch.arange(len(shift_labels))[:, None] == 0
    return original(torch.where(first, shift_labels, IGNORED), *more)


losses_of_other_domains = Bug(
    lambda: patch.object(
        Losses, "masks", lambda self, part: [part["domain_ids"] + 1 == i for i in range(len(self.by_domain))]
    )
)

loss_per_rank = Bug(lambda: swap(sum_weights, _own_labels))


@bug(around, chunked_cross_entropy)
def masked_tokens_counted(original, head, hidden, labels, chunk, **how):
    total, each = original(head, hidden, labels, chunk, **how)
    share = len(labels) / each.numel()
    return total * share, each * share


@bug(method, Replicated, "backward")
def reduced_every_micro_batch(backward, self, loss, last):
    backward(self, loss, last=True)


@bug(method, Replicated, "backward")
def reduced_first_micro_batch(backward, self, loss, last):
    backward(self, loss, last=not last)


@bug(around, build_row)
def tag_trained_on(build, *args, **kwargs):
    row = build(*args, **kwargs)
    documents, labels, ids = row["document_ids"], row["shift_labels"], row["input_ids"]
    has_next = (documents[:-1] == documents[1:]) & (documents[1:] > ANCHOR)
    labels[:-1] = np.where(has_next & (labels[:-1] == IGNORED), ids[1:], labels[:-1])
    return row


@bug(around, build_row)
def answers_mask_unshifted(build, spans, *args, **kwargs):
    moved = [span if span.targets is None else span._replace(targets=np.roll(span.targets, 1)) for span in spans]
    return build(moved, *args, **kwargs)


@bug(swap, sum_weights)
def answers_counted_before_the_mask(batches, world):
    """Every token whose next one is of its document."""
    rows = [batch.part["document_ids"] for batch in batches]
    (count,) = world.sum([sum(int((x[:, 1:] == x[:, :-1]).logical_and(x[:, 1:] > ANCHOR).sum()) for x in rows)])
    return count


@bug(method, nn.Module, "load_state_dict")
def tied_embeddings_untied(load, self, *args, **kwargs):
    result = load(self, *args, **kwargs)
    config = getattr(self, "config", None)
    if config is not None and config.tie_word_embeddings:
        self.lm_head.weight = nn.Parameter(self.lm_head.weight.detach().clone())
    return result


@bug(around, _add_gradients)
def vocabulary_beyond_first_part(original, *given):
    losses_n = original(*given)
    for total in given[-1]:
        total[8192:] = 0
    return losses_n


@bug(method, LossWeights, "weigh")
def weight_of_the_neighbour(weigh, self, row, random):
    weighed = weigh(self, row, random)
    return weighed | {"weights": np.roll(weighed["weights"], 1)}


@bug(around, make_micro_batches)
def weights_lost_in_accumulation(original, batches, *more):
    first, *others = batches
    bare = ({name: x for name, x in batch.items() if name != "weights"} for batch in others)
    return original([first, *bare], *more)


@bug(swap, sum_weights)
def weights_divided_by_tokens(batches, world):
    (count,) = world.sum([sum(len(batch.labels) for batch in batches)])
    return count


weights_summed_by_rank = Bug(lambda: swap(sum_weights, _own_labels))


logits_divisor_ignored = Bug(
    lambda: around(_losses, lambda losses, *args: losses(*args[:-1], args[-1]._replace(divisor=1.0)))
)
logits_cap_ignored = Bug(lambda: around(_losses, lambda f, *given: f(*given[:-1], given[-1]._replace(cap=None))))


@bug(around, _losses)
def logits_rule_without_gradient(losses, logits_nV, labels_n, scale, rule):
    """Of a divisor and a soft cap: values as they are, gradients as if they were the head's own."""
    made_nV = logits_nV * (rule.factor / rule.divisor)
    if rule.cap is not None:
        made_nV = torch.tanh(made_nV / rule.cap) * rule.cap
    return losses(made_nV, labels_n, scale, AS_THEY_ARE)


@bug(around, chunked_cross_entropy)
def head_bias_dropped(original, head, *args, **how):
    with patch.object(head, "bias", None):
        return original(head, *args, **how)


@bug(around, _add_gradients)
def head_bias_of_last_chunk(add_gradients, *given):
    for total in given[-1]:
        if total.dim() == 1:
            total.zero_()
    return add_gradients(*given)
