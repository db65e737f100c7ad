"""`torchtrain bench`: rows are right before they are timed, a turn is measured once, what moved is told."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from torchtrain.attention import make_plan
from torchtrain.bench import attention, cases, memory, step
from torchtrain.bench.baseline import compare_with
from torchtrain.bench.cases import YARDSTICK, BenchCase, prepare_case
from torchtrain.bench.clock import Clock
from torchtrain.bench.config import AttentionBench, BenchConfig, load_bench
from torchtrain.bench.figures import draw
from torchtrain.bench.record import BenchRecord
from torchtrain.bench.rows import Corpus
from torchtrain.bench.spread import noise_of, spread_of
from torchtrain.bench.tables import tables_of
from torchtrain.cli import app
from torchtrain.config import ModelConfig
from torchtrain.modeling.source import open_config
from torchtrain.planning import budget
from torchtrain.planning.memory import Shapes
from torchtrain.tests.tiny import tiny_config

ROOT = Path(__file__).resolve().parents[2]

CONFIGS = Path(__file__).parents[2] / "configs" / "bench"
CPU = Clock(torch.device("cpu"), 1)
RIVALS = ["BOS per document", "dense mask"]  # without FlexAttention, which compiles for a minute


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
            **{"rivals": RIVALS, "heads": 4, "kv_heads": 2, "head_dim": 8, "check_tokens": 64, "dense_tokens": 64},
        },
        "step": {
            "model": {"source": source, "dtype": "float32"},
            **{"lengths": [64], "layers": 1, "ceiling": 64},
            "modelled": {"model": source, "mfu": 0.5, "lengths": [64]},
        },
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


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_is_measured_shown_and_measured_once(call, tmp_path, monkeypatch):
    done = call("attention")
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in read(tmp_path, "attention")["rows"]}
    assert "needs a CUDA device" in rows["flash, anchor"]["not_run"]
    assert rows["dense, full"]["not_run"] == "a T x T mask is made up to 64 tokens"
    assert rows[YARDSTICK]["of_full"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    documents = rows["sdpa, anchor"]["documents"]
    assert sum(documents) == 96
    assert len(documents) > 1
    all_pairs = 96 * 97 // 2
    # The anchor stands in the first document's place of one token, and every other token sees it.
    own = [documents[0] - 1, *documents[1:]]
    anchored = 1 + sum(n * (n + 1) // 2 + n for n in own)
    assert rows["sdpa, anchor"]["live_ratio"] == anchored / all_pairs
    assert rows["sdpa, intra"]["live_ratio"] == sum(n * (n + 1) // 2 for n in documents) / all_pairs
    row = rows["sdpa, anchor"]
    assert row["over_the_law"]["median"] == pytest.approx(row["of_full"]["median"] / row["live_ratio"])
    assert row["error_ratio"] <= 1
    for name in ("attention.md", "attention.svg"):
        assert "sdpa" in (tmp_path / "out" / name).read_text()
    assert "torchtrain sdpa, anchor" in done.stdout.replace("\n", " ") or "sdpa" in done.stdout

    monkeypatch.setattr(attention, "_once", lambda *_: pytest.fail("measured again"))
    again = call("attention")
    assert again.exit_code == 0, again.output
    assert read(tmp_path, "attention")["rows"] == list(rows.values())


def test_what_was_cut_off_is_measured_and_nothing_else(call, tmp_path, monkeypatch):
    assert call("attention").exit_code == 0
    log = tmp_path / "out" / "attention.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])  # killed while it wrote
    once, measured = attention._once, []
    monkeypatch.setattr(attention, "_once", lambda *given: measured.append(1) or once(*given))
    assert call("attention").exit_code == 0
    assert len(measured) == 4, "two turns, each after a warm-up"
    assert len(log.read_bytes().splitlines()) == len(lines)


def test_more_may_follow_in_the_same_folder(call, tmp_path, monkeypatch):
    assert call("attention", "attention.engines=[sdpa]", "attention.rivals=[]").exit_code == 0
    once, measured = attention._once, []
    monkeypatch.setattr(attention, "_once", lambda *given: measured.append(1) or once(*given))
    assert call("attention", "attention.engines=[sdpa]", "attention.rivals=[dense mask]", "repeats=4").exit_code == 0
    # A fourth turn of what was there, each after a warm-up; of a mask so long there is none.
    assert len(measured) == 2 * 4
    assert call("attention", "attention.heads=8").exit_code == 2


def test_an_engine_that_is_wrong_is_not_timed(bench_tree, monkeypatch, tmp_path):
    real = cases._ours
    monkeypatch.setattr(
        cases,
        "_ours",
        lambda plan, engine: lambda q, k, v: real(plan, engine)(q, k, v) * (1 if engine == "dense" else 1.001),
    )
    config = BenchConfig.model_validate(bench_tree)
    found = attention.measure(config, BenchRecord(tmp_path / "a.jsonl", {}), CPU, lambda line: None)["rows"]
    by_name = {row["name"]: row for row in found}
    assert "times what the one rule allows" in by_name["sdpa, full"]["not_run"]
    assert by_name["BOS per document"]["error_ratio"] > 1  # what is not ours is told, not left out
    assert "seconds" in by_name["BOS per document"]


def test_what_runs_out_of_memory_is_told_and_the_rest_goes_on(bench_tree, monkeypatch, tmp_path):
    once = attention._once

    def run(prepared, inputs, clock):
        if prepared.source is not None and inputs.q_1THD.shape[1] == 96:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return once(prepared, inputs, clock)

    monkeypatch.setattr(attention, "_once", run)
    config = BenchConfig.model_validate(bench_tree)
    found = attention.measure(config, BenchRecord(tmp_path / "a.jsonl", {}), CPU, lambda line: None)["rows"]
    by_name = {row["name"]: row for row in found}
    assert by_name["BOS per document"]["not_run"] == "runs out of memory"
    assert "seconds" in by_name["sdpa, anchor"]


def test_a_bos_for_each_document_is_laid_out_as_the_authors_do():
    ids_T = torch.tensor([0, 1, 1, 2, 2, 2])
    source, copied, own = cases._copy_bos(ids_T)
    assert source.tolist() == [0, 1, 2, 0, 3, 4, 5]
    assert copied.tolist() == [[1, 1, 1, 2, 2, 2, 2]]
    assert own.tolist() == [0, 1, 2, 4, 5, 6]
    prepared = prepare_case(BenchCase("BOS per document", "anchor"), {"anchor": ids_T}, AttentionBench(), torch.float32)
    assert prepared.live_pairs == 6 + 10


def test_rows_of_a_corpus_count_as_their_plans_do(bench_tree):
    corpus = Corpus(BenchConfig.model_validate(bench_tree))
    for variant in ("full", "intra", "anchor"):
        plan = make_plan(torch.from_numpy(corpus.row(96, variant)["document_ids"])[None])
        assert corpus.live_pairs(96, variant) == plan.live_pairs
    least, mean = (
        make_plan(torch.from_numpy(corpus.row(96, "intra", which)["document_ids"])[None]).live_pairs
        for which in ("least", "mean")
    )
    assert least < mean
    assert (corpus.row(96, "full")["input_ids"] == corpus.row(96, "anchor")["input_ids"]).all()


# --- step -------------------------------------------------------------------------------------------------------------


def test_steps_start_from_the_same_losses(call, tmp_path):
    pytest.importorskip("trl")
    done = call("step")
    assert done.exit_code == 0, done.output
    result = read(tmp_path, "step")
    assert result["layers"] == 1
    losses = result["losses"]
    assert losses["torchtrain, full"]["mean"] == pytest.approx(losses["transformers, full"]["mean"], rel=1e-6)
    assert losses["torchtrain, anchor"]["mean"] == pytest.approx(losses["transformers, dense mask"]["mean"], rel=1e-6)
    assert losses["torchtrain, anchor"]["mean"] != losses["torchtrain, full"]["mean"]
    rows = {row["loop"]: row for row in result["rows"]}
    assert set(rows) == {
        "torchtrain, anchor",
        "torchtrain, full",
        "transformers, full",
        "transformers, dense mask",
        "FSDP, full",
        "TRL, full",
    }
    for row in rows.values():
        assert row["days_per_billion"] == pytest.approx(1e9 / row["tokens_per_second"] / 86_400)
        assert row["executed_flops"] > row["flops"] > 0
    assert rows["torchtrain, full"]["flops"] > rows["torchtrain, anchor"]["flops"]
    (full, anchor) = result["modelled"]
    assert full["flops"] > anchor["flops"]
    assert "Modelled, not measured" in (tmp_path / "out" / "step.md").read_text()


def test_all_loops_learn_the_same_of_a_step(bench_tree):
    """The first step's loss is the same, and so is the second's, to what bfloat16-free arithmetic leaves."""
    pytest.importorskip("trl")
    config = BenchConfig.model_validate(bench_tree)
    assert config.step is not None
    corpus = Corpus(config)
    model = step._load(config, config.step, corpus, CPU)
    bench = config.step.model_copy(update={"learning_rate": 1e-3})
    loops, missing = step._open(bench, model, step.World())
    assert not missing
    full = [name for name in loops if name.endswith("full")]
    with step.closing_all(loops.values()):
        learned = {name: [loops[name].step(step._row(corpus, 64, name)) for _ in range(3)] for name in full}
    for name in full:
        assert learned[name] == pytest.approx(learned["transformers, full"], rel=1e-4), name
    assert learned["torchtrain, full"][2] < learned["torchtrain, full"][0]


@pytest.mark.parametrize("recomputed", [False, True])
def test_fsdp_learns_in_bfloat16_what_float32_masters_do(bench_tree, recomputed):
    """What a CPU's and a GPU's bench run; its losses are not rounded to bfloat16."""
    config = BenchConfig.model_validate(bench_tree)
    assert config.step is not None
    changes = {"dtype": "bfloat16", "activation_checkpointing": recomputed}
    bench = config.step.model_copy(
        update={
            "learning_rate": 1e-3,
            "model": config.step.model.model_copy(update=changes),
            "loops": ["torchtrain, full", "FSDP, full"],
        }
    )
    corpus = Corpus(config)
    loops, missing = step._open(bench, step._load(config, bench, corpus, CPU), step.World())
    assert not missing
    with step.closing_all(loops.values()):
        learned = {name: [loop.step(step._row(corpus, 64, name)) for _ in range(3)] for name, loop in loops.items()}
    assert learned["FSDP, full"] == pytest.approx(learned["torchtrain, full"], rel=3e-3)
    assert learned["FSDP, full"][2] < learned["FSDP, full"][0]
    assert not any(loss == torch.tensor(loss).bfloat16().item() for loss in learned["FSDP, full"])


def test_losses_that_are_not_the_models_are_refused(call, monkeypatch):
    right = step.LOOPS["torchtrain, full"][0].losses
    monkeypatch.setattr(step.LOOPS["torchtrain, full"][0], "losses", lambda self, row: right(self, row) * 1.001)
    done = call("step", "step.loops=['torchtrain, full', 'transformers, full']")
    assert done.exit_code == 2
    assert "the losses of torchtrain, full err" in done.stderr


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_longest_context_is_what_the_plan_counts(bench_tree, tmp_path, monkeypatch):
    source, wide = (
        bench_tree["tokenizer"]["source"],
        {"hidden_size": 4096, "num_attention_heads": 512, "vocab_size": 264},
    )
    tree = bench_tree | {"memory": {"models": [source], "gib": [2.0], "processes": [2], "longest": 2**22}}
    monkeypatch.setattr(memory, "FIRST", 1024)
    monkeypatch.setattr(budget, "LAYER_CHUNK", 1024)  # below which more tokens hold more than above
    monkeypatch.setattr(budget, "model_config", lambda config: tiny_config(**wide))
    config = BenchConfig.model_validate(tree)
    record = BenchRecord(tmp_path / "m.jsonl", {})
    (row,) = memory.measure(config, record, CPU, lambda line: None)["rows"]
    shapes = Shapes(tiny_config(**wide))
    for offload, way in memory.ways_of(config, source, 2, None, shapes).items():
        assert way["distributed"]["sequence_parallel"] == 2
        below, above = (
            budget.count_memory(memory.config_of(config, source, tokens, way), shapes, 2).gpu
            for tokens in (row[offload], row[offload] * 5 // 4)
        )
        assert below <= 2.0 * 2**30 < above, (row, offload)
    monkeypatch.setattr(budget, "memory", lambda *_: pytest.fail("counted again"))
    assert memory.measure(config, record, CPU, lambda line: None)["rows"] == [row]


def test_adapters_have_rows_of_their_own_and_hold_longer_contexts(bench_tree, tmp_path, monkeypatch):
    source, lora = bench_tree["tokenizer"]["source"], {"also_train": ["norm"]}
    asked = {"models": [source], "gib": [2.0], "processes": [1], "longest": 2**22, "lora": lora}
    own = tiny_config(hidden_size=512, intermediate_size=2048, vocab_size=50_000, head_dim=128)
    monkeypatch.setattr(memory, "FIRST", 1024)
    monkeypatch.setattr(memory, "LAST", 2048)
    monkeypatch.setattr(budget, "model_config", lambda config: own)
    config = BenchConfig.model_validate(bench_tree | {"memory": asked})
    full, adapters = memory.measure(config, BenchRecord(tmp_path / "m.jsonl", {}), CPU, lambda line: None)["rows"]
    assert (full.get("trained"), adapters["trained"]) == (None, "adapters")
    assert adapters["none"] > full["none"] > 0
    result = {"what": "memory", "rows": [full, adapters], "settings": config.model_dump(), "explained": None}
    titles = [str(table.title) for table in tables_of(result)]
    assert "every weight trained" in titles[0]
    assert "adapters (LoRA) of rank 16 beside all-linear, norm trained" in titles[1]
    for way in memory.WAYS:  # those that carry the longest rows, too
        (line,) = compare_with(result, result | {"rows": [full, adapters | {way: 3}]})
        assert line.startswith(f"{source}, 1, 2.0, adapters, ")
        assert f", {way}: " in line
    other = adapters | {"lora": adapters["lora"] | {"rank": 64}, "all": 3}
    assert compare_with(result, result | {"rows": [full, other]}) == [], "another rank is another row"


def test_many_ranks_are_counted_up_to_where_the_search_stops_and_no_further(bench_tree, monkeypatch):
    """As for a 70B on 64 GPUs: four times 8 million tokens is more than a row may hold."""
    config = BenchConfig.model_validate(bench_tree | {"memory": {"longest": 2**24, "gib": [141]}})
    counted = list[int]()

    def held(run, shapes, processes):
        counted.append(run.pack.sequence_length)
        return SimpleNamespace(gpu=run.pack.sequence_length, hosts=0)

    monkeypatch.setattr(memory.budget, "memory", held)
    way = {"distributed": {"zero_stage": 3, "sequence_parallel": 64}}
    points = memory._count(config, "meta-llama/Meta-Llama-3-70B", way, None, 64)  # type: ignore[arg-type]
    assert counted == [tokens for tokens, _, _ in points]
    assert counted[-1] == 2**24
    assert sorted(set(counted)) == counted
    assert memory._follow(points, 141 * memory.budget.GIB, 2**24) == 2**24


def test_what_fits_nowhere_has_no_context(bench_tree, tmp_path, monkeypatch):
    tree = bench_tree | {"memory": {"models": [bench_tree["tokenizer"]["source"]], "gib": [0.001], "processes": [1]}}
    monkeypatch.setattr(memory, "FIRST", 2048)
    (row,) = memory.measure(
        BenchConfig.model_validate(tree), BenchRecord(tmp_path / "m.jsonl", {}), CPU, lambda line: None
    )["rows"]
    assert [row[way] for way in memory.WAYS] == [None] * len(memory.WAYS)


# --- an earlier result ------------------------------------------------------------------------------------------------


def attention_result(**changes):
    row = {"name": "sdpa, anchor", "dtype": "float32", "tokens": 96, "row": "mean"}
    return {"what": "attention", "rows": [row | {"of_full": spread_of([0.5, 0.52, 0.48])} | changes]}


def test_a_ratio_moved_when_it_did_so_by_more_than_both_noises():
    before = attention_result()
    assert compare_with(before, attention_result(of_full=spread_of([0.53, 0.55, 0.51]))) == []
    (line,) = compare_with(before, attention_result(of_full=spread_of([0.6, 0.61, 0.59])))
    assert line.startswith("float32, 96, mean, sdpa, anchor: 0.5 (0.48 to 0.52) before, 0.6 (0.59 to 0.61) now: +20%")
    (line,) = compare_with(before, attention_result(of_full=spread_of([0.3, 0.31, 0.29])))
    assert "-40%" in line
    assert noise_of(spread_of([1.0, 2.0, 4.0])) == math.log(2)
    # A noisy machine tells little, and says so by not telling.
    assert compare_with(before, attention_result(of_full=spread_of([0.6, 1.2, 0.3]))) == []


def test_what_ran_before_and_does_not_now_has_moved():
    gone = {**attention_result()["rows"][0], "not_run": "no kernel"}
    del gone["of_full"]
    (line,) = compare_with(attention_result(), {"what": "attention", "rows": [gone]})
    assert "not any more: no kernel" in line
    assert (
        compare_with(
            {"what": "attention", "rows": [gone, *attention_result(name="x")["rows"]]},
            {"what": "attention", "rows": [attention_result()["rows"][0], *attention_result(name="x")["rows"]]},
        )
        == []
    )


def test_check_gives_a_verdict(call, tmp_path):
    assert call("attention").exit_code == 0
    result = read(tmp_path, "attention")
    (tmp_path / "before.json").write_text(json.dumps(result))
    same = call("attention", "--check", str(tmp_path / "before.json"))
    assert same.exit_code == 0, same.output
    assert "0 moved" in same.stdout
    other = copy.deepcopy(result)
    for row in other["rows"]:
        if row["name"] == "sdpa, anchor":
            row["of_full"] = {name: value / 1000 for name, value in row["of_full"].items()}
    (tmp_path / "before.json").write_text(json.dumps(other))
    moved = call("attention", "--check", str(tmp_path / "before.json"))
    assert moved.exit_code == 1
    assert "moved     float32, 96, least, sdpa, anchor: " in moved.stdout


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "given", "says"),
    [
        ("attention", ["attention.engine=[sdpa]"], "attention.engine: unknown key; did you mean attention.engines?"),
        ("attention", ["attention.engines=[fash]"], "attention.engines.0: 'fash'"),
        ("attention", ["repeats=2"], "repeats: 2"),
        ("attention", ["device=cuda"], "device cuda: torch sees no CUDA device"),
        ("attention", ["--check", "nowhere.json"], "--check nowhere.json: "),
        ("attention", ["attention.lengths=[1000000]"], "lengths 1000000: the corpus of data.sources has "),
        ("attention", ["attention.kv_heads=3"], "attention: heads 4 is no multiple of kv_heads 3"),
        ("step", ["step.layers=9"], "step.layers 9: the model has 2"),
        ("step", ["step.modelled.gpu=Voodoo"], "step.modelled.gpu 'Voodoo': no peak is known"),
        ("memory", ["memory.models=[nowhere/at-all]"], "nowhere/at-all"),
    ],
)
def test_a_mistake_is_one_line(call, what, given, says):
    result = call(what, *given)
    assert result.exit_code == 2, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("torchtrain: ")
    assert says in last


def test_another_config_in_the_same_folder_is_refused(call, tmp_path):
    assert call("attention").exit_code == 0
    result = call("attention", "seed=7")
    assert result.exit_code == 2
    assert "holds measurements of another config or device" in result.stderr
    (tmp_path / "out" / "attention.jsonl").write_text("{}\n{}\n")
    assert "is damaged" in call("attention").stderr


def test_a_step_needs_its_section(call, bench_tree):
    result = call("step", tree={name: section for name, section in bench_tree.items() if name != "step"})
    assert result.exit_code == 2
    assert "step: missing; add the section" in result.stderr


def test_out_is_needed():
    result = CliRunner().invoke(app, ["bench", "attention", str(CONFIGS / "cpu.yaml")])
    assert result.exit_code == 2
    assert "--out" in result.stderr


def test_the_configs_that_come_with_it_are_valid():
    for name in ("cpu", "gpu"):
        config = load_bench(CONFIGS / f"{name}.yaml")
        assert config.step is not None
        for model in config.memory.models:
            assert Shapes(open_config(str(budget.resolve_source(model, "cache", needs="config")))).model(
                ModelConfig(source=model)
            )


@pytest.mark.parametrize("file", ["attention-cpu.json", "step-cpu.json"])
def test_a_figure_shows_every_line_and_no_formula(file):
    """The style draws no formulas, and there are more lines than colours."""
    result = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    drawn = draw(result)
    assert drawn is not None
    assert "$" not in drawn
    rows = [row for row in result["rows"] if "over_the_law" in row and row["variant"] != "full"]
    for name in {row["name"] for row in rows} if file.startswith("attention") else {r["loop"] for r in result["rows"]}:
        assert f">{name}<" in drawn, name
    for tokens in {row["tokens"] for row in result["rows"]}:
        assert f">{tokens:,}<" in drawn
