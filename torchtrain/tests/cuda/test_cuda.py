"""The CUDA code path without a GPU, on the stand-in (`standin.py`): attention, runs, resuming, offload, many ranks."""

import json
import signal

import pytest
from safetensors.torch import load_file

from torchtrain.tests.cuda import bugs, checks, standin
from torchtrain.tests.forks import Forks
from torchtrain.tests.runs import assert_same, content, make_place

pytestmark = [
    pytest.mark.sweep,  # a C++ compiler makes the device, half a minute
    pytest.mark.skipif(standin.why_not() is not None, reason=standin.why_not() or ""),
]


@pytest.fixture(scope="module")
def forks():
    standin.build()  # here, where its refusal is seen
    server = Forks("torchtrain.tests.cuda.server", DS_ACCELERATOR="cuda")
    yield server
    server.close()


def run_main(forks, module, folder):
    """Run a module's main on the stand-in; return what it wrote."""
    answer = forks.run(str(folder / "found"), log=folder / "log", main=module.__name__)
    assert answer["codes"] == [0], (folder / "log").read_text(encoding="utf-8")
    return json.loads((folder / "found").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found(forks, tmp_path_factory):
    """Each check's traceback, or None."""
    return run_main(forks, checks, tmp_path_factory.mktemp("checks"))


@pytest.mark.parametrize("name", checks.CHECKS)
def test_attention(found, name):
    assert found[name] is None, found[name]


@pytest.fixture(scope="module")
def killed(forks, tmp_path_factory):
    """What finds each bug."""
    return run_main(forks, bugs, tmp_path_factory.mktemp("bugs"))


@pytest.mark.parametrize("name", bugs.BUGS)
def test_bugs_of_devices_are_found(killed, name):
    verdict = killed["found"][name]
    assert verdict is not None
    assert bugs.BUGS[name].by in verdict


def test_a_step_waits_for_the_device_only_where_it_says_so(killed):
    assert [set(waits) for waits in killed["waits"]] == [bugs.WAITS] * (1 + len(bugs.SAVING))
    assert killed["again"] is None  # and repeats with the same bits, so that no bug is found in vain


@pytest.fixture(scope="module")
def place(forks, model_folder, corpus, tmp_path_factory):
    """Runs of bfloat16 by `flash`, with the same bits again."""
    changes = {
        "model": {"attention": "flash", "activation_checkpointing": True, "fused": "none"},
        "train": {"deterministic": True},
    }
    return make_place(tmp_path_factory.mktemp("cuda"), forks, model_folder(), corpus, **changes)


@pytest.fixture(scope="module")
def straight(place):
    assert place.train("straight") == 0, place.log("straight")
    assert "bfloat16 on cuda:0" in place.log("straight")
    return place.folder / "straight"


def on_host(place, name, *overrides, **how):
    """Train where there is no GPU, and return the run's folder."""
    codes = place.train(name, *overrides, main="torchtrain.tests.cuda.on_host", **how)
    assert not any([codes] if isinstance(codes, int) else codes), place.log(name)
    return place.folder / name


def assert_same_numbers(run, other):
    """Losses, gradients' norms, weights and moments, bit by bit; only where they were computed differs."""
    mine, theirs = content(run), content(other)
    assert mine.keys() == theirs.keys()
    told = {name for name in mine if name.endswith(("manifest.json", "outputs.json")) or "rng-" in name}
    assert [name for name in mine.keys() - told if mine[name] != theirs[name]] == []
    assert any(name.startswith("checkpoints/") for name in mine.keys() - told)
    assert "metrics.jsonl" in mine.keys() - told


def test_a_run_has_the_bits_of_the_host(place, straight):
    assert_same_numbers(straight, on_host(place, "host"))


def test_a_run_that_is_killed_resumes_with_the_same_bits(place, straight):
    assert place.train("killed", at="gradient", nth=5) == -signal.SIGKILL
    assert place.resume("killed") == 0, place.log("killed")
    assert_same(place.folder / "killed", straight)


def test_auto_measures_and_a_run_that_resumes_keeps_what_it_chose(place):
    auto = ["model.attention=auto", "model.fused=auto"]
    assert place.train("auto", *auto, at="gradient", nth=5) == -signal.SIGKILL
    assert "for a row of new lengths, forward and backward, so " in place.log("auto")
    assert "fused     not compiled: torch cannot compile for cuda here" in place.log("auto")
    path = place.folder / "auto" / "run.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert f"so {record['engine']}" in record["engine_measured"]
    other = {"flash": "sdpa", "sdpa": "flash"}[record["engine"]]
    path.write_text(json.dumps(record | {"engine": other}), encoding="utf-8")
    assert place.resume("auto") == 0, place.log("auto")
    after = place.log("auto").rpartition("resume ")[2]
    assert f"attention {other} · " in after
    assert "for a row of new lengths" not in after


@pytest.mark.parametrize(
    ("processes", "distributed"),
    [
        (1, {"zero_stage": 1, "offload": "optimizer"}),
        (2, {"zero_stage": 3, "sequence_parallel": 2}),
        (2, {"zero_stage": 2, "sequence_parallel": 2, "share": "documents"}),
    ],
)
def test_however_a_run_is_spread_it_has_the_bits_of_the_host(place, straight, processes, distributed):
    overrides = [f"distributed.{name}={value}" for name, value in distributed.items()]
    overrides += ["train.steps=2", "save.last=1"]
    name = "-".join(map(str, distributed.values()))
    how = {"processes": processes} if processes > 1 else {}
    codes = place.train(name, *overrides, "model.activation_checkpointing=keep_attention", **how)
    assert not any([codes] if isinstance(codes, int) else codes), place.log(name)
    assert_same_numbers(place.folder / name, on_host(place, f"{name}-host", *overrides, **how))
    names = [set(load_file(run / "model" / "model.safetensors")) for run in (place.folder / name, straight)]
    assert names[0] == names[1]  # tied embeddings are written once


def test_inputs_of_layers_come_back_from_the_host_and_chunks_have_its_bits(place, straight):
    chunks = ["train.steps=2", "save.last=1", "model.layer_chunk=50"]
    assert place.train("chunks", *chunks, "model.activation_checkpointing=offload") == 0, place.log("chunks")
    assert_same_numbers(place.folder / "chunks", on_host(place, "chunks-host", *chunks))
