"""`model.fused: compile` judged by the one rule, Inductor's kernels included: all families, dtypes and rotations.

    python -m parity_tests.tests.compiled [FAMILY ...]      # about a minute each, most of it a C++ compiler's

Truth is the same model with the same weights in float64, the allowance what the plain model errs. Judged are hidden
states and the gradient of every weight, at positions up to 131,071.

Legend: B batch · T tokens of a row.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import torchtrain
from anchorline.tolerance import Verdict, judge
from parity_tests.gate.case import FAMILIES
from parity_tests.tests.models import packed_batch, tiny_model
from torchtrain.attention import make_plan
from torchtrain.attention.hf import implementation_name
from torchtrain.config import ModelConfig
from torchtrain.modeling.head import hidden_states
from torchtrain.modeling.load import set_up_layers
from torchtrain.modeling.rotation import rotate_in_float32

FAR = 131_072
WAYS = (("float32", "model"), ("bfloat16", "model"), ("bfloat16", "float32"))  # dtype, rotation


def model_of(family: str, dtype: str, rotation: str = "model", engine: str = "sdpa", **settings: Any) -> Any:
    """Make a tiny model in training mode, its layers set up as a run with these settings of `model` does."""
    torchtrain.register()
    implementation = implementation_name(engine)
    model = tiny_model(family, getattr(torch, dtype), implementation, max_position_embeddings=FAR)
    if rotation == "float32":
        rotate_in_float32(model)
    if settings:
        set_up_layers(model, ModelConfig(source=family, **settings))
    return model.train()


def far_batches() -> list[dict[str, Tensor]]:
    """Rows whose positions end at 131,071; their documents, of one count and another, are others in each."""
    cuts = [(9, 1, 14, 5), (4, 5, 10, 4, 4, 2), (27, 2)]
    batches = [packed_batch("anchor", lengths, seed=seed) for seed, lengths in enumerate(cuts)]
    start = FAR - batches[0]["position_ids"].shape[1]
    return [batch | {"position_ids": batch["position_ids"] + start} for batch in batches]


def train_on(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run forwards and backwards; return the hidden states and the gradient of every weight, by name."""
    model.zero_grad()
    hidden_BTM = hidden_states(model, batch, make_plan(batch["document_ids"]))
    weights = torch.linspace(-1, 1, hidden_BTM.numel()).view(hidden_BTM.shape)  # a norm's own sum is constant
    (hidden_BTM.double() * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden_BTM.detach(), **gradients}


def judge_compiled(family: str, dtype: str, rotation: str) -> Iterator[tuple[str, Verdict]]:
    """Yield the verdict on every array of the last batch, after the others have run as well."""
    compiled, plain = model_of(family, dtype, rotation, fused="compile"), model_of(family, dtype, rotation)
    exact = model_of(family, "float64", engine="dense")
    exact.load_state_dict(plain.state_dict())
    for batch in far_batches():
        mine, reference, truth = (train_on(model, batch) for model in (compiled, plain, exact))
    for name, array in mine.items():
        yield name, judge(array.double().numpy(), truth[name].numpy(), reference[name].double().numpy(), dtype)


def main() -> int:
    """Print the worst array of each, and how often one breaks the rule; 1 if any does."""
    broken = 0
    for family in sys.argv[1:] or FAMILIES:
        for dtype, rotation in WAYS:
            verdicts = dict(judge_compiled(family, dtype, rotation))
            worst = max(verdicts, key=lambda name: verdicts[name].ratio)
            broken += (breaks := sum(not verdict.passed for verdict in verdicts.values()))
            print(
                f"{family} {dtype}, rotation {rotation}: {breaks} of {len(verdicts)} break; {worst}: {verdicts[worst]}"
            )
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
