"""Bugs of the loss and its gradients: labels, chunks, micro-batches and ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import attention, batches, swap, wrap
from torchtrain.attention.engines.gather import _GatherKeys
from torchtrain.data.rows import build_row
from torchtrain.distributed.world import ALONE
from torchtrain.marks import ANCHOR, IGNORED
from torchtrain.modeling.parts import hidden_states
from torchtrain.training.labels import Labels, find_labels
from torchtrain.training.loss import _add_gradients, _losses, chunked_cross_entropy
from torchtrain.training.losses import Losses
from torchtrain.training.optimizer import Optimizer, _move_gradient
from torchtrain.training.step import count_labels
from torchtrain.training.strategy import Replicated


def _anchor_gradient_overwritten_backward(ctx, grad_MKD: Tensor):
    plan, (B, T, K, D) = ctx.plan, ctx.shape
    grad = grad_MKD.new_zeros(B * T, K, D)
    for slot, token in enumerate(plan.k_index_M.tolist()):
        grad[token] = grad_MKD[slot]
    return grad.view(B, T, K, D), None


anchor_gradient_overwritten = Bug(
    what="gradients of the anchor's copies overwritten",
    where="x.grad[index] = g where index repeats: index_put without accumulate=True, seen in reviews of gather kernels",
    stage="gradients",
    apply=lambda: patch.object(_GatherKeys, "backward", staticmethod(_anchor_gradient_overwritten_backward)),
    likely={"variant": "anchor", "engine": "sdpa"},
)


def _anchor_key_gradient_dropped(attend):
    def detach(q, k, v, plan, **options):
        is_anchor = (plan.document_ids_BT == ANCHOR)[:, :, None, None]
        return attend(q, torch.where(is_anchor, k.detach(), k), v, plan, **options)

    return detach


anchor_key_gradient_dropped = Bug(
    what="K's anchor gradient dropped",
    where="shared prefixes kept under no_grad, as prefix caches are; seen in reviews of shared-prefix training",
    stage="gradients",
    apply=lambda: attention(_anchor_key_gradient_dropped),
    likely={"variant": "anchor"},
)


def _anchor_value_gradient_dropped(attend):
    def detach(q, k, v, plan, **options):
        is_anchor = (plan.document_ids_BT == ANCHOR)[:, :, None, None]
        return attend(q, k, torch.where(is_anchor, v.detach(), v), plan, **options)

    return detach


anchor_value_gradient_dropped = Bug(
    what="V's anchor gradient dropped",
    where="shared prefixes kept under no_grad, as prefix caches are; seen in reviews of shared-prefix training",
    stage="gradients",
    apply=lambda: attention(_anchor_value_gradient_dropped),
    likely={"variant": "anchor"},
)


_clip_before_accumulation_init = Optimizer.__init__


@contextmanager
def _clip_before_accumulation() -> Iterator[None]:
    limit = float("inf")

    def init(self, model, train):
        nonlocal limit
        limit = train.clip_norm
        _clip_before_accumulation_init(self, model, train)

    def make(original):
        def clip(model, batch, plan=None):
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            return original(model, batch, plan)

        return clip

    with patch.object(Optimizer, "__init__", init), wrap(hidden_states, make):
        yield


# What has been accumulated is clipped after every micro-batch, and so what came first counts least.
clip_before_accumulation = Bug(
    what="gradients clipped before they are accumulated",
    where="transformers issues 986 and 1563 (the example scripts), praxis PR 6",
    stage="gradients",
    apply=_clip_before_accumulation,
    likely={"dtype": "float32"},
)


def _cross_document_targets(build):
    def across(spans, pack, *args, **kwargs):
        return build(spans, pack.model_copy(update={"cross_document_targets": True}), *args, **kwargs)

    return across


cross_document_targets = Bug(
    what="cross-document targets kept",
    where="AnchorContext; torchtitan before PR 4075, torchtune issue 1177, profam PR 504",
    stage="loss",
    apply=lambda: wrap(build_row, _cross_document_targets),
)


def _keep_gradient(master, parameter):
    gradient = parameter.grad.float().clone()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


gradient_accumulated_twice = Bug(
    what="gradients of earlier micro-batches added twice",
    where="llm.c PR 548 (a step's gradients deposited twice); seen in reviews of hand-made float32 accumulation",
    stage="gradients",
    apply=lambda: swap(_move_gradient, _keep_gradient),
    likely={"dtype": "bfloat16"},
)


_gradient_averaged_over_ranks_backward = Replicated.backward


def _average(self, loss, last):
    _gradient_averaged_over_ranks_backward(self, loss, last)
    if last:
        for master in self.optimizer.masters:
            if master.grad is not None:
                master.grad /= self.world.size


gradient_averaged_over_ranks = Bug(
    what="gradients averaged over ranks where they should be added",
    where="DDP and FSDP average by themselves; prime-rl PR 2562 and torchtitan PR 2206 had to undo it",
    stage="gradients",
    apply=lambda: patch.object(Replicated, "backward", _average),
    likely={"ranks": "2"},
)


def _shift(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"shift_labels": F.pad(batch["shift_labels"][:, 1:], (0, 1), value=IGNORED)}


labels_shifted_twice = Bug(
    what="labels shifted twice",
    where=(
        "transformers itself: GIT from 4.49 on (issue 47394), Florence-2 (PR 46898), Moonshine (PR "
        "46784); users: issue 32944"
    ),
    stage="loss",
    apply=lambda: batches(_shift),
)


def _last_micro_batch_only(original):
    def clear(model, batch, plan=None):
        model.zero_grad()
        return original(model, batch, plan)

    return clear


last_micro_batch_only = Bug(
    what="gradients cleared between micro-batches",
    where="RAE issue 67: zero_grad inside the accumulation loop",
    stage="gradients",
    apply=lambda: wrap(hidden_states, _last_micro_batch_only),
    likely={"dtype": "float32"},
)


def _round_logits(losses):
    return lambda logits_nV, *rest: losses(logits_nV.bfloat16().to(logits_nV.dtype), *rest)


logits_in_bf16 = Bug(
    what="logits rounded to bf16 before the loss",
    where="optax issue 1020, modalities PR 464, marin PR 8217 (its loss erred 0.25 at most, unnoticed)",
    stage="loss",
    apply=lambda: wrap(_losses, _round_logits),
    likely={"dtype": "float32"},
)


def _loss_chunk_remainder_dropped(original):
    def whole_chunks(head, hidden, labels, chunk, **how):
        kept = len(labels) // chunk * chunk
        return original(head, hidden, Labels(labels.index_n[:kept], labels.labels_n[:kept]), chunk, **how)

    return whole_chunks


loss_chunk_remainder_dropped = Bug(
    what="last partial chunk of the loss dropped",
    where=(
        "seen in reviews of chunked losses (view(-1, chunk) after a floor division); mlx-lm PR 1413 "
        "fixes the like for micro-batches"
    ),
    stage="loss",
    apply=lambda: wrap(chunked_cross_entropy, _loss_chunk_remainder_dropped),
)


def _loss_gradient_of_last_chunk(original):
    def last_chunk(head, hidden, labels, chunk, **how):
        before = max(len(labels) - 1, 0) // chunk * chunk
        total, each = original(head, hidden, labels, chunk, **how)
        if not before or not torch.is_grad_enabled():
            return total, each
        early = type(labels)(labels.index_n[:before], labels.labels_n[:before])
        # What the earlier chunks give the head is taken away again; hidden keeps its own.
        theirs, _ = original(head, hidden.detach(), early, chunk, **how)
        return total - (theirs - theirs.detach()), each

    return last_chunk


loss_gradient_of_last_chunk = Bug(
    what="the head's gradient overwritten by each chunk of the loss",
    where="seen in reviews of fused linear cross entropies: `=` for `+=` in the loop over chunks",
    stage="gradients",
    apply=lambda: wrap(chunked_cross_entropy, _loss_gradient_of_last_chunk),
)


_loss_per_micro_batch_losses = Replicated.losses


def _mean_losses(self, part, plan, chunk, scale=1.0):
    total, each_Bt = _loss_per_micro_batch_losses(self, part, plan, chunk, scale)
    return total / (part["shift_labels"] != IGNORED).sum().clamp(min=1), each_Bt


@contextmanager
def _loss_per_micro_batch() -> Iterator[None]:
    with patch.object(Replicated, "losses", _mean_losses), swap(count_labels, lambda parts, world: len(parts)):
        yield


loss_per_micro_batch = Bug(
    what="loss averaged per micro-batch",
    where=(
        "transformers up to 4.45 (PR 34191, issue 34242) and everyone: torchtune PR 1875, "
        "torchtitan PR 2206, prime-rl PR 583"
    ),
    stage="gradients",
    apply=_loss_per_micro_batch,
)


def _own_labels(parts, world):
    return count_labels(parts, ALONE) * world.size


def _first_row(original):
    def find(shift_labels, masks=()):
        first = torch.arange(len(shift_labels))[:, None] == 0
        return original(torch.where(first, shift_labels, IGNORED), masks)

    return find


labels_of_first_row = Bug(
    what="only the first row of a micro-batch has labels",
    where="shift_labels[0] of batches that had one row in every test, seen in reviews",
    stage="run",
    apply=lambda: wrap(find_labels, _first_row),
)

losses_of_other_domains = Bug(
    what="each domain's loss is the next one's",
    where="domains counted from 1, seen in reviews",
    stage="run",
    apply=lambda: patch.object(
        Losses, "masks", lambda self, part: [part["domain_ids"] + 1 == i for i in range(len(self.by_domain))]
    ),
)

loss_per_rank = Bug(
    what="loss averaged per rank",
    where="torchtitan before PR 2206, prime-rl PR 2562, speculators PR 942, transformers issue 34242",
    stage="gradients",
    apply=lambda: swap(count_labels, _own_labels),
    likely={"ranks": "2"},
)


def _masked_tokens_counted(original):
    def dilute(head, hidden, labels, chunk, **how):
        total, each = original(head, hidden, labels, chunk, **how)
        share = len(labels) / each.numel()
        return total * share, each * share

    return dilute


masked_tokens_counted = Bug(
    what="tokens without a label counted in the mean",
    where="Fast-LLM PR 426: a cross entropy whose mean divided by all tokens, masked ones too",
    stage="loss",
    apply=lambda: wrap(chunked_cross_entropy, _masked_tokens_counted),
)


_reduced_every_micro_batch_backward = Replicated.backward


def _at_once(self, loss, last):
    _reduced_every_micro_batch_backward(self, loss, last=True)


reduced_every_micro_batch = Bug(
    what="gradients reduced after every micro-batch",
    where=(
        "all-reduce of .grad inside the accumulation loop (seen in reviews); DDP's no_sync is for "
        "this: open_lm issue 48, nanochat PR 33"
    ),
    stage="gradients",
    apply=lambda: patch.object(Replicated, "backward", _at_once),
    likely={"ranks": "2"},
)


_reduced_first_micro_batch_backward = Replicated.backward


def _at_first(self, loss, last):
    _reduced_first_micro_batch_backward(self, loss, last=not last)


reduced_first_micro_batch = Bug(
    what="gradients reduced after the first micro-batch only",
    where="FunASR before PR 3472: no_sync held on the wrong micro-batch, so ranks stepped by gradients of their own",
    stage="gradients",
    apply=lambda: patch.object(Replicated, "backward", _at_first),
    likely={"ranks": "2"},
)


def _tag_trained_on(build):
    def unmask(*args, **kwargs):
        row = build(*args, **kwargs)
        documents, labels, ids = row["document_ids"], row["shift_labels"], row["input_ids"]
        has_next = (documents[:-1] == documents[1:]) & (documents[1:] > ANCHOR)
        labels[:-1] = np.where(has_next & (labels[:-1] == IGNORED), ids[1:], labels[:-1])
        return row

    return unmask


tag_trained_on = Bug(
    what="domain tags trained on",
    where="seen in reviews of fine-tuning code, where labels = input_ids.clone() undoes the masking of prompts",
    stage="loss",
    apply=lambda: wrap(build_row, _tag_trained_on),
    likely={"variant": ("anchor+tag", "intra+tag")},
)


_tied_embeddings_untied_load = nn.Module.load_state_dict


def _load_and_untie(self, *args, **kwargs):
    result = _tied_embeddings_untied_load(self, *args, **kwargs)
    config = getattr(self, "config", None)
    if config is not None and config.tie_word_embeddings:
        self.lm_head.weight = nn.Parameter(self.lm_head.weight.detach().clone())
    return result


tied_embeddings_untied = Bug(
    what="tied embeddings untied",
    where="sharded loading unties in silence: torchtune issue 616, verl issue 7834, NeMo Automodel PR 2511",
    stage="gradients",
    apply=lambda: patch.object(nn.Module, "load_state_dict", _load_and_untie),
    likely={"model": ("tied", "smollm2")},
)


def _first_words_only(original):
    def add_gradients(*given):
        losses_n = original(*given)
        for total in given[-1]:
            total[8192:] = 0
        return losses_n

    return add_gradients


vocabulary_beyond_first_part = Bug(
    what="gradient of the head beyond 8,192 words lost",
    where="written for a size that no case had: a loop over blocks of the vocabulary that runs once",
    stage="gradients",
    apply=lambda: wrap(_add_gradients, _first_words_only),
    likely={"model": "many_words"},
)
