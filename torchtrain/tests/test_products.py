"""bfloat16 models on a CPU that is slow at bfloat16 products: float32 products, each rounded to bfloat16 once.

The choice is tested with measurements made up here, so that the tests say the same on every machine.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anchorline.tolerance import judge
from torchtrain import products
from torchtrain.config import LoraSettings, ModelConfig
from torchtrain.modeling.head import head_of
from torchtrain.modeling.load import load_for_training
from torchtrain.modeling.source import open_config
from torchtrain.products import Rates
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer
from torchtrain.training.labels import find_labels
from torchtrain.training.loss import chunked_cross_entropy

AVX2 = Rates((9.0, 2.0, 16.0), (59.0, 74.0, 80.0))  # measured on one
AMX = Rates((900.0, 800.0, 700.0), (70.0, 70.0, 70.0))
CPU = torch.device("cpu")


@pytest.fixture
def slow(monkeypatch):
    """A machine with AVX2 alone."""
    monkeypatch.setattr(products, "measure_rates", lambda: AVX2)
    monkeypatch.setattr(products, "chooses_float32", products.chooses_float32.__wrapped__)


@pytest.fixture
def saved(tmp_path):
    """The folder of a tiny bfloat16 model."""
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


class Products(TorchDispatchMode):
    """Collects the dtypes of matrices that are multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "linear"):
            self.dtypes.add(next(x.dtype for x in tree_leaves(args) if isinstance(x, torch.Tensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rates", "chosen", "said"),
    [
        (AVX2, True, "in float32, each rounded to bfloat16 once: a core multiplies bfloat16 at 4 GFLOP/s"),
        (AMX, False, "in bfloat16: a core multiplies bfloat16 at 792 GFLOP/s"),
        (Rates((40.0,) * 3, (70.0,) * 3), False, "in bfloat16"),  # too near to choose the same every time
    ],
)
def test_the_measured_rates_choose_and_are_given_as_the_reason(rates, chosen, said, monkeypatch):
    monkeypatch.setattr(products, "measure_rates", lambda: rates)
    monkeypatch.setattr(products, "chooses_float32", products.chooses_float32.__wrapped__)
    assert products.chooses_float32() == chosen
    assert products.describe_products(torch.bfloat16, CPU).startswith(said)
    assert products.describe_products(torch.float32, CPU) == ""
    assert products.describe_products(torch.bfloat16, torch.device("cuda")) == ""


@pytest.mark.parametrize("part", [2**24, 4096])  # all of a matrix at a time, or parts of it
@pytest.mark.parametrize("biased", [False, True])
def test_output_and_gradients_are_products_rounded_once(biased, part, slow, monkeypatch):
    monkeypatch.setattr(products, "_SLICE", part)
    monkeypatch.setattr(products, "_MADE", part // 2)
    torch.manual_seed(0)
    shapes = (2, 96, 128), (160, 128), (2, 96, 160), (160,)
    x, weight, gradient, bias = map(torch.randn, shapes)
    given = [t.bfloat16() for t in ([x, weight, bias] if biased else [x, weight])]

    def run(linear, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in given]
        out = linear(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient.bfloat16().to(dtype))]

    with Products() as seen:
        made = run(products.linear, torch.bfloat16)
    assert seen.dtypes == {torch.float32}
    for got, truth in zip(made, run(F.linear, torch.float64), strict=True):
        assert got.dtype == torch.bfloat16
        rounded_once = truth.bfloat16().double()
        assert judge(got.double(), truth, rounded_once, "bfloat16").passed
        # Another order of float32 sums moves a product over a rounding's edge now and then, and by one step of it.
        assert (got.double() != rounded_once).double().mean() < 0.01


def test_a_rank_without_labels_gets_empty_logits_and_no_gradient(slow):
    weight = torch.ones(5, 8, dtype=torch.bfloat16, requires_grad=True)
    made = products.linear(torch.zeros(0, 8, dtype=torch.bfloat16), weight)
    made.sum().backward()
    assert (made.shape, weight.grad.any().item()) == ((0, 5), False)


class Head(products.LinearInFloat32):
    """The loss takes it for a head that it does not know, and asks autograd for its gradients."""


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("made", "columns"), [(2**21, 4096), (4096, 4096), (3000, 56)])
def test_the_heads_logits_come_out_in_float32_with_the_same_bits(made, columns, biased, slow, monkeypatch):
    """A part at a time, too, in the loss and in both gradients."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(1, 70, 64).bfloat16(), find_labels(torch.randint(300, (1, 70)))
    head = products.LinearInFloat32(64, 300, bias=biased, dtype=torch.bfloat16)
    twin = Head(64, 300, bias=biased, dtype=torch.bfloat16)
    twin.load_state_dict(head.state_dict())

    def run(head):
        x = hidden.clone().requires_grad_()
        total, each = chunked_cross_entropy(head, x, labels, 32)
        return [each, *torch.autograd.grad(total, [x, head.weight])]

    expected = run(twin)
    monkeypatch.setattr(products, "_MADE", made)
    monkeypatch.setattr(products, "_COLUMNS", columns)
    for got, want in zip(run(head), expected, strict=True):
        assert torch.equal(got, want)
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(head, hidden, labels, 32)[1], expected[0])


@pytest.mark.parametrize("changes", [{}, {"layer_chunk": 16}, {"lora": LoraSettings(rank=2)}], ids=str)
def test_training_multiplies_nothing_in_bfloat16(changes, saved, slow):
    """Layers, head, loss, adapters, and layers in chunks; and the weights are those of the file."""
    settings = ModelConfig(source=saved, dtype="bfloat16", **changes)
    model = load_for_training(saved, open_config(saved), settings, "sdpa", CPU)
    rows = torch.arange(40)[None]
    with Products() as seen:
        hidden = model.base_model(
            input_ids=rows, position_ids=rows, document_ids=torch.ones_like(rows), use_cache=False
        ).last_hidden_state
        total, _ = chunked_cross_entropy(head_of(model), hidden, find_labels(rows + 1), 16)
        total.backward()
    assert seen.dtypes == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
