"""A checkpoint of any layout of processes goes on in any other: 2 real processes on gloo, and one.

The state (masters, both moments) is compared bitwise; so is what the same layout computes next. Another layout's loss
is judged against the oracle on the very weights that were restored. One launch runs all cases
(`torchtrain/tests/resume_worker.py`).

Legend: n elements of a parameter.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import torchtrain
from parity_tests.tests.test_distributed import SETTINGS, batch_of, model_of
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.tests import resume_worker
from torchtrain.tests.forks import forks

# Name -> dtype, ZeRO stage, sequence-parallel degree, offload.
LAYOUTS: dict[str, tuple[str, int, int, str]] = {
    "plain": ("float32", 0, 1, "none"),
    "sp": ("bfloat16", 0, 2, "none"),
    "zero1": ("float32", 1, 1, "none"),
    "zero1-sp": ("bfloat16", 1, 2, "none"),
    "zero2-sp": ("float32", 2, 2, "none"),
    "zero2-offload": ("bfloat16", 2, 1, "optimizer"),
    "zero3-sp": ("float32", 3, 2, "none"),
    "zero3-offload": ("bfloat16", 3, 2, "all"),
}
ALONE = {dtype: f"alone-{dtype}" for dtype in ("float32", "bfloat16")}
FROM_ONE = ("sp", "zero1", "zero2-offload", "zero3-sp")
# Where each layout's checkpoint goes on besides in its own: the next of its dtype, so that every kind reads another.
OTHERS = {
    name: next(n for n in [*list(LAYOUTS)[i + 1 :], *list(LAYOUTS)] if n != name and LAYOUTS[n][0] == LAYOUTS[name][0])
    for i, name in enumerate(LAYOUTS)
}


def case_of(
    folder: Path, layout: str, name: str, steps: int, load: tuple[str, int] | None = None, **more
) -> dict[str, Any]:
    dtype, stage, shared, offload = LAYOUTS.get(layout, (layout, 0, 1, "none"))
    case: dict[str, Any] = {"dtype": dtype, "model": str(folder / "llama"), "batch": str(folder / "batch.pt")}
    case["settings"] = SETTINGS | {"micro_batch": 1 if layout in LAYOUTS else 4}
    case["distributed"] = {"zero_stage": stage, "sequence_parallel": shared, "offload": offload}
    case |= {"folder": str(folder / name), "steps": steps, **more}
    return case | ({"load": [str(folder / load[0]), load[1]]} if load else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All cases: LAYOUT (3 steps), LAYOUT-again (from its step 2), LAYOUT-from-OTHER, the same of one process."""
    torchtrain.register()
    folder = tmp_path_factory.mktemp("resume")
    model_of("llama", "float32").save_pretrained(folder / "llama")
    torch.save(batch_of("anchor", 31), folder / "batch.pt")
    for dtype, name in ALONE.items():
        resume_worker.run(case_of(folder, dtype, name, 3), 0, 1)
    cases = [case_of(folder, layout, layout, 3) for layout in LAYOUTS]
    cases += [case_of(folder, layout, f"{layout}-again", 1, (layout, 2), bad_steps=True) for layout in LAYOUTS]
    cases += [case_of(folder, OTHERS[layout], f"from-{layout}", 1, (layout, 2)) for layout in LAYOUTS]
    cases += [case_of(folder, layout, f"{layout}-from-one", 1, (ALONE[LAYOUTS[layout][0]], 2)) for layout in FROM_ONE]
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    log = folder / "log"
    done = forks().run(str(path), main="torchtrain.tests.resume_worker", processes=2, log=log)
    assert done["codes"] == [0, 0], log.read_text()[-6000:]
    for layout, (dtype, *_) in LAYOUTS.items():
        resume_worker.run(case_of(folder, dtype, f"one-from-{layout}", 1, (layout, 2)), 0, 1)
    return folder


def arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / name / "arrays.npz") as found:
        return dict(found)


def state(folder: Path, name: str, step: int) -> dict[str, torch.Tensor]:
    """Put a checkpoint together without the code that reads it: whole tensors [n] by kind and parameter."""
    path = folder / name / "checkpoints" / f"step-{step:08d}"
    manifest = Manifest.read(path)
    whole: dict[str, torch.Tensor] = {}
    for file in path.glob("state-*.safetensors"):
        for key, part_n in load_file(file).items():
            kind, start, parameter = key.split(":", 2)
            target_n = whole.setdefault(
                f"{kind} {parameter}", torch.full((prod(manifest.parameters[parameter]),), torch.nan)
            )
            assert target_n[int(start) : int(start) + len(part_n)].isnan().all(), "written twice"
            target_n[int(start) : int(start) + len(part_n)] = part_n
    assert not any(x.isnan().any() for x in whole.values())
    return whole | {"updates": torch.tensor(manifest.progress.updates)}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_goes_on_bitwise(folder, layout):
    """Though two bad steps, which update nothing, come before the next one."""
    straight, again = arrays(folder, layout), arrays(folder, f"{layout}-again")
    np.testing.assert_array_equal(again["loss.3"], straight["loss.3"])
    assert_same(state(folder, f"{layout}-again", 2), state(folder, layout, 2))
    assert_same(state(folder, f"{layout}-again", 3), state(folder, layout, 3))
    moved = state(folder, layout, 3)
    assert not any(torch.equal(moved[name], x) for name, x in state(folder, layout, 2).items()), (
        "a step moves everything"
    )


CROSSED = [(layout, f"from-{layout}") for layout in LAYOUTS] + [(layout, f"one-from-{layout}") for layout in LAYOUTS]
CROSSED += [(ALONE[LAYOUTS[layout][0]], f"{layout}-from-one") for layout in FROM_ONE]


@pytest.mark.parametrize(("source", "name"), CROSSED)
def test_another_layout_has_the_same_state_and_weights(folder, source, name):
    was = state(folder, source, 2)
    assert_same(state(folder, name, 2), was)
    dtype = LAYOUTS[source][0] if source in LAYOUTS else source.removeprefix("alone-")
    for parameter, x in arrays(folder, name).items():
        if parameter.startswith("weight."):
            master_n = was[f"master {parameter.removeprefix('weight.')}"]
            np.testing.assert_array_equal(x.ravel(), master_n.to(getattr(torch, dtype)).float().numpy())
