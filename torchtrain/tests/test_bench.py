"""`torchtrain bench`: what is timed is right, and every loop learns the same."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from torchtrain.bench import attention, cases, step
from torchtrain.bench.cases import YARDSTICK
from torchtrain.bench.config import BenchConfig, load_bench
from torchtrain.bench.measure import Clock
from torchtrain.cli import app

CONFIGS = Path(__file__).parents[2] / "configs" / "bench"
CPU = Clock(torch.device("cpu"), 1)


@pytest.fixture
def bench_tree(tree):
    """Tiny documents, a tiny model, both verbs in a second."""
    source = tree["model"]["source"]
    return {
        "tokenizer": {"source": source},
        "data": {name: tree["data"][name] for name in ("sources", "cache")},
        "device": "cpu",
        "repeats": 3,
        "attention": {
            **{"lengths": [96], "dtypes": ["float32"], "rows": ["least"], "engines": ["flash", "sdpa", "dense"]},
            # Without FlexAttention, which compiles for a minute.
            **{"rivals": ["BOS per document", "dense mask"], "heads": 4, "kv_heads": 2, "head_dim": 8},
            "dense_tokens": 64,
        },
        "step": {"model": {"source": source, "dtype": "float32"}, "lengths": [64], "layers": 1, "ceiling": 64},
    }


@pytest.fixture
def call(bench_tree, write_config, tmp_path):
    """Return a function that runs `torchtrain bench WHAT config.yaml --out ...`."""

    def run(what, *more, tree=bench_tree):
        given = ["bench", what, str(write_config(tree)), "--out", str(tmp_path / "out"), *more]
        return CliRunner().invoke(app, given)

    return run


def read(tmp_path, what):
    return json.loads((tmp_path / "out" / f"{what}.json").read_text())


def measure(bench_tree):
    config = BenchConfig.model_validate(bench_tree)
    rows = attention.measure_attention(config, CPU, lambda line: None, lambda result: None)["rows"]
    return {row["name"]: row for row in rows}


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_is_measured_and_shown(call, tmp_path):
    done = call("attention", "attention.windows=[16]")
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in read(tmp_path, "attention")["rows"]}
    assert "needs a CUDA device" in rows["flash, anchor"]["not_run"]
    assert rows["dense, full"]["not_run"] == "a T x T mask is made up to 64 tokens"
    assert rows[YARDSTICK]["of_full"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    row = rows["sdpa, anchor"]
    documents = row["documents"]
    assert sum(documents) == 96
    assert len(documents) > 1
    all_pairs = 96 * 97 // 2
    # The anchor is the first document's first token, and every other token sees it.
    own = [documents[0] - 1, *documents[1:]]
    assert row["live_ratio"] == (1 + sum(n * (n + 1) // 2 + n for n in own)) / all_pairs
    assert rows["sdpa, intra"]["live_ratio"] == sum(n * (n + 1) // 2 for n in documents) / all_pairs
    windowed = rows["sdpa, window 16"]
    assert windowed["live_ratio"] == sum(min(n, 16) for n in range(1, 97)) / all_pairs
    assert windowed["error_ratio"] <= 1
    assert row["over_the_law"]["median"] == pytest.approx(row["of_full"]["median"] / row["live_ratio"])
    assert row["error_ratio"] <= 1
    for text in (done.stdout, (tmp_path / "out" / "attention.md").read_text()):
        assert "| torchtrain sdpa, anchor | " in text


def test_an_engine_that_is_wrong_is_not_timed(bench_tree, monkeypatch):
    attend = cases.attend

    def wrong(*tensors, engine, **how):
        out, lse = attend(*tensors, engine=engine, **how)
        return out * (1 if engine == "dense" else 1.001), lse

    monkeypatch.setattr(cases, "attend", wrong)
    rows = measure(bench_tree)
    assert "times what the error rule allows" in rows["sdpa, full"]["not_run"]
    assert rows["BOS per document"]["error_ratio"] > 1
    assert "seconds" in rows["BOS per document"]


def test_the_rest_goes_on_where_one_runs_out_of_memory(bench_tree, monkeypatch):
    real = attention._seconds

    def seconds(prepared, inputs, clock):
        if prepared.source is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(prepared, inputs, clock)

    monkeypatch.setattr(attention, "_seconds", seconds)
    rows = measure(bench_tree)
    assert rows["BOS per document"]["not_run"] == "runs out of memory"
    assert "seconds" in rows["sdpa, anchor"]


# --- step -------------------------------------------------------------------------------------------------------------


def test_steps_start_from_the_same_losses(call, tmp_path):
    done = call("step")
    assert done.exit_code == 0, done.output
    result = read(tmp_path, "step")
    assert result["layers"] == 1
    losses = result["losses"]
    assert losses["torchtrain, full"]["mean"] == pytest.approx(losses["transformers, full"]["mean"], rel=1e-6)
    assert losses["torchtrain, anchor"]["mean"] == pytest.approx(losses["transformers, dense mask"]["mean"], rel=1e-6)
    assert losses["torchtrain, anchor"]["mean"] != losses["torchtrain, full"]["mean"]
    rows = {row["loop"]: row for row in result["rows"]}
    assert set(rows) == set(losses)
    for row in rows.values():
        assert row["days_per_billion"] == pytest.approx(1e9 / row["tokens_per_second"] / 86_400)
        assert row["flops"] > 0
    assert rows["torchtrain, full"]["flops"] > rows["torchtrain, anchor"]["flops"]


@pytest.mark.parametrize(("factor", "code"), [(1.001, 2), (1 + 2.0**-23, 0)])
def test_losses_that_are_not_the_models_are_refused(call, monkeypatch, factor, code):
    """The model is float32. It is judged against float64, so that one rounding passes."""
    right = step.Ours.losses
    monkeypatch.setattr(step.Ours, "losses", lambda self, row: right(self, row) * factor)
    done = call("step", "step.loops=['torchtrain, full', 'transformers, full']")
    assert done.exit_code == code, done.output
    assert ("the error of the losses of torchtrain, full is" in done.stderr) == (code == 2)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "given", "says"),
    [
        ("attention", ["attention.engine=[sdpa]"], "attention.engine: unknown key; did you mean attention.engines?"),
        ("attention", ["repeats=2"], "repeats: 2"),
        ("attention", ["device=cuda"], "device cuda: torch sees no CUDA device"),
        ("attention", ["attention.lengths=[1000000]"], "lengths 1000000: the corpus of data.sources has "),
        ("attention", ["attention.kv_heads=3"], "attention: heads 4 is no multiple of kv_heads 3"),
        ("step", ["step.layers=9"], "step.layers 9: the model has 2"),
    ],
)
def test_a_mistake_is_one_line(call, what, given, says):
    result = call(what, *given)
    assert result.exit_code == 2, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("torchtrain: ")
    assert says in last


def test_the_configs_that_come_with_it_are_valid():
    for name in ("cpu", "gpu"):
        assert load_bench(CONFIGS / f"{name}.yaml").step is not None
