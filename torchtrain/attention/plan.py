"""The attention plan: the mask rule lowered once per batch, for every layer and every engine.

One causal attention call works on one segment. Its queries are one document of one row; its keys are the row's anchor
followed by that document. Queries and keys end at the same token, so causal masking is aligned bottom-right, as
FlashAttention-2 does when the two lengths differ:

    row        A A a a a b b . .        (A anchor, a b documents, . padding)
    segment 0  queries A A              keys A A
    segment 1  queries a a a            keys A A a a a
    segment 2  queries b b              keys A A b b

Legend: B batch · T tokens of a row · N query tokens (all but padding) · M gathered keys · S segments · R anchor tokens
of the batch · C copies of an anchor token, its own key the first.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from torchtrain.attention.batches import make_batches
from torchtrain.attention.block_mask import make_block_mask
from torchtrain.attention.rule import check_document_ids
from torchtrain.marks import ANCHOR, PADDING


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What the engines need to know of a batch's documents, from `make_plan`. Index tensors are flat in B * T."""

    document_ids_BT: Tensor
    q_index_N: Tensor  # token of each query, ordered by segment
    k_index_M: Tensor  # token of each key, ordered by segment: the anchor's tokens, then the document's own
    cu_seqlens_q: Tensor  # int32 [S + 1]
    cu_seqlens_k: Tensor  # int32 [S + 1]
    own_slot_N: Tensor  # index in M of each query's own key
    anchor_index_R: Tensor  # the anchors' tokens
    anchor_slot_RC: (
        Tensor  # indices in M of each one's own key and of its copies for the documents; 0 where it has fewer
    )
    no_copy_RC: Tensor  # where it has fewer
    seqlens_q: tuple[int, ...] = field(repr=False)  # per segment, on the host
    seqlens_k: tuple[int, ...] = field(repr=False)
    queries_in_order: bool  # q_index_N is 0, 1, .. B * T - 1: nothing to gather
    keys_in_order: bool  # the same of k_index_M
    copies_fill: bool  # every anchor token has C copies

    @property
    def max_seqlen_q(self) -> int:
        """Longest segment, in queries."""
        return max(self.seqlens_q, default=0)

    @property
    def max_seqlen_k(self) -> int:
        """Longest segment, in keys."""
        return max(self.seqlens_k, default=0)

    @property
    def live_pairs(self) -> int:
        """Visible (query, key) pairs of the batch: A(A+1)/2 + sum over documents of n(n+1)/2 + A n."""
        return sum(n * (n + 1) // 2 + (m - n) * n for n, m in zip(self.seqlens_q, self.seqlens_k, strict=True))

    def mean_live_pairs(self, windows: Mapping[int | None, int], keep_anchor: bool = False) -> int:
        """Return the mean of the live pairs over layers, given how many layers have which window, and whether the
        anchor stays visible beyond it.
        """
        pairs = sum(layers * self._live_pairs_within(window, keep_anchor) for window, layers in windows.items())
        return round(pairs / max(1, sum(windows.values())))

    def _live_pairs_within(self, window: int | None, keep_anchor: bool) -> int:
        if window is None or window >= self.max_seqlen_k:
            return self.live_pairs

        def up_to(n: int, most: int) -> int:
            """Return the pairs of a sequence's first n tokens, each with at most so many keys."""
            n = max(n, 0)
            return n * (n + 1) // 2 if n < most else most * n - most * (most - 1) // 2

        sizes = list(zip(self.seqlens_q, self.seqlens_k, strict=True))
        pairs = sum(up_to(m, window) - up_to(m - n, window) for n, m in sizes)
        if keep_anchor:  # of a query's keys that lie beyond its window, the first are the anchor's
            ids_S = self.document_ids_BT.flatten()[self.q_index_N[self.cu_seqlens_q[:-1]]].tolist()
            for (n, m), document in zip(sizes, ids_S, strict=True):
                anchors = n if document == ANCHOR else m - n
                pairs += up_to(m - window, anchors) - up_to(m - n - window, anchors)
        return pairs

    def block_mask(self, window: int | None = None, keep_anchor: bool = False) -> BlockMask:
        """Return FlexAttention's mask. The first layer with these options builds it, and the others reuse it."""
        key = (window, keep_anchor)
        if key not in self._block_masks:
            self._block_masks[key] = make_block_mask(self.document_ids_BT, *key)
        return self._block_masks[key]

    @cached_property
    def _block_masks(self) -> dict[tuple[int | None, bool], BlockMask]:
        return {}

    @cached_property
    def batches(self) -> "tuple[AttentionPlan, tuple[tuple[int, int], ...]]":
        """The plan with its keys stacked by length, for `gather_keys`, and segments and tokens of each batch. They are
        made ahead of a step, or by the first layer: on a GPU making them waits for the device.
        """
        shapes, slot_P, back_M = make_batches(self.seqlens_k)
        in_order = torch.equal(slot_P, torch.arange(len(back_M)))
        slot_P, back_M = slot_P.to(self.k_index_M.device), back_M.to(self.k_index_M.device)
        stacked = dataclasses.replace(
            self,
            k_index_M=self.k_index_M[slot_P],
            own_slot_N=back_M[self.own_slot_N],
            anchor_slot_RC=back_M[self.anchor_slot_RC],
            keys_in_order=self.keys_in_order and in_order,
        )
        return stacked, shapes

    def pin_memory(self) -> "AttentionPlan":
        """Return the plan with its tensors in page-locked memory."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device | str) -> "AttentionPlan":
        """Return the plan with its tensors on `device`."""
        device = torch.empty(0, device=device).device  # a tensor on "cuda" says "cuda:0"
        if all(t.device == device for t in self._tensors().values()):
            return self
        return self._each(lambda x: x.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "AttentionPlan":
        """Return the plan with its tensors changed, and `batches` too where they are made."""
        own = self._tensors()
        changed = {name: change(x) for name, x in own.items()}
        plan = dataclasses.replace(self, **changed)
        if "batches" in vars(self):
            stacked, shapes = self.batches
            others = {name: change(x) for name, x in stacked._tensors().items() if x is not own[name]}
            flags = {"keys_in_order": stacked.keys_in_order}
            vars(plan)["batches"] = dataclasses.replace(plan, **others, **flags), shapes
        return plan

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: v for f in dataclasses.fields(self) if isinstance(v := getattr(self, f.name), Tensor)}


def make_plan(document_ids_BT: Tensor) -> AttentionPlan:
    """Lower document ids (integer [B, T]) to an `AttentionPlan` on the same device.

    Computed on the host (one synchronisation if the ids are on a GPU) in O(B T log(B T)). A document's tokens need not
    be adjacent. Rows may differ in their number of documents, anchor tokens and padding. Raises UserError: ids that are
    not [B, T] integers >= -1 with the anchor as a prefix.
    """
    ids_BT = document_ids_BT.detach().to("cpu", copy=True)  # the caller's tensor may change afterwards
    check_document_ids(ids_BT)
    ids_BT = ids_BT.long()
    B, T = ids_BT.shape
    flat = ids_BT.flatten()

    # Queries: every token but padding, grouped by (row, document). The sort is stable, so storage order stays inside.
    token_N = (flat != PADDING).nonzero().flatten()
    group_N = (token_N // T) * (int(flat.max()) + 2) + flat[token_N]
    group_N, order = group_N.sort(stable=True)
    q_index_N = token_N[order]
    _, seqlen_q_S = group_N.unique_consecutive(return_counts=True)
    cu_q = _cumulative(seqlen_q_S)
    first_S = q_index_N[cu_q[:-1]]
    row_S = first_S // T

    # Keys: the row's anchor in front of each document (the anchor itself has nothing in front).
    anchors_B = (ids_BT == ANCHOR).sum(1)
    in_front_S = torch.where(flat[first_S] == ANCHOR, 0, anchors_B[row_S])
    seqlen_k_S = seqlen_q_S + in_front_S
    cu_k = _cumulative(seqlen_k_S)
    within_N = torch.arange(len(q_index_N)) - cu_q[:-1].repeat_interleave(seqlen_q_S)
    own_slot_N = (cu_k[:-1] + in_front_S).repeat_interleave(seqlen_q_S) + within_N
    k_index_M = torch.empty(int(cu_k[-1]), dtype=torch.long)
    k_index_M[own_slot_N] = q_index_N

    within_copies = torch.arange(int(in_front_S.sum())) - _cumulative(in_front_S)[:-1].repeat_interleave(in_front_S)
    copy_slot = cu_k[:-1].repeat_interleave(in_front_S) + within_copies
    copy_token = (row_S * T).repeat_interleave(in_front_S) + within_copies
    k_index_M[copy_slot] = copy_token

    in_order = torch.arange(B * T)
    device = document_ids_BT.device
    has_copies = torch.isin(q_index_N, copy_token)
    anchor_index_R, anchor_slot_RC = _group_copies(
        torch.cat([q_index_N[has_copies], copy_token]), torch.cat([own_slot_N[has_copies], copy_slot])
    )
    plan = AttentionPlan(
        document_ids_BT=ids_BT,
        q_index_N=q_index_N,
        k_index_M=k_index_M,
        cu_seqlens_q=cu_q.int(),
        cu_seqlens_k=cu_k.int(),
        own_slot_N=own_slot_N,
        anchor_index_R=anchor_index_R,
        anchor_slot_RC=anchor_slot_RC.clamp(min=0),
        no_copy_RC=anchor_slot_RC < 0,
        seqlens_q=tuple(seqlen_q_S.tolist()),
        seqlens_k=tuple(seqlen_k_S.tolist()),
        queries_in_order=torch.equal(q_index_N, in_order),
        keys_in_order=torch.equal(k_index_M, in_order),
        copies_fill=bool((anchor_slot_RC >= 0).all()),
    )
    return plan.to(device)


def _cumulative(lengths_S: Tensor) -> Tensor:
    return torch.cat([lengths_S.new_zeros(1), lengths_S.cumsum(0)])


def _group_copies(token: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Group the slots of anchor copies by the token they copy: tokens [R], slots [R, C] filled with -1."""
    if len(token) == 0:
        return token, slot.reshape(0, 0)
    token, order = token.sort(stable=True)
    anchor_R, copies_R = token.unique_consecutive(return_counts=True)
    column = torch.arange(len(token)) - _cumulative(copies_R)[:-1].repeat_interleave(copies_R)
    slot_RC = slot.new_full((len(anchor_R), int(copies_R.max())), -1)
    slot_RC[torch.arange(len(anchor_R)).repeat_interleave(copies_R), column] = slot[order]
    return anchor_R, slot_RC
