"""The chunked loss against its naive twin: one matrix of logits, one cross entropy."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anchorline.tolerance import judge
from torchtrain.marks import IGNORED
from torchtrain.modeling.head import AS_THEY_ARE, LogitRule
from torchtrain.training import loss
from torchtrain.training.labels import find_labels
from torchtrain.training.loss import chunked_cross_entropy

M, V = 6, 11
EPS = torch.finfo(torch.float64).eps


def naive(head: nn.Module, hidden: Tensor, labels: Tensor, rule: LogitRule = AS_THEY_ARE) -> Tensor:
    """Each token's loss, 0 where it has no label, from the logits of all."""
    logits = rule.logits(head(hidden))
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape)


def case(B: int, T: int, masked: list[bool], seed: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    head = nn.Linear(M, V, bias=False, dtype=dtype)
    hidden = torch.randn(B, T, M, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(V, (B, T), generator=generator)
    labels[torch.tensor(masked).view(B, T)] = IGNORED
    return head, hidden, labels


@st.composite
def masked_rows(draw):
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return B, T, draw(st.lists(st.booleans(), min_size=B * T, max_size=B * T)), draw(st.integers(1, 30))


@settings(deadline=None, max_examples=60)
@given(masked_rows(), st.sampled_from([AS_THEY_ARE, LogitRule(cap=0.5), LogitRule(3.0, 2.0, 0.5)]), st.booleans())
def test_equals_the_naive_twin_in_value_and_gradients(drawn, rule, weighted):
    B, T, masked, chunk = drawn
    head, hidden, labels = case(B, T, masked)
    weights = torch.arange(B * T).view(B, T) % 4 / 2 if weighted else None
    total, each = chunked_cross_entropy(head, hidden, find_labels(labels, (), weights), chunk, rule=rule)
    gradients = torch.autograd.grad(total, [hidden, head.weight])
    with torch.no_grad():
        assert (
            chunked_cross_entropy(head, hidden, find_labels(labels, (), weights), chunk, rule=rule)[0] == total
        ).all()

    expected = naive(head, hidden, labels, rule)
    weighted_sum = (expected if weights is None else expected * weights).sum()
    naive_gradients = torch.autograd.grad(weighted_sum, [hidden, head.weight])
    # The sums run in another order: at most V + M + B T terms of a size that log V and the inputs keep below 100.
    bound = EPS * (V + M + B * T) * 100
    assert (each - expected).abs().max() <= bound
    assert (total - weighted_sum).abs() <= bound
    for got, want in zip(gradients, naive_gradients, strict=True):
        assert (got - want).abs().max() <= bound
    assert not each.requires_grad


def truth_and_reference(logits_nV: Tensor, labels_n: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Losses, then the gradient of their sum: in float64, and in float32 with each result rounded once."""

    def compute(to: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        shifted = to(logits_nV.double() - logits_nV.amax(-1, keepdim=True).double())
        exponentials = to(shifted.exp())
        total = to(exponentials.sum(-1, keepdim=True))
        one_hot = F.one_hot(labels_n, logits_nV.shape[-1])
        losses = to(to(total.log()) - shifted.gather(-1, labels_n[:, None]))
        return losses[:, 0], to(to(exponentials / total) - one_hot)

    return list(zip(compute(lambda x: x), compute(lambda x: x.float().double()), strict=True))


def assert_judged(found: Tensor, truth: Tensor, reference: Tensor) -> None:
    verdict = judge(found.detach().numpy(), truth.numpy(), reference.numpy(), "float32")
    assert verdict.passed, verdict


@pytest.mark.parametrize(("words", "tokens"), [(32_000, 4096), (49_152, 2048), (128_256, 1024), (2**20, 1024)])
def test_chunks_of_a_gpu_are_thousands_of_tokens_whose_logits_take_half_a_gibibyte(words, tokens):
    head = nn.Linear(1, words, device="meta")
    assert loss.default_chunk(head, torch.device("cuda")) == tokens
    assert loss.default_chunk(head, torch.device("cpu")) == 1024


class Given(nn.Module):
    """A head of another kind, which returns what it was given."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize(("words", "chunk"), [pytest.param(49_152, 64, marks=pytest.mark.sweep), (128_256, 24)])
@pytest.mark.parametrize("linear", [False, True])
def test_float32_losses_and_gradients_of_a_large_vocabulary_obey_the_error_rule(words, chunk, linear):
    """torch's `log_softmax` on a CPU breaks it: of 128,256 words, each loss is about 4e-6 to 1e-5 too small."""
    n, generator = 64, torch.Generator().manual_seed(0)
    labels = torch.randint(words, (n,), generator=generator)
    if linear:  # the logits are the weights' columns: hidden states are rows of the identity
        head = nn.Linear(n, words, bias=False)
        nn.init.normal_(head.weight, std=3, generator=generator)
        hidden, logits = torch.eye(n), head.weight.detach().T
    else:
        head, hidden = Given(), torch.randn(n, words, generator=generator).mul_(3)
        logits = hidden
    before = logits.clone()
    trained = head.weight if linear else hidden.requires_grad_()
    total, each = chunked_cross_entropy(head, hidden, find_labels(labels), chunk)
    (gradient,) = torch.autograd.grad(total, trained)

    (truth, reference), of_gradient = truth_and_reference(before, labels)
    assert_judged(each, truth, reference)
    assert_judged(gradient.T if linear else gradient, *of_gradient)
    # Errors of rounding have both signs: of a mean of n tokens the rule allows sqrt(n) times less than of one token.
    allowed = judge(each.numpy(), truth.numpy(), reference.numpy(), "float32").allowance
    assert abs((each.double() - truth).mean()) <= allowed / n**0.5
    assert torch.equal(before, logits.detach())
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(head, hidden, find_labels(labels), chunk)[1], each)


class Recorder(nn.Module):
    """A head that notes how many rows it is given."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head, self.rows = head, []

    def forward(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return self.head(hidden)


def test_only_labelled_rows_reach_the_head_and_only_a_chunk_at_a_time():
    head, hidden, labels = case(2, 10, [True] * 4 + [False] * 3 + [True] * 3 + [False] * 10)
    recorder = Recorder(head)
    total, _ = chunked_cross_entropy(recorder, hidden, find_labels(labels), chunk=5)
    total.backward()
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(head, hidden, find_labels(labels), chunk=5)[0], total)
    assert recorder.rows == [5, 5, 3]  # not once more in the backward pass


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_head_has_the_gradients_of_any_head(bias, monkeypatch):
    """Its weights' gradient is made a part at a time, whatever the parts."""
    monkeypatch.setattr(loss, "_ROWS", 4)
    _, hidden, labels = case(2, 9, [False] * 18)
    head = nn.Linear(M, V, bias=bias, dtype=torch.float64)
    found = []
    for one in (head, Recorder(head)):
        total, _ = chunked_cross_entropy(one, hidden, find_labels(labels), chunk=5, scale=1 / 18)
        found.append(torch.autograd.grad(total / 18, [hidden, *head.parameters()]))
    expected = torch.autograd.grad(naive(head, hidden, labels).mean(), [hidden, *head.parameters()])
    for linear, other, wanted in zip(*found, expected, strict=True):
        assert (linear - wanted).abs().max() <= EPS * (V + M + 18) * 100
        assert (other - wanted).abs().max() <= EPS * (V + M + 18) * 100


def test_only_what_trains_has_a_gradient():
    """A frozen head under hidden states that train, and the other way round: gradients as the naive twin's."""
    for head_trains, hidden_trains in ((False, True), (True, False), (False, False)):
        head, hidden, labels = case(2, 5, [False] * 10)
        head.weight.requires_grad_(head_trains)
        hidden = hidden.detach().requires_grad_(hidden_trains)
        total, _ = chunked_cross_entropy(head, hidden, find_labels(labels), chunk=3)
        assert total.requires_grad == (head_trains or hidden_trains)
        train = [x for x in (head.weight, hidden) if x.requires_grad]
        if train:
            expected = torch.autograd.grad(naive(head, hidden, labels).sum(), train)
            for got, want in zip(torch.autograd.grad(total, train), expected, strict=True):
                assert (got - want).abs().max() <= EPS * (V + M + 10) * 100


@pytest.mark.parametrize("scale", [1.0, 1 / 37, 3.0])
def test_gradients_are_of_whatever_the_sum_is_multiplied_by(scale):
    head, hidden, labels = case(2, 7, [False] * 14)
    for told in (scale, 1.0):
        total, _ = chunked_cross_entropy(head, hidden, find_labels(labels), chunk=4, scale=told)
        got = torch.autograd.grad(total * scale, [hidden, head.weight])
        expected = torch.autograd.grad(naive(head, hidden, labels).sum() * scale, [hidden, head.weight])
        for a, b in zip(got, expected, strict=True):
            assert (a - b).abs().max() <= scale * EPS * (V + M + 14) * 100


def test_the_heads_gradient_is_rounded_once_however_many_chunks_there_are():
    """In bfloat16 sums over chunks lost up to 2 per cent; the rule's factor of two over one rounding holds now."""
    generator = torch.Generator().manual_seed(0)
    n, width, words = 4096, 16, 32
    head = nn.Linear(width, words, bias=False).bfloat16()
    hidden = torch.randn(n, width, generator=generator).bfloat16()
    labels = find_labels(torch.randint(words, (n,), generator=generator) // 17)  # most on one word

    def gradient(of: nn.Module, given: Tensor, chunk: int) -> Tensor:
        total, _ = chunked_cross_entropy(of, given, labels, chunk, scale=1 / n)
        return torch.autograd.grad(total / n, of.weight)[0].double()  # type: ignore[arg-type]

    truth = gradient(copy.deepcopy(head).double(), hidden.double(), n)
    error = {chunk: float((gradient(head, hidden, chunk) - truth).norm()) for chunk in (n, 512, 16)}
    assert error[n] > 0
    assert max(error.values()) <= 2 * error[n]


def test_no_labels_at_all_give_zero_with_zero_gradients():
    head, hidden, labels = case(1, 4, [True] * 4)
    total, each = chunked_cross_entropy(head, hidden, find_labels(labels), chunk=2)
    total.backward()
    assert total.item() == 0
    assert not each.any()
    assert not hidden.grad.any()
    assert not head.weight.grad.any()
