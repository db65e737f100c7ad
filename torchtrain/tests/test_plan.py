"""Every lowering of the rule equals the rule, exactly: the varlen segments, the block mask, the count of live pairs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from torchtrain.attention.batches import padded_length
from torchtrain.attention.block_mask import BLOCK, make_block_mask
from torchtrain.attention.engines.gather import gather_keys, gather_queries, scatter_queries
from torchtrain.attention.plan import AttentionPlan, make_plan
from torchtrain.attention.rule import visible_BTT
from torchtrain.tests.layouts import document_ids
from torchtrain.training.step import make_micro_batches


def mask_of_varlen(plan: AttentionPlan, window: int | None = None) -> torch.Tensor:
    """What causal, bottom-right aligned varlen attention over the plan's segments sees, as bool [B, T, T]."""
    B, T = plan.document_ids_BT.shape
    mask = torch.zeros(B * T, B * T, dtype=torch.bool)
    cu_q, cu_k = plan.cu_seqlens_q.tolist(), plan.cu_seqlens_k.tolist()
    for s in range(len(cu_q) - 1):
        queries = plan.q_index_N[cu_q[s] : cu_q[s + 1]]
        keys = plan.k_index_M[cu_k[s] : cu_k[s + 1]]
        for i, query in enumerate(queries):
            last = len(keys) - len(queries) + i
            seen = keys[0 if window is None else max(0, last + 1 - window) : last + 1]
            assert not mask[query, seen].any(), "a key stands twice"
            mask[query, seen] = True
    rows = mask.view(B, T, B, T)
    for b in range(B):
        others = [c for c in range(B) if c != b]
        assert not rows[b][:, others].any(), "a row sees another row"
    return torch.stack([rows[b, :, b] for b in range(B)])


def mask_of_blocks(ids_BT: torch.Tensor, *window: Any) -> torch.Tensor:
    """What a BlockMask lets through, as bool [B, T, T]: everything in full blocks, the rule in partial ones."""
    block_mask = make_block_mask(ids_BT, *window)
    B, T = ids_BT.shape
    padded = torch.nn.functional.pad(ids_BT, (0, -T % BLOCK), value=-1)
    rule = visible_BTT(padded, *window)
    seen = torch.zeros_like(rule)
    for num, index, everything in (
        (block_mask.kv_num_blocks, block_mask.kv_indices, False),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True),
    ):
        for b in range(B):
            for q in range(num.shape[-1]):
                for j in index[b, 0, q, : num[b, 0, q]].tolist():
                    block = (b, slice(q * BLOCK, (q + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                    assert not seen[block].any(), "a block stands twice"
                    seen[block] = True if everything else rule[block]
    return seen[:, :T, :T]


def packed_ids(*lengths: int, anchor: int = 0, padding: int = 0) -> torch.Tensor:
    documents = [d for d, n in enumerate(lengths, start=1) for _ in range(n)]
    return torch.tensor([[0] * anchor + documents + [-1] * padding])


@given(document_ids())
@settings(max_examples=25)
def test_batches_hold_each_segment_once_and_copies_of_its_last_token(ids_BT):
    plan = make_plan(ids_BT)
    segments = [x.tolist() for x in plan.k_index_M.split(plan.seqlens_k)]
    wanted = [own + own[-1:] * (padded_length(len(own)) - len(own)) for own in segments]
    laid_out, shapes = plan.batches
    batches = zip(laid_out.k_index_M.split([count * tokens for count, tokens in shapes]), shapes, strict=True)
    found = [row for batch, shape in batches for row in batch.view(shape).tolist()]
    assert sorted(found) == sorted(wanted)
    assert torch.equal(laid_out.k_index_M[laid_out.own_slot_N], plan.q_index_N)


@pytest.mark.parametrize("row", [[1] * 9, [0] + [1] * 5 + [2] * 6, [0, 0] + [1] * 70 + [2] * 3 + [-1] * 5, [-1] * 4])
def test_batches_made_with_a_micro_batch_move_with_it(row):
    """Nothing of them is left to make on the device, which would wait for it there."""
    ids_BT = torch.tensor([row])
    labels = {name: torch.zeros_like(ids_BT) for name in ("input_ids", "position_ids", "shift_labels", "domain_ids")}
    batch = labels | {"document_ids": ids_BT}
    plan = make_micro_batches([batch], ["one"], engine="sdpa")[0].to(torch.device("meta")).plan
    if not plan.seqlens_q:  # nothing to attend to
        return
    stacked, shapes = vars(plan)["batches"]
    wanted, same_shapes = make_plan(ids_BT).batches
    assert shapes == same_shapes
    assert stacked.keys_in_order == wanted.keys_in_order
    assert all(x.is_meta and x.shape == wanted._tensors()[name].shape for name, x in stacked._tensors().items())


def test_padding_is_bounded():
    lengths = range(1, 5000)
    padded = [padded_length(n) for n in lengths]
    assert padded == sorted(padded)
    assert all(n <= p < n + 4 for n, p in zip(lengths, padded, strict=True) if n <= 64)
    assert max(p / n for n, p in zip(lengths, padded, strict=True) if n > 64) < 1.2
    assert [padded_length(p) for p in padded] == padded


@given(document_ids(), st.integers(1, 12))
def test_varlen_segments_are_the_rule(ids_BT, window):
    plan = make_plan(ids_BT)
    rule = visible_BTT(ids_BT)
    assert torch.equal(mask_of_varlen(plan), rule)
    assert plan.live_pairs == int(rule.sum())
    within = visible_BTT(ids_BT, window)
    assert torch.equal(mask_of_varlen(plan, window), within)
    assert plan.mean_live_pairs({None: 2, window: 1}) == round((2 * int(rule.sum()) + int(within.sum())) / 3)
    assert plan.mean_live_pairs({window: 1}, keep_anchor=True) == int(visible_BTT(ids_BT, window, True).sum())
    assert plan.max_seqlen_k == max(plan.cu_seqlens_k.diff().tolist(), default=0)


@pytest.mark.parametrize(
    "ids_BT",
    [
        packed_ids(700),
        packed_ids(300, 1, 1, 200, 128, 256, anchor=1),
        packed_ids(128, 128, 256, anchor=128),
        packed_ids(50, 400, 60, anchor=300, padding=200),
        packed_ids(383, 1, 130, padding=126),
        torch.cat([packed_ids(200, 184, anchor=1, padding=15), packed_ids(400)]),
    ],
    ids=["one document", "anchor", "aligned anchor block", "long anchor", "padding", "two rows"],
)
def test_the_block_mask_is_the_rule_and_has_the_blocks_of_create_block_mask(ids_BT):
    assert torch.equal(mask_of_blocks(ids_BT), visible_BTT(ids_BT))
    for window in ((1, False), (130, False), (130, True)):
        assert torch.equal(mask_of_blocks(ids_BT, *window), visible_BTT(ids_BT, *window))
    B, T = ids_BT.shape
    padded = torch.nn.functional.pad(ids_BT, (0, -T % BLOCK), value=-1)
    dense = visible_BTT(padded)
    theirs = create_block_mask(lambda b, h, q, k: dense[b, q, k], B, None, dense.shape[1], dense.shape[1], device="cpu")
    ours = make_block_mask(ids_BT)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@given(document_ids(max_rows=2, max_tokens=400), st.integers(1, 300), st.booleans())
@settings(max_examples=40)
def test_the_block_mask_is_the_rule_for_documents_stored_in_any_order(ids_BT, window, keep_anchor):
    assert torch.equal(mask_of_blocks(ids_BT), visible_BTT(ids_BT))
    assert torch.equal(mask_of_blocks(ids_BT, window, keep_anchor), visible_BTT(ids_BT, window, keep_anchor))


@given(document_ids())
def test_gathered_keys_and_their_gradient_are_index_select(ids_BT):
    plan = make_plan(ids_BT)
    x = torch.randn(*ids_BT.shape, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(plan.k_index_M), 2, 3, dtype=torch.float64)
    ours = gather_keys(x, plan)
    theirs = x.flatten(0, 1).index_select(0, plan.k_index_M)
    assert torch.equal(ours, theirs)
    (grad,) = torch.autograd.grad((ours * weight).sum(), x)
    (twin,) = torch.autograd.grad((theirs * weight).sum(), x)
    # Only the order of the sum over an anchor's copies may differ.
    copies = plan.anchor_slot_RC.shape[1]
    bound = copies * torch.finfo(torch.float64).eps * weight.abs().sum()
    assert (grad - twin).abs().max() <= bound


def test_copies_of_an_anchor_add_up_in_float32():
    """1 + 300 x 2^-9: bfloat16 additions one by one would never leave 1."""
    plan = make_plan(packed_ids(*[1] * 300, anchor=1))
    x = torch.zeros(1, 301, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((len(plan.k_index_M), 1, 1), 2**-9, dtype=torch.bfloat16)
    weight[plan.own_slot_N[0]] = 1
    (grad,) = torch.autograd.grad(gather_keys(x, plan), x, weight)
    assert grad[0, 0] == torch.tensor(1 + 300 * 2**-9, dtype=torch.bfloat16)


@given(document_ids())
def test_scatter_undoes_gather(ids_BT):
    plan = make_plan(ids_BT)
    x = torch.randn(*ids_BT.shape, 2, 3)
    back = scatter_queries(gather_queries(x, plan), plan, fill=7.0)
    real = ids_BT != -1
    assert torch.equal(back[real], x[real])
    assert (back[~real] == 7.0).all()


def test_packed_rows_without_anchor_and_padding_gather_nothing():
    plan = make_plan(torch.tensor([[1, 1, 2, 2], [1, 2, 2, 3]]))
    assert plan.queries_in_order
    assert plan.keys_in_order
    x = torch.randn(2, 4, 1, 8)
    assert gather_keys(x, plan).data_ptr() == x.data_ptr()


def test_a_plan_is_small():
    """Nothing in it grows with T x T: 256K tokens in 64 documents plan in kilobytes a thousand tokens."""
    plan = make_plan(packed_ids(*[4096] * 64, anchor=1))
    elements = sum(t.numel() for t in vars(plan).values() if isinstance(t, torch.Tensor))
    assert elements < 6 * plan.document_ids_BT.numel()
    assert plan.live_pairs == 1 + 64 * (4096 * 4097 // 2 + 4096)
