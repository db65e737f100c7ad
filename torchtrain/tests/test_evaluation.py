"""Answers, losses and tables: each beside its slow twin; what is refused, in one line."""

import random

import numpy as np
import pytest
import scipy.stats
import torch
from transformers.cache_utils import DynamicLayer

from anchorline.errors import UserError
from benchmarks.evaluation import with_section
from torchtrain.evaluation import tables
from torchtrain.evaluation.compare import compare, tables_of_run
from torchtrain.evaluation.evaluate import _may_know
from torchtrain.evaluation.figures import figures_of
from torchtrain.evaluation.generation import Generator
from torchtrain.evaluation.intervals import mcnemar, mean_interval, paired_interval, sign_flip
from torchtrain.evaluation.perplexity import (
    bucket_means,
    buckets,
    check_logits,
    document_losses,
    strided_loss,
    token_losses,
)
from torchtrain.evaluation.results import (
    Answer,
    Bucket,
    NotRun,
    PerplexityResult,
    Settings,
    TaskResult,
    Training,
    save_result,
)
from torchtrain.evaluation.scoring import score
from torchtrain.evaluation.suite import TASKS, PerplexityConfig, Suite
from torchtrain.evaluation.tables import latex, markdown
from torchtrain.run.trained import last_models
from torchtrain.tests.tiny import tiny_model

ROOM, END = 12, 257


def _prompts() -> list[list[int]]:
    """Prompts that share starts of several lengths: a copy, a prefix of another, one of one token, none in common."""
    draw = random.Random(0)
    base = [draw.randrange(256) for _ in range(60)]
    cuts = [(50, 20), (60, 3), (0, 7), (60, 1), (50, 15), (59, 0), (0, 1)]
    prompts = [base[:shared] + [draw.randrange(256) for _ in range(own)] for shared, own in cuts]
    return [*prompts, list(prompts[0])]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", max_position_embeddings=256).eval()


def _alone(model, prompts) -> list[list[int]]:
    """Each prompt alone, by transformers' own generation."""
    found = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=ROOM, do_sample=False, eos_token_id=END, pad_token_id=258
        )
        found.append([token for token in ids[0, len(prompt) :].tolist() if token != END])
    return found


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    return _alone(model, _prompts())


@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_answers_are_those_of_each_prompt_alone(model, alone, batch_tokens):
    prompts, work = _prompts(), []
    found = Generator(model, batch_tokens, [END]).answers(prompts, ROOM, lambda done, of: work.append((done, of)))
    assert found == alone
    assert len({tuple(answer) for answer in found}) == len(prompts) - 1  # only the copies agree
    assert work[-1][0] == len(prompts)
    assert sum(of.prompt_tokens for _, of in work) == sum(map(len, prompts))
    if batch_tokens in (1, 100_000):  # what is computed is the tree of all prompts, and of a copy its last token again
        tree = {tuple(prompt[:i]) for prompt in prompts for i in range(1, len(prompt) + 1)}
        assert sum(of.computed_tokens for _, of in work) == len(tree) + 1


@pytest.mark.parametrize("batch_tokens", [1, 100_000])
def test_a_token_of_an_answer_copies_no_keys(model, monkeypatch, batch_tokens):
    """transformers' own layer makes all keys anew for each token: 16 GiB of an 8B model at 128K."""
    calls, update = [], DynamicLayer.update
    monkeypatch.setattr(DynamicLayer, "update", lambda *args: calls.append(1) or update(*args))
    assert all(Generator(model, batch_tokens, []).answers(_prompts(), ROOM))
    reads = 0 if batch_tokens == 1 else len(_prompts())  # of one batch, each of which is kept
    assert len(calls) == reads * model.config.num_hidden_layers


def test_an_answer_ends_where_the_model_ends_it(model):
    prompts = _prompts()
    free = Generator(model, 100_000, []).answers(prompts, ROOM)
    stop = free[0][3]
    ended = Generator(model, 100_000, [stop]).answers(prompts, ROOM)
    assert ended == [answer[: answer.index(stop)] if stop in answer else answer for answer in free]
    assert [len(answer) for answer in Generator(model, 100_000, []).answers(prompts, 1)] == [1] * len(prompts)


def test_a_model_with_a_window_answers_each_prompt_alone():
    model = tiny_model("mistral", sliding_window=16, max_position_embeddings=256).eval()
    generator = Generator(model, 100_000, [END])
    assert not generator.shares_prefixes
    assert generator.answers(_prompts(), ROOM) == _alone(model, _prompts())


def test_losses_in_parts_of_the_vocabulary_are_the_models(model, monkeypatch):
    monkeypatch.setattr("torchtrain.evaluation.perplexity._TOKENS", 7)
    ids = _prompts()[0]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    truth = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    own = document_losses(model, ids)
    hidden, head = torch.randn(5, 32), model.get_output_embeddings()
    whole = token_losses(hidden, head, torch.arange(5), 10_000)
    for vocabulary in (1, 7, 263, 264):
        # float32: a rounding of a sum of exponentials for each part
        assert torch.allclose(token_losses(hidden, head, torch.arange(5), vocabulary), whole, atol=264 * 2**-23)
    assert torch.allclose(own.double(), truth, atol=64 * 2**-23 * truth.abs().max())
    assert sum(map(len, [own])) == len(ids) - 1


def test_perplexity_says_that_a_run_was_trained_on_its_source():
    training = Training(
        model="m", variant="anchor", sequence_length=8, rope={}, steps=1, sequences_per_step=1,
        data={"sources": [{"demo": "speeches", "share": 1.0}]},
    )  # fmt: skip
    speeches = PerplexityConfig.model_validate({"source": {"demo": "speeches"}})
    assert _may_know(training, speeches) == ", which the run was trained on"
    assert _may_know(training, PerplexityConfig.model_validate({"source": {"demo": "code"}})) == ""
    assert _may_know(None, speeches) == ""


def test_buckets_hold_every_position_once():
    for length in (128, 256, 257, 1000, 4096):
        held = [position for first, end in buckets(length) for position in range(first, end)]
        assert held == list(range(1, length))
    losses = torch.arange(1.0, 1000.0)
    means = list(bucket_means(losses, 1000))
    total = sum(mean * (end - first) for mean, (first, end) in zip(means, buckets(1000), strict=True))
    assert total == pytest.approx(float(losses.sum()))


@pytest.mark.parametrize(("window", "stride"), [(20, 5), (20, 19), (16, 7), (70, 3), (69, 1)])
def test_windows_take_each_token_once_with_all_that_they_hold(model, window, stride):
    ids = _prompts()[0]
    expected, seen = [], 1
    for first in range(0, len(ids), stride):
        part = ids[first : first + window]
        with torch.no_grad():
            logits = model(torch.tensor([part])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="none").tolist()
        end = first + len(part)
        expected += losses[-(end - seen) :] if end > seen else []
        seen = max(seen, end)
        if end == len(ids):
            break
    total, tokens = strided_loss(model, ids, window, stride)
    assert tokens == len(expected) == len(ids) - 1
    assert total == pytest.approx(sum(expected), rel=1e-5)


def test_a_model_that_caps_its_logits_has_no_perplexity_here(model):
    check_logits(model)
    forward = model.forward
    try:
        model.forward = lambda **inputs: type("Out", (), {"logits": forward(**inputs).logits.tanh()})
        with pytest.raises(UserError, match="scales or caps its logits"):
            check_logits(model)
    finally:
        model.forward = forward


def test_scores_are_rulers():
    assert score(" 12 and\n34\x00", ["12", "34", "5", "6"], "all") == 0.5
    assert score("The ANSWER", ["answer", "other"], "any") == 1.0
    assert score("", ["a"], "any") == score("", ["a"], "all") == 0.0
    assert mean_interval([1.0] * 8) == pytest.approx((1.0, 0.6756, 1.0), abs=1e-4)
    assert mean_interval([0.0] * 8) == pytest.approx((0.0, 0.0, 0.3244), abs=1e-4)


def test_intervals_are_paired_by_sample():
    draw = np.random.default_rng(1)
    hard = draw.random(300)
    a, b = [(hard > 0.5).astype(float)], [(hard > 0.45).astype(float)]  # b finds what a finds, and a little more
    mean, low, high = paired_interval(b, a)
    assert 0 < low < mean < high
    shuffled = [draw.permutation(b[0])]
    assert paired_interval(shuffled, a)[1] < 0  # unpaired, as much tells nothing


def _settings(samples="s", **more) -> Settings:
    return Settings(**{"weights": "w", "samples": samples, "anchor": [], "dtype": "float32"} | more)


def _result(task="fwe", scores=(1.0, 0.0), samples="s", length=1024, checkpoint="model", **more) -> TaskResult:
    return TaskResult(
        task=task,
        length=length,
        checkpoint=checkpoint,
        step=None,
        source="x",
        settings=more.pop("settings", None) or _settings(samples),
        identity={"materials": {"haystack": "folder essays"}},
        attention="causal, sdpa",
        device="cpu",
        shares_prefixes=True,
        prompt_tokens=1,
        computed_tokens=1,
        seconds=1.0,
        versions={},
        created="2026-11-22T00:00:00+00:00",
        answers=[Answer(index=i, prediction="", score=of) for i, of in enumerate(scores)],
        **more,
    )


def _save(folder, *results):
    for result in results:
        save_result(folder / result.checkpoint / f"{result.task}-{result.length}.json", result)


def _perplexity(shift=0.0, samples="d") -> PerplexityResult:
    losses = [[2.0 + shift, 2.1 + shift], [1.9 + shift, 2.0 + shift]]
    return PerplexityResult(
        length=1024,
        checkpoint="model",
        step=3,
        source="x",
        settings=Settings(weights="w", samples=samples, anchor=[], dtype="float32"),
        text="speeches",
        buckets=[Bucket(first=1, end=256, losses=losses[0]), Bucket(first=256, end=1024, losses=losses[1])],
        strided=None,
        seconds=1.0,
        versions={},
        created="",
    )


def test_bold_stands_only_where_the_paired_interval_leaves_out_zero(tmp_path):
    wins, ties = [1.0] * 20 + [0.0] * 10, [1.0] * 10 + [0.0] * 20
    _save(tmp_path / "a", _result(scores=ties), _result("cwe", [1.0] * 15 + [0.0] * 15), _perplexity(0.5))
    _save(tmp_path / "b", _result(scores=wins), _result("cwe", [0.0] * 14 + [1.0] * 16), _perplexity())
    found, facts, runs = compare([tmp_path / "a", tmp_path / "b"])
    assert facts.keys() == {"a", "b"}
    by_title = {table.title: table for table in found}
    tasks = dict(by_title["Tasks at 1,024 tokens"].rows)
    assert [cell.bold for cell in tasks["fwe"]] == [False, True]
    assert [cell.bold for cell in tasks["cwe"]] == [False, False]
    assert "Average of the 13 tasks" not in by_title  # eleven did not run
    rows = dict(by_title["Average of those that ran (2 of 13)"].rows)
    assert rows["b - a, paired"][0].text.startswith("+18.3 [")
    perplexity = by_title["Perplexity by position at 1,024 tokens"]
    assert perplexity.head == ["", "1 to 255", "256 to 1,023"]
    assert dict(perplexity.rows)["loss: b - a, paired"][0].text == "-0.500 [-0.500, -0.500]"
    assert [note for note in by_title["Tasks at 1,024 tokens"].notes if "n = 30 samples" in note]
    tables.write_tables(found, facts, tmp_path / "out", "torchtrain compare a b", figures_of(runs))
    assert [path.name for path in (tmp_path / "out").glob("*.svg")] == ["score-by-length.svg"]
    html, tex = ((tmp_path / "out" / f"results.{kind}").read_text() for kind in ("html", "tex"))
    assert "<strong>66.7 [" in html
    assert r"\textbf{66.7 [" in tex
    assert "**66.7 [" in (tmp_path / "out" / "results.md").read_text()


@pytest.mark.parametrize(("alike", "n"), [(20, 500), (0, 4), (0, 1)])
def test_bold_is_none_where_few_samples_differ(tmp_path, alike, n):
    """At most four samples right in one run alone: the bootstrap's interval leaves out zero, and p is an eighth."""
    differ = min(4, n)
    for name, right in (("a", alike), ("b", alike + differ)):
        _save(tmp_path / name, _result(scores=[1.0] * right + [0.0] * (n - right)))
    found, _, _ = compare([tmp_path / "a", tmp_path / "b"])
    assert not [cell for table in found for _, cells in table.rows for cell in cells if cell.bold]


def test_signs_are_tried_or_drawn():
    zeros = np.zeros(500)
    for n in (3, 6, 9):
        few, p = zeros.copy(), mcnemar(np.ones(n), np.zeros(n))[2]
        few[:n] = 1
        assert sign_flip([few], [zeros]) == pytest.approx(p)
    many = zeros.copy()
    many[:30], many[30:50] = 1, -1
    assert sign_flip([many], [zeros]) == pytest.approx(
        mcnemar(np.repeat([1, 0], [30, 20]), np.repeat([0, 1], [30, 20]))[2], abs=0.02
    )
    assert sign_flip([zeros], [zeros]) == 1


def test_equal_scores_do_not_prove_two_runs_equal():
    mean, low, high = paired_interval([np.zeros(20)] * 3, [np.zeros(20)] * 3)
    assert (mean, low, high) == pytest.approx((0.0, -0.0596, 0.0596), abs=1e-4)  # 1 - .025 ** (1 / 60)
    assert paired_interval([np.ones(5)], [np.zeros(5)])[2] == 1
    assert paired_interval([np.ones(5)], [np.zeros(5)], scores=False) == (1, 1, 1)


def test_runs_of_other_numbers_of_checkpoints_are_refused(tmp_path):
    _save(tmp_path / "a", _result(), _result(checkpoint="step-1"))
    _save(tmp_path / "b", _result())
    with pytest.raises(UserError, match=r"a has 2 checkpoints, b 1, .*; give --last"):
        compare([tmp_path / "a", tmp_path / "b"])


def test_checkpoints_of_a_run_that_were_measured_otherwise_are_refused(tmp_path):
    """A mean over them would be of other samples, other documents or other prompts."""
    for name, changed in (
        ("samples", _result(checkpoint="step-1", samples="t")),
        ("anchor", _result(checkpoint="step-1", settings=_settings(anchor=[1]))),
        ("engine", _result(checkpoint="step-1", settings=_settings(engine={"backend": "vllm"}))),
        ("samples", _perplexity(samples="e").model_copy(update={"checkpoint": "step-1"})),
    ):
        place = tmp_path / f"{name}-{changed.task}"
        _save(place, _result(), _perplexity(), _result(checkpoint="step-1"))
        _save(place, _perplexity().model_copy(update={"checkpoint": "step-1"}), changed)
        with pytest.raises(
            UserError, match=f"{place.name} were not measured alike: .*of 'model' and .* has other {name}"
        ):
            compare([place])


def test_a_checkpoint_without_perplexity_is_no_part_of_a_mean(tmp_path):
    _save(tmp_path / "a", _result(), _perplexity(), _result(checkpoint="step-1"))
    with pytest.raises(UserError, match="'step-1' has no result of perplexity at 1,024, and others have"):
        compare([tmp_path / "a"])


def test_two_versions_of_one_task_are_refused(tmp_path):
    _save(tmp_path / "a", _result("vt"), _result("vt_2024_10"))
    with pytest.raises(UserError, match="holds vt_2024_10 and vt at 1,024 tokens, two versions of one task"):
        compare([tmp_path / "a"])


def test_seeds_with_and_without_an_anchor_are_no_row(tmp_path):
    _save(tmp_path / "a-0", _result())
    _save(tmp_path / "a-1", _result(settings=_settings(anchor=[1])))
    with pytest.raises(UserError, match=r"a-0 and a-1 were not measured alike: fwe at 1,024 has other anchor"):
        compare([f"a={tmp_path / 'a-0'},{tmp_path / 'a-1'}"])
    assert compare([tmp_path / "a-0", tmp_path / "a-1"])  # which is what one wants to see


@pytest.mark.parametrize(("said", "message"), [("/", "is no run"), (".", "holds no results")])
def test_a_run_is_a_folder_with_a_name(tmp_path, monkeypatch, said, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        compare([said])


def test_seeds_that_do_not_pair_show_nothing_in_bold(tmp_path):
    seeds = _save_seeds(tmp_path, "a", [[1.0] * n + [0.0] * (200 - n) for n in (50, 52, 54)])
    for step in range(3):
        _save(tmp_path / "b", _result(scores=[0.0] * 200, checkpoint=f"step-{step}"))
        _save(tmp_path / "b", _perplexity().model_copy(update={"checkpoint": f"step-{step}"}))
    for step in range(3):
        place = tmp_path / f"a-{step}" / "model" / "perplexity-1024.json"
        save_result(place, _perplexity())
    found, _, _ = compare([seeds, tmp_path / "b"])
    assert not [cell for table in found for _, cells in table.rows for cell in cells if cell.bold]


def test_losses_in_windows_stand_in_the_table(tmp_path):
    for name, strided in (("a", 1.0), ("b", 2.0)):
        _save(tmp_path / name, _result(), _perplexity().model_copy(update={"strided": strided}))
    found, _, _ = compare([tmp_path / "a", tmp_path / "b"])
    table = next(table for table in found if "Perplexity" in table.title)
    assert table.head[-1] == "in windows of 512"
    assert [cells[-1].text for _, cells in table.rows] == ["2.72", "7.39", ""]
    assert {len(cells) for _, cells in table.rows} == {3}


def _save_seeds(folder, name: str, each: list[list[float]]) -> str:
    for seed, scores in enumerate(each):
        at_step = {"checkpoint": "model"}
        _save(folder / f"{name}-{seed}", _result(scores=scores, **at_step), _perplexity(0.1 * seed))
    return f"{name}=" + ",".join(str(folder / f"{name}-{seed}") for seed in range(len(each)))


def test_seeds_are_one_row_with_an_interval_over_them(tmp_path):
    """Bold needs both intervals: of 200 samples the first is surely above, of three seeds it is not."""
    base = [0.0] * 200
    a = _save_seeds(tmp_path, "a", [base, base, base])
    steady = _save_seeds(tmp_path, "steady", [[1.0] * n + [0.0] * (200 - n) for n in (50, 52, 54)])
    shaky = _save_seeds(tmp_path, "shaky", [[1.0] * n + [0.0] * (200 - n) for n in (5, 20, 131)])
    found, _, runs = compare([a, steady])
    by_title = {table.title: table for table in found}
    assert [(run.name, run.checkpoints) for run in runs] == [("a", 3), ("steady", 3)]
    tasks = dict(by_title["Tasks at 1,024 tokens"].rows)["fwe"]
    assert [cell.bold for cell in tasks] == [False, True]
    rows = dict(by_title["Average of those that ran (1 of 13)"].rows)
    low, high = scipy.stats.ttest_1samp([25, 26, 27], 0).confidence_interval()
    assert rows["steady - a, over 3 seeds"][0].text == f"[{low:+.1f}, {high:+.1f}]"
    assert rows["steady - a, paired"][0].text.startswith("+26.0 [")
    perplexity = dict(by_title["Perplexity by position at 1,024 tokens"].rows)
    assert "loss: steady - a, over 3 seeds" not in perplexity  # all differ alike, which says nothing of the next
    tasks = next(dict(table.rows)["fwe"] for table in compare([a, shaky])[0] if table.title == "Tasks at 1,024 tokens")
    assert [cell.bold for cell in tasks] == [False, False]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("a={0}/a-0", "names two runs or more"),
        ("={0}/a-0,{0}/a-1", "names two runs or more"),
        ("a={0}/a-0,{0}/a-0", "two have one name"),
        ("a={0}/a-0,{0}/other", "were not measured alike"),
        ("a={0}/a-0,{0}/gone", "holds no results"),
    ],
)
def test_seeds_that_do_not_fit_are_refused(tmp_path, said, message):
    _save_seeds(tmp_path, "a", [[1.0], [0.0]])
    _save(tmp_path / "other", _result(scores=[1.0]))
    with pytest.raises(UserError, match=message):
        compare([said.format(tmp_path)])


def test_what_was_measured_on_the_way_is_taken_where_nothing_was_measured_afterwards(tmp_path):
    _save(tmp_path / "a-on-the-way", _result(scores=[0.0], checkpoint="step-1"))
    assert compare([tmp_path / "a"])[2][0].checkpoints == 1
    _save(tmp_path / "a-evaluation", _result(scores=[1.0]), _result(scores=[1.0], checkpoint="step-1"))
    (run,) = compare([tmp_path / "a"])[2]
    assert (run.name, run.checkpoints, run.scores(("fwe", 1024)).tolist()) == ("a", 2, [1.0])


def test_mcnemar_is_exact_and_stands_where_samples_are_right_or_wrong(tmp_path):
    a, b = np.array([1.0] * 9 + [0.0] * 1 + [1.0] * 5), np.array([0.0] * 9 + [1.0] * 1 + [1.0] * 5)
    assert mcnemar(a, b) == (9, 1, pytest.approx(22 / 1024))  # 2 (1 + 10) / 2^10
    assert mcnemar(a, a) == (0, 0, 1.0)
    mixed = [0.5, *a[1:]]
    for name, scores, other in (("a", a, mixed), ("b", b, mixed)):
        _save(tmp_path / name, _result(scores=scores), _result("cwe", other))
    found, _, _ = compare([tmp_path / "a", tmp_path / "b"])
    (table,) = [table for table in found if table.title.startswith("Right in one run alone")]
    assert [(name, cells[0].text) for name, cells in table.rows] == [("fwe", "b 1, a 9, p 0.021")]


def test_groups_and_short_benchmarks_are_laid_out_as_the_papers(tmp_path):
    def short(value: float, **more):
        names = [
            ("longbench_lcc", [value, 1.0]),
            ("longbench_repobench-p", [value, 0.0]),
            ("longbench_trec", [value, 1.0]),
        ]
        return [
            *(_result(name, scores) for name, scores in names),
            _result("mmlu_anatomy", [value]),
            _result("mmlu_virology", [1.0, 1.0, 1.0]),
            _result("hellaswag", [1.0, value]),
        ]

    _save(
        tmp_path / "a", *short(0.0), NotRun(task="longbench_samsum", length=1024, checkpoint="model", not_run="no file")
    )
    _save(tmp_path / "b", *short(1.0))
    found, _, runs = compare([tmp_path / "a", tmp_path / "b"])
    by_title = {table.title: table for table in found}
    groups = by_title["LongBench at 1,024 tokens"]
    assert groups.head == ["", "Code Completion", "ICL"]
    rows = {name: [cell.text for cell in cells] for name, cells in groups.rows}
    assert rows["a"][0].startswith("25.0 [")
    assert rows["b - a, paired"][0].startswith("+50.0 [")
    assert rows["a"][1] == "none: 1 did not run"  # samsum: never an average of trec alone
    short_table = by_title["Short benchmarks"]
    assert short_table.head == ["", "LongBench ICL (1K)", "HellaSwag", "MMLU (2 of 57 subjects)"]
    rows = {name: [cell.text for cell in cells] for name, cells in short_table.rows}
    assert rows["a"][2].startswith("75.0 [")  # three of four questions, not the mean of 0 and 100
    assert any("Not run: longbench_samsum: no file." in note for note in groups.notes)
    assert {name for name, _ in by_title["Right in one run alone, at 1,024 tokens"].rows} == {"hellaswag", "mmlu"}
    assert figures_of(runs) == []


def test_figures_show_runs_by_length_and_by_step(tmp_path):
    for name, shift in (("a", 0.0), ("b", 0.5)):
        for step, right in ((10, 3), (20, 6), (30, 5)):
            scores = [1.0] * right + [0.0] * (10 - right)
            for length in (1024, 2048):
                result = _result(scores=scores, length=length, checkpoint=f"step-{step}")
                _save(tmp_path / name, result.model_copy(update={"step": step}))
            _save(tmp_path / name, _perplexity(shift).model_copy(update={"step": step, "checkpoint": f"step-{step}"}))
    found, facts, runs = compare([tmp_path / "a", tmp_path / "b"])
    figures = figures_of(runs)
    assert [figure.name for figure in figures] == ["score-by-length", "score-by-step", "perplexity-by-step"]
    assert all(
        f">{name}<" in figure.svg for figure in figures for name in ("a", "b", "1K")[: 2 + ("length" in figure.name)]
    )
    tables.write_tables(found, facts, tmp_path / "out", "torchtrain compare a b", figures)
    html = (tmp_path / "out" / "results.html").read_text()
    assert html.count("<svg") == 3
    for last, mean in ((None, "46.7 "), (2, "55.0 "), (1, "50.0 [")):  # 3, 6 and 5 of 10
        found, _, kept = compare([tmp_path / "a", tmp_path / "b"], last)
        (table,) = [table for table in found if table.title.startswith("Average of those")]
        assert dict(table.rows)["a"][0].text.startswith(mean)
        assert figures_of(kept)[1] == figures[1]  # by step: all of them


def test_averages_are_of_thirteen_and_of_eleven_or_none():
    every = [_result(task, [1.0, 1.0]) for task in TASKS if task != "vt"]
    lost = [of for of in every if of.task not in ("niah_multikey_3", "cwe")]
    zeros = [_result(task, [0.0, 0.0]) for task in ("niah_multikey_3", "cwe")]
    (table,) = tables_of_run([*lost, *zeros])
    rows = {name: cells[0].text for name, cells in table.rows}
    assert rows["mean of the 13"].startswith("84.6 [")  # 11 of 13
    assert rows["mean of the paper's 11"].startswith("100.0 [")
    missing = NotRun(task="qa_1", length=1024, checkpoint="model", not_run="squad is not set")
    (table,) = tables_of_run([*(of for of in every if of.task != "qa_1"), missing])
    rows = {name: cells[0].text for name, cells in table.rows}
    assert rows["mean of the 13"] == rows["mean of the paper's 11"] == "none: 1 did not run"
    assert rows["qa_1"] == "not run"
    assert "Not run: qa_1: squad is not set." in table.notes


def test_checkpoints_of_a_run_are_averaged_and_their_spread_is_told():
    every = [task for task in TASKS if task != "vt"]
    results = [_result(task, [value] * 4, checkpoint=f"m{value}") for task in every for value in (0.25, 0.75)]
    (table,) = tables_of_run(results)
    rows = {name: cells[0].text for name, cells in table.rows}
    assert rows["fwe"].startswith("50.0 [")
    assert rows["mean of the 13"].startswith("50.0 ±35.4 [")  # .25 and .75: a standard deviation of .5 / sqrt 2


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (_result(samples="t"), "fwe at 1,024 has other samples"),
        (_result(length=2048), "lengths: "),
        (_result("cwe"), "tasks: "),
    ],
)
def test_compare_refuses_other_samples_lengths_and_tasks(tmp_path, other, said):
    _save(tmp_path / "a", _result())
    _save(tmp_path / "b-evaluation", other)
    with pytest.raises(UserError, match=f"a and b were not measured alike: {said}"):
        compare([tmp_path / "a", tmp_path / "b"])


def test_a_checkpoint_that_lacks_a_task_is_told(tmp_path):
    _save(tmp_path / "a", _result(), _result("cwe"), _result(checkpoint="step-1"))
    with pytest.raises(UserError, match=r"a: '?step-1'? has no result of cwe at 1,024, and others have; evaluate"):
        compare([tmp_path / "a"])


def test_a_step_whose_evaluation_failed_on_the_way_is_told_with_its_folder(tmp_path):
    place = tmp_path / "a-on-the-way"
    _save(place, _result(), _result("cwe"), _result(checkpoint="step-1"))
    with pytest.raises(UserError, match=rf"a: '?step-1'? has no result of cwe .*; remove {place}/step-1, or evaluate"):
        compare([tmp_path / "a"])


def test_what_is_no_result_is_one_line(tmp_path):
    _save(tmp_path / "a", _result())
    with pytest.raises(UserError, match=r"holds no results; first: torchtrain evaluate"):
        compare([tmp_path / "a", tmp_path / "none"])
    with pytest.raises(UserError, match="two have one name"):
        compare([tmp_path / "a", tmp_path / "a"])
    place = tmp_path / "a" / "model" / "fwe-1024.json"
    text = place.read_text()
    for damaged, said in (
        (text[:-20], "is not JSON"),
        (text.replace('"score": 1.0', '"score": 7.0'), "is damaged, or of another version"),
        (text.replace('"fwe"', '"cwe"'), "is of cwe at 1024"),
    ):
        place.write_text(damaged)
        with pytest.raises(UserError, match=said):
            compare([tmp_path / "a"])


def test_the_section_of_the_benchmarks_is_written_alone():
    row = {"task": "fwe", "ours_seconds": 1.0, "stock_seconds": 2.0, "ratio": 2.0}
    rows = [row | {"computed_share": 0.5, "same_answers": 4}]
    facts = {"batch_of_stock": 4, "model": "m", "dtype": "float32", "length": 1024, "samples": 4, "pairs": 1}
    report = facts | {"device": "d", "threads": 1, "versions": {"torch": "2"}, "results": rows}
    once = with_section("# Benchmarks\n\n<!-- begin: data -->\n## Data\n<!-- end: data -->\n", report)
    assert "| fwe | 1.00 | 2.00 | 2.00 | 50% | 4 of 4 |" in once
    assert "## Data\n<!-- end: data -->\n\n<!-- begin: evaluation" in once
    assert with_section(once, report) == once
    changed = with_section(once, report | {"results": [rows[0] | {"ratio": 3.0}]})
    assert changed == once.replace("| 2.00 | 50% |", "| 3.00 | 50% |")


def test_tables_escape_what_they_hold():
    table = tables.ScoreTable("A_b & 5%", ["", "x|y"], [("run_1", [tables.ScoreCell("1|2", True)])], ["50% of #1"])
    assert r"\caption{A\_b \& 5\%. 50\% of \#1}" in latex(table)
    assert r"run\_1 & \textbf{1|2}" in latex(table)
    assert r"| run_1 | **1\|2** |" in markdown(table)


def test_a_suite_is_strict():
    for tasks, said in (
        (["niah_single_4"], "did you mean niah_single_"),
        (["vt", "vt_2024_10"], "the same task at two times"),
        (["fwe", "fwe"], "stands twice"),
        (["zzz"], "known: niah_single_1"),
    ):
        with pytest.raises(ValueError, match=said):
            Suite.model_validate({"tasks": tasks})
    with pytest.raises(ValueError, match="exactly one of folder, demo, files, dataset"):
        Suite.model_validate({"tasks": ["fwe"], "haystack": {"folder": "a", "demo": "speeches"}})


def test_the_last_models_of_a_run_are_found_by_step(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match="has left no model yet"):
        last_models(tmp_path, 5)
    for name in ("exports/step-00000010", "exports/step-00000020", "exports/step-00000030", "model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "outputs.json").write_text('{"finished": 30}')
    steps = [(name, step) for name, step, _ in last_models(tmp_path, 2)]
    assert steps == [("step-00000020", 20), ("model", 30)]  # the last export has the trained model's weights
    assert len(last_models(tmp_path, 5)) == 3
