"""AdamW on float32 masters, against its formula in float64 and against plain torch."""

import pytest
import torch
from torch import nn

from torchtrain.config import TrainConfig
from torchtrain.training.optimizer import Optimizer
from torchtrain.training.schedule import learning_rate

SETTINGS = TrainConfig(weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8, clip_norm=None)
RATE = 1e-2


class Tiny(nn.Module):
    """A matrix, a bias and a norm; the loss is linear in them, so gradients are what the test chooses."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.matrix = nn.Parameter(torch.randn(3, 4).to(dtype))
        self.norm = nn.Parameter(torch.randn(4).to(dtype))

    def backward(self, scale: float) -> None:
        loss = sum((scale * (i + 1) * p.double()).sum() for i, p in enumerate(self.parameters()))
        loss.backward()


def adamw_by_hand(weight, gradients, decay):
    """arXiv 1711.05101, algorithm 2, with bias correction, in float64."""
    weight, m, v = weight.double(), 0.0, 0.0
    for t, gradient in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.95 * v + 0.05 * gradient**2
        weight = weight * (1 - RATE * decay)
        weight = weight - RATE * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)) ** 0.5 + 1e-8)
    return weight


def test_adamw_and_weight_decay_on_matrices_alone():
    model = Tiny(torch.float64)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, SETTINGS)
    scales = [0.5, -2.0, 1.5]
    for scale in scales:
        model.backward(scale)
        optimizer.step(RATE)
    eps = torch.finfo(torch.float64).eps
    for i, (name, decay) in enumerate({"matrix": 0.1, "norm": 0.0}.items()):
        expected = adamw_by_hand(start[name], [s * (i + 1) for s in scales], decay)
        # About 20 roundings a step of numbers of a size around one.
        assert (dict(model.named_parameters())[name] - expected).abs().max() <= 3 * 20 * eps * expected.abs().max()


def test_gradients_are_summed_in_float32_over_micro_batches():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = Optimizer(model, SETTINGS)
    for size in [256.0, *[1.0] * 8]:  # in bfloat16 256 + 1 is 256
        model(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
        assert model.weight.grad is None
    assert optimizer.masters[0].grad.item() == 264


@pytest.mark.parametrize("waiting", [0, 20, 2**26])
def test_gradients_that_wait_for_others_are_whole_after_each_backward_pass(waiting, monkeypatch):
    monkeypatch.setattr("torchtrain.training.optimizer.WAITING", waiting)
    model = Tiny(torch.bfloat16)
    optimizer = Optimizer(model, SETTINGS)
    model.matrix.register_post_accumulate_grad_hook(lambda _: (_ for _ in ()).throw(RuntimeError("here")))
    loss = (model.norm * 1).sum() + (model.matrix * 1).sum()
    with pytest.raises(RuntimeError, match="here"):  # a gradient waits
        loss.backward()
    optimizer.drop()
    for scale in (0.5, -2.0):
        model.norm.sum().mul(scale).backward()
        assert model.norm.grad is None
    assert torch.equal(optimizer.masters[1].grad, torch.full((4,), -1.5))


def test_bfloat16_masters_step_as_a_float32_model_does():
    half, wide = Tiny(torch.bfloat16), Tiny(torch.float32)
    wide.load_state_dict(half.state_dict())
    optimizers = Optimizer(half, SETTINGS), Optimizer(wide, SETTINGS)
    for scale in (0.5, -2.0, 1.5):  # exact in bfloat16, as are their doubles
        for model, optimizer in zip((half, wide), optimizers, strict=True):
            model.backward(scale)
            optimizer.step(RATE)
    for master, parameter, weight in zip(optimizers[0].masters, half.parameters(), wide.parameters(), strict=True):
        assert torch.equal(master, weight)
        assert torch.equal(parameter, weight.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 1.0, 100.0])
def test_clipping_by_the_global_norm(dtype, clip, monkeypatch):
    model = Tiny(dtype)
    optimizer = Optimizer(model, SETTINGS.model_copy(update={"clip_norm": clip}))
    seen = []
    monkeypatch.setattr(optimizer.adamw, "step", lambda: seen.extend(m.grad.clone() for m in optimizer.masters))
    model.backward(1.0)  # gradients: 12 ones and 4 twos
    norm = optimizer.step(RATE)
    eps = torch.finfo(torch.float32).eps
    assert norm == pytest.approx(28**0.5, rel=4 * eps)
    clipped = sum((g.double() ** 2).sum() for g in seen) ** 0.5
    expected = min(norm, clip or norm)
    # torch divides by norm + 1e-6, so that a norm of zero does no harm.
    assert clipped.item() == pytest.approx(expected, rel=1e-6 / norm + 4 * eps)


def test_tied_and_frozen_parameters():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    assert len(Optimizer(model, SETTINGS).masters) == 1


# --- the learning rate at each step, by hand --------------------------------------------------------------------------


def rates(**settings) -> list[float]:
    train = TrainConfig(learning_rate=8.0, **settings)
    return [learning_rate(step, train) for step in range(train.steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"steps": 3}, [8, 8, 8]),
        ({"steps": 6, "warmup_steps": 4}, [2, 4, 6, 8, 8, 8]),
        ({"steps": 6, "warmup_steps": 2, "schedule": "linear"}, [4, 8, 8, 6, 4, 2]),
        ({"steps": 4, "schedule": "linear", "min_learning_rate_share": 0.5}, [8, 7, 6, 5]),
        ({"steps": 2, "warmup_steps": 2, "schedule": "cosine"}, [4, 8]),
        ({"steps": 3, "schedule": "cosine", "min_learning_rate_share": 0.25}, [8, 6.5, 3.5]),
        ({"steps": 6, "warmup_steps": 2, "schedule": "wsd", "decay_steps": 2}, [4, 8, 8, 8, 8, 4]),
        ({"steps": 5, "warmup_steps": 1, "schedule": "wsd", "decay_steps": 4}, [8, 8, 6, 4, 2]),
        (
            {"steps": 5, "schedule": "wsd", "decay_steps": 4, "decay": "sqrt", "min_learning_rate_share": 0.5},
            [8, 8, 6, 8 - 4 * 0.5**0.5, 8 - 4 * 0.75**0.5],
        ),
    ],
    ids=str,
)
def test_warmup_reaches_the_peak_with_its_last_step_and_linear_wastes_no_step_at_zero(settings, expected):
    assert rates(**settings) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("shape", [(97,), (3, 5), (8192, 576)])
def test_norm_of_many_numbers(shape):
    """torch's own float32 norm of the last on a CPU is 1e-4 too small."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(shape))
    optimizer = Optimizer(model, SETTINGS)
    model.weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    truth = model.weight.grad.double().square().sum().sqrt().item()
    # Two roundings, and those of a row, which are as often up as down.
    assert abs(optimizer.norm().item() - truth) <= 3 * 2**-24 * truth
