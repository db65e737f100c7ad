"""One AdamW step and the split into micro-batches: the trainer against the oracle, by the one rule.

Loss and gradients of every family, in both dtypes, are the gate's (configs/parity/ci.yaml).
"""

import jax.numpy as jnp
import pytest
import torch

import torchtrain
from jaxref.optim import step
from parity_tests.models import packed_batch, tiny_model
from parity_tests.oracle import adamw_of
from parity_tests.tolerance import judge
from torchtrain.config import TrainConfig
from torchtrain.training.optimizer import Optimizer
from torchtrain.training.step import accumulate, make_micro_batches
from torchtrain.training.strategy import Replicated

TRAIN = TrainConfig(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5, loss_chunk=7)


@pytest.fixture(scope="module", autouse=True)
def _plug_in():
    torchtrain.register()


def labelled_batch(vocabulary: int) -> dict[str, torch.Tensor]:
    """A packed batch with a label on two tokens in three, unevenly over the rows, none on padding."""
    batch = packed_batch("anchor", vocabulary=vocabulary)
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, vocabulary, batch["input_ids"].shape, generator=generator)
    masked = torch.rand(labels.shape, generator=generator) < torch.tensor([[0.2], [0.7]])
    batch["shift_labels"] = labels.masked_fill(masked | (batch["document_ids"] <= 0), -100)
    batch["domain_ids"] = torch.zeros_like(labels)
    return batch


def ready(batches):
    return make_micro_batches(batches, ["only"])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_adamw_step_with_clipping_and_decay(family):
    """Both sides step from the same gradients: a first step is close to the sign of each, which rounding may turn."""
    model = tiny_model(family, torch.float32, "anchor")
    optimizer = Optimizer(model, TRAIN)
    accumulate(Replicated(model, None), ready([labelled_batch(model.config.vocab_size)]), ["only"], chunk=7)
    before = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
    gradients = {name: p.grad.clone().numpy() for name, p in model.named_parameters()}
    norm = optimizer.step(TRAIN.learning_rate)
    assert norm > TRAIN.clip_norm, "the test is about a gradient that is clipped"

    oracle = adamw_of(TRAIN, before)
    results = []
    for carrier in (jnp.float64, jnp.float32):
        params, grads = ({n: jnp.asarray(x, carrier) for n, x in tree.items()} for tree in (before, gradients))
        after, _, oracle_norm = step(oracle, params, oracle.init(params), grads)
        results.append(after | {"norm": oracle_norm})
    truth, reference = results
    candidate = {name: p.detach().numpy() for name, p in model.named_parameters()} | {"norm": norm}
    verdicts = {name: judge(x, truth[name], reference[name], "float32") for name, x in candidate.items()}
    assert not {what: str(verdict) for what, verdict in verdicts.items() if not verdict.passed}
    assert all((candidate[name] != before[name]).any() for name in before)


def test_any_split_into_micro_batches_has_the_same_gradient():
    """Rows one by one against both at once: per valid token over the whole step, whatever stands where."""
    batch = labelled_batch(97)
    counts = (batch["shift_labels"] != -100).sum(1)
    assert counts[0] != counts[1], "the rows must be uneven for this to say anything"
    gradients = []
    for batches in ([batch], [{name: x[i : i + 1] for name, x in batch.items()} for i in range(2)]):
        model = tiny_model("llama", torch.float64, "anchor")
        accumulate(Replicated(model, None), ready(batches), ["only"], chunk=7)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    reference = tiny_model("llama", torch.float32, "anchor")
    accumulate(Replicated(reference, None), ready([batch]), ["only"], chunk=7)
    for name, p in reference.named_parameters():
        # Split and whole differ by float64 sum order, judged by what float32 errs.
        assert judge(gradients[1][name], gradients[0][name], p.grad.double(), "float32").passed, name
