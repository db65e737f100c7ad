"""The engine `cudnn` on a stand-in of the operation that nvidia-cudnn-frontend registers, with its schema (1.32)."""

import pytest
import torch

from anchorline.errors import UserError
from torchtrain.attention import attend, make_plan
from torchtrain.attention.engines.cudnn import round_up
from torchtrain.attention.engines.measure import Heads, check_engine
from torchtrain.tests.flash_on_cpu import _backward, _forward

SCHEMA = (
    "sdpa_fwd(Tensor q, Tensor k, Tensor v, float attn_scale, bool is_causal=False, bool causal_bottom_right=False, "
    "int window_left=-1, int window_right=-1, Tensor? sinks=None, Tensor? seq_len_q=None, Tensor? seq_len_kv=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, int max_seqlen_q=0, int max_seqlen_kv=0, "
    "bool return_lse=True) -> (Tensor, Tensor)"
)
HEADS = Heads(4, 2, 8, torch.bfloat16, torch.device("cpu"))
IDS = [[0] + [1] * 40 + [2] * 30 + [3] * 20 + [-1] * 9, [0] + [5] * 80 + [6] * 15 + [-1] * 4]


class Kernel:
    """What is behind the operation. Tokens of no segment come out as NaN, and so do their gradients."""

    def __init__(self):
        self.graphs, self.top_left, self.broken = set(), False, ""

    def forward(self, q, k, v, scale, *rest):  # without what has its default at the end
        causal, bottom_right, left, right, sinks, _, _, cu_q, cu_k, max_q, max_k = rest
        assert (causal, bottom_right, left, right, sinks) == (True, True, -1, -1, None)
        lengths = [cu.diff().tolist() for cu in (cu_q, cu_k)]
        assert max(lengths[0]) <= max_q
        assert max(lengths[1]) <= max_k
        self.graphs.add((len(cu_q), max_q, max_k, -(-len(q) // 64), -(-len(k) // 64)))
        if self.top_left:  # the first keys in place of the last
            k, v = (torch.cat([x[1:], x[:1]]) for x in (k, v))
        out, lse, *_ = _forward(q, k, v, cu_q, cu_k, *map(max, lengths), 0, True, False, scale=scale)
        out[cu_q[-1] :], lse[:, cu_q[-1] :] = float("nan"), float("nan")
        return out, lse.T[..., None].contiguous()

    def save(self, ctx, inputs, output):
        q, k, v, scale, *_ = inputs
        ctx.given = q, k, v, output[0], output[1], inputs[11], inputs[12], scale
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def backward(self, ctx, grad, _):
        if self.broken:
            raise RuntimeError(self.broken)
        q, k, v, out, lse, cu_q, cu_k, scale = ctx.given
        most = [max(cu.diff().tolist()) for cu in (cu_q, cu_k)]
        found = _backward(grad, q, k, v, out, lse[..., 0].T, cu_q, cu_k, *most, 0, True, None, None, scale=scale)
        for x, cu in zip(found, (cu_q, cu_k, cu_k), strict=True):
            x[cu[-1] :] = float("nan")
        return *found, *[None] * 13


@pytest.fixture
def kernel():
    """The package is installed, and a CPU is the card."""
    made, library = Kernel(), torch.library.Library("cudnn", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("sdpa_fwd", made.forward, "CPU")
    torch.library.register_autograd("cudnn::sdpa_fwd", made.backward, setup_context=made.save, lib=library)
    yield made
    library._destroy()
    vars(torch.ops.cudnn).pop("sdpa_fwd", None)


def test_computes_what_dense_does(kernel):
    torch.manual_seed(0)
    ids = torch.tensor(IDS)
    tensors = [torch.randn(2, ids.shape[1], heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(2, ids.shape[1], 4, 8, dtype=torch.float64)

    def run(engine):
        out, lse = attend(*tensors, make_plan(ids), engine=engine)
        return [out, lse, *torch.autograd.grad(out, tensors, weight)]

    for got, want in zip(run("cudnn"), run("dense"), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-12)
    with pytest.raises(UserError, match="attention cudnn: no attention sinks, soft caps or windows"):
        attend(*tensors, make_plan(ids), engine="cudnn", window=9)


def test_rows_of_many_lengths_need_few_graphs(kernel):
    random, lengths = torch.Generator().manual_seed(0), set()
    q = torch.zeros(1, 1024, 1, 8)
    for _ in range(40):
        ends = torch.randint(2, 1024, (int(torch.randint(3, 9, (1,), generator=random)),), generator=random)
        ids = torch.zeros(1, 1024, dtype=torch.long)
        ids[0, 1:] = 1 + (torch.arange(1, 1024)[:, None] >= ends.sort().values).sum(1)
        plan = make_plan(ids)
        lengths.add((plan.seqlens_q, plan.seqlens_k))
        attend(q, q, q, plan, engine="cudnn")
    assert len(lengths) == 40
    assert len(kernel.graphs) <= 4
    assert all(n <= round_up(n, 8) <= max(n + 63, n * 9 / 8) for n in range(1, 5000))


def test_is_refused_where_it_is_wrong_or_fails(kernel):
    check_engine("cudnn", HEADS)
    kernel.top_left = True
    with pytest.raises(UserError, match="attention cudnn: its output is wrong here"):
        check_engine("cudnn", HEADS)
    kernel.top_left, kernel.broken = False, "no plan\nfor this graph"
    with pytest.raises(UserError, match="attention cudnn: fails here: no plan for this graph; choose another"):
        check_engine("cudnn", HEADS)


def test_without_a_card_it_is_one_line():
    with pytest.raises(UserError, match="attention cudnn: needs a CUDA device, this is cpu; choose sdpa"):
        check_engine("cudnn", HEADS)
