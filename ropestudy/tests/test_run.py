"""A whole study on a tiny random model: its records, its resuming, its refusals, its command."""

import csv
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxref.decoder_config import DecoderConfig
from jaxref.rounding import SITES
from jaxref.tests.decoders import hf_config, tiny
from jaxref.weights import save_hf, to_arrays
from ropestudy.cells import Bench
from ropestudy.cli import main
from ropestudy.compute.conditions import EXACT, on_alone, remedies
from ropestudy.compute.engine import Row, Stream, compare
from ropestudy.experiments import scores
from ropestudy.models import INITIALISATIONS, RANDOM_EMBEDDING, load_pretrained, random_arrays, shuffle, variant
from ropestudy.report import write_report
from ropestudy.report.compact import read_study, write_compact
from ropestudy.report.figures import FIGURES
from ropestudy.run import run_study
from ropestudy.schema import read_results
from ropestudy.spec import ModelConfig, TextConfig, load_study
from ropestudy.text import Pool, packed_row, read_pool, row

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TINY = Path(__file__).parents[2] / "configs" / "study" / "tiny.yaml"
BOS = 1
HALF = "{condition: hf_eager_bf16}"
# Most of a study this small is compiling. So: few conditions, and shapes that experiments share (two shifts, twelve
# tokens).
FEWER = [
    "factorial.off_from=[]",
    f"shift_pairs.contestants=[{HALF}, {{model: kaiming, condition: hf_eager_bf16}}]",
    f"lengths.contestants=[{HALF}]",
    "remedies.bases=[hf_eager_bf16]",
    "controls.phases=1",
    "controls.models=[pretrained, shuffled, kaiming_sqrt5]",
    "masks.conditions=[exact, hf_eager_bf16]",
    "setups.conditions=[hf_eager_bf16]",
    ,
    "remedies.positions=[{d1: 0}, {d1: 100, d2: 116, gap: 50}]",
    *(f"{name}.sequences=1" for name in ("factorial", "remedies", "controls")),
]


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list[str]:
    """Overrides that name a tiny model and its text."""
    folder = tmp_path_factory.mktemp("given")
    save_hf(folder / "model", tiny("llama", num_hidden_layers=1))
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(29)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"bos_token": f"w{BOS}"}))
    random = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in random.integers(2, 29, 30)) for _ in range(3)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return [f"model.source={folder / 'model'}", f"text.source={folder / 'text.jsonl'}"]


@pytest.fixture(scope="module")
def finished(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    # No configuration says how many of these there are.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "on_alone", lambda fmt: [one for one in on_alone(fmt) if one.site == "table"])
        patch.setattr(scores, "remedies", lambda base: remedies(base)[:1])
        return run_study(load_study(TINY, given + FEWER), out), out


def of(results, kind, **wanted):
    found = [one for one in results.records if one.kind == kind]
    return [one for one in found if all(getattr(one, name) == value for name, value in wanted.items())]


def test_every_record_is_there_and_reads_back(finished):
    results, out = finished
    assert read_results(out / "results.json") == results
    assert {one.kind for one in results.records} == {
        *("shift_pairs", "per_token", "by_length", "score", "mask_pair"),
        "outcome",
    }
    assert {one.group for one in of(results, "score")} == {*("baseline", "on_alone", "remedy", "control", "mask")}
    local = of(results, "shift_pairs", model="pretrained", condition="hf_eager_bf16", mode="local")[0]
    assert [(one.d1, one.d2) for one in local.pairs] == [(0, 2), (0, 16), (0, 100), (2, 16), (16, 100)]
    assert [len(one.difference.d.values) for one in local.pairs] == [2] * 5
    propagated = of(results, "shift_pairs", model="pretrained", condition="hf_eager_bf16", mode="propagated")[0]
    assert [(one.d1, one.d2) for one in propagated.pairs] == [(0, 16)]
    assert results.model.initialisations.keys() == {"kaiming", "kaiming_sqrt5"}
    assert not list(out.rglob("*.partial"))
    assert not list(out.rglob(".*"))


def test_the_report_has_a_table_of_each_kind_and_every_figure(finished, tmp_path):
    results = finished[0]
    write_report(results, tmp_path)
    assert {file.stem for file in (tmp_path / "tables").iterdir()} == {one.kind for one in results.records}
    assert {file.stem for file in (tmp_path / "figures").iterdir()} == FIGURES.keys()
    with (tmp_path / "tables" / "outcome.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(of(results, "outcome"))
    write_compact(results, tmp_path / "kept.json.xz")
    kept = read_study(tmp_path / "kept.json.xz")
    assert len(kept.records) == len(results.records)
    assert of(kept, "outcome")[0].outputs.kl.mean == pytest.approx(of(results, "outcome")[0].outputs.kl.mean, rel=1e-6)
    (tmp_path / "kept.json.xz").write_bytes((tmp_path / "kept.json.xz").read_bytes()[:-10])
    with pytest.raises(ValueError, match="no compact results"):
        read_study(tmp_path / "kept.json.xz")


def test_every_site_alone_does_something(finished):
    """What the engine compiles piece by piece must not lose a site on the way: each moves the outputs from
    float64's.
    """
    alone = [
        one for one in on_alone("bf16")
        if one.name != "on position fp32"  # which rounds no position below 2^24
    ]  # fmt: skip
    decoder = tiny(
        "llama", num_hidden_layers=1
    )  # in float32: of bf16 weights the site `embed` would have nothing to round
    row, positions = Row(np.arange(2, 10), np.ones(8, np.int64)), 4097 + np.arange(8)[None]  # not in TF32's 11 bits
    streams = [Stream(one, positions) for one in (EXACT, *alone)]
    against_exact = [((0, 0), (i, 0)) for i in range(len(streams))]
    _, (itself, *moved) = compare(decoder, row, streams, [], against_exact)
    assert itself.kl == 0
    for one, found in zip(alone, moved, strict=True):
        assert found.kl > 0, one.name
    assert {one.site for one in alone} == set(SITES)
    exact = of(finished[0], "score", group="baseline", condition="exact")[0]
    assert exact.error["propagated"].d.mean == 0
    assert exact.kl_error.kl.mean == 0


def test_masks(finished):
    results, _ = finished
    exact, half = (
        {one.a: one.difference for one in of(results, "mask_pair", mode="propagated", condition=name)}
        for name in ("exact", "hf_eager_bf16")
    )
    # Reset or not is the same function without an anchor: what is left is float64's rounding, 2^-45 of bf16's.
    assert exact["intra"].d.mean <= half["intra"].d.mean * 2.0**-40
    assert half["intra"].d.mean > 0


def test_an_interrupted_study_goes_on_and_ends_the_same(given, finished, tmp_path):
    done: list[str] = []

    def stop(what: str, number: int, total: int) -> None:
        done.append(what)
        if number == 3:
            raise KeyboardInterrupt

    only = [*given, *(f"{name}=off" for name in OTHERS), f"lengths.contestants=[{HALF}]"]
    config = load_study(TINY, only)
    with pytest.raises(KeyboardInterrupt):
        run_study(config, tmp_path, stop)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert len(kept) == 3
    assert not (tmp_path / "results.json").exists()
    resumed = run_study(config, tmp_path)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}.items()
    assert resumed.records == of(finished[0], "by_length")


def test_a_study_of_other_sections_has_the_same_cells_where_its_texts_are_the_same(given, tmp_path):
    """Documents are taken for their length; text.tokens keeps that where the longest section is left out."""

    def cells(out: str, *more: str) -> set[str]:
        """Return the names of the cells of `sites`, which are hashes of what their numbers depend on."""
        off = [f"{name}=off" for name in (*OTHERS, "lengths") if not any(one.startswith(name) for one in more)]
        run_study(load_study(TINY, [*given, *off, *more]), tmp_path / out)
        return {path.name for path in (tmp_path / out / "cells").glob("sites-*")}

    sites = ("sites.tokens=6", "sites.sequences=1")
    both = cells("both", *sites, f"lengths.contestants=[{HALF}]", "lengths.lengths=[8]", "lengths.sequences=1")
    assert both
    assert cells("alone", *sites, "text.tokens=8") == both
    assert not cells("with other texts", *sites) & both


OTHERS = (*("setups", "dose", "sites", "shift_pairs", "factorial", "remedies", "controls", "masks"),)
ONE_LENGTH = [*(f"{name}=off" for name in OTHERS), "lengths.lengths=[6]", f"lengths.contestants=[{HALF}]"]


def test_a_cell_that_is_broken_or_of_other_sources_is_computed_anew(given, tmp_path, monkeypatch):
    config = load_study(TINY, [*given, *ONE_LENGTH])
    first = run_study(config, tmp_path)
    broken, *_ = (tmp_path / "cells").iterdir()
    broken.write_text("{")
    assert run_study(config, tmp_path).records == first.records
    computed = []
    run = Bench.run
    monkeypatch.setattr(Bench, "run", lambda self, cell: computed.append(cell) or run(self, cell))
    run_study(config, tmp_path)
    assert not computed
    monkeypatch.setattr("ropestudy.cells.fingerprint", lambda: "others")
    assert run_study(config, tmp_path).records == first.records
    assert len(computed) == len(list((tmp_path / "cells").iterdir())) / 2


def test_another_studys_folder_is_refused(given, finished, tmp_path):
    _, out = finished
    with pytest.raises(ValueError, match=r"--out: .* holds another study"):
        run_study(load_study(TINY, [*given, *FEWER, "seed=1"]), out)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"--out: .* not a study's folder"):
        run_study(load_study(TINY, given), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["shift_pairs.d2=3000000000"], "shift_pairs.d2: 3000000000: give 8388608 or less"),
        (["setups.conditions=[bf17]"], "setups.conditions.0: 'bf17' is not a condition; choose from exact"),
        (
            ["masks.documents=5"],
            "masks.documents: 5 documents of unequal lengths need 16 tokens, and masks.tokens is 12",
        ),
        (["shift_pairs.toknes=3"], "shift_pairs.toknes: unknown key; did you mean shift_pairs.tokens?"),
        (["text.tokens=11"], "text.tokens 11: the longest row has 12; give 12 or more, or leave it out"),
        ([f"{name}=off" for name in (*OTHERS, "lengths")], "no experiment; give one of setups"),
        (["remedies.bases=[fp32]"], "remedies.bases.0: 'fp32' is not a preset of half precision"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_in_one_line(overrides, line):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        load_study(TINY, overrides)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_command(given, tmp_path, monkeypatch, capsys):
    def jaxref(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jaxref", "study", str(TINY), *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    out = tmp_path / "out"
    few = [*given, *ONE_LENGTH]
    code, printed, log = jaxref(*few, "--out", str(out))
    assert (code, printed) == (0, f"1 records in {out / 'results.json'}\ntables and figures in {out}\n")
    assert log.count("\n") == 2  # a line for each cell

    model, text = given
    for arguments, line in (
        ([text, "model.source=no/such/folder/here"], "and no hub id such as name/model; give one of them, or smollm2"),
        ([model, "text.source=nowhere.txt"], "text.source: 'nowhere.txt' is neither demo nor a .jsonl"),
        ([*given, "lengths.lengths=[500]"], "has 0 documents of 500 tokens or more, and 2 are needed"),
        ([*given, "text.field=body"], "has no string 'body'"),
    ):
        code, printed, log = jaxref(*arguments, "--out", str(tmp_path / "refused"))
        assert (code, printed, log.count("\n")) == (2, "", 1)
        assert line in log
        assert not (tmp_path / "refused").exists()

    monkeypatch.setattr(Bench, "kept_or_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    code, _, log = jaxref(*few, "--out", str(tmp_path / "stopped"))
    assert (code, log) == (130, "jaxref: interrupted; finished cells are kept, and the same command continues\n")


def test_an_unknown_architecture_is_refused(given, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama") | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"model\.source: .* is not a model the oracle can load: model_type: 'gpt2'"):
        load_pretrained(ModelConfig(source=str(tmp_path)))


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer: "),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds no values by name, but a list"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON ("),
        (
            "tokenizer_config.json",
            '{"bos_token": "<s>"}',
            "names the bos_token '<s>', which tokenizer.json does not have",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(given, tmp_path, file, content, line):
    folder = shutil.copytree(given[0].partition("=")[2], tmp_path / "model")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=r"model\.source: ") as refused:
        load_pretrained(ModelConfig(source=str(folder)))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_random_models_have_the_bounds_they_say(given):
    config = DecoderConfig.from_hf(hf_config("llama"))
    bounds = {"kaiming": 6**0.5, "kaiming_sqrt5": 1.0}
    assert bounds.keys() | {"normal_002"} == INITIALISATIONS.keys() == RANDOM_EMBEDDING.keys()
    for name, factor in bounds.items():
        arrays = random_arrays(config, name, seed=0)
        for parameter, array in arrays.items():
            if array.ndim == 1:
                assert np.array_equal(array, np.ones_like(array))
            elif "embed_tokens" not in parameter:
                # Of n uniform draws the largest is below 0.9 of the bound with probability 0.9^n: at 72, one in 2,000.
                bound = np.float32(factor / array.shape[1] ** 0.5)
                assert 0.9 * bound < np.abs(array).max() <= bound
    pretrained = load_pretrained(ModelConfig(source=given[0].partition("=")[2], weights="stored"))
    mixed = to_arrays(variant(pretrained, "shuffled", 0))
    for name, array in to_arrays(pretrained.decoder).items():
        assert np.array_equal(np.sort(np.ravel(array)), np.sort(np.ravel(mixed[name])))
    assert not np.array_equal(mixed["lm_head.weight"], to_arrays(pretrained.decoder)["lm_head.weight"])
    assert np.array_equal(shuffle(to_arrays(pretrained.decoder), 0)["lm_head.weight"], mixed["lm_head.weight"])


def test_rows():
    pool = Pool(["a", "b"], [np.arange(10, 20), np.arange(20, 30)])
    assert row(pool, 1, 4, BOS, "first").ids.tolist() == [BOS, 20, 21, 22]
    assert row(pool, 1, 4, BOS, "none").ids.tolist() == [20, 21, 22, 23]
    packed = packed_row(pool, 0, 7, BOS, 2, "anchor")
    assert packed.ids.tolist() == [BOS, 10, 11, 20, 21, 22, 23]
    assert packed.documents.tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert packed.positions.tolist() == list(range(7))
    assert packed_row(pool, 0, 7, BOS, 2, "intra_reset").positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed_row(pool, 0, 7, BOS, 2, "intra").documents.tolist() == [1, 1, 1, 2, 2, 2, 2]


def test_text_of_every_kind(given, tmp_path):
    tokenizer = load_pretrained(ModelConfig(source=given[0].partition("=")[2])).tokenizer
    (tmp_path / "a.txt").write_text("w3 w4 w5")
    (tmp_path / "b.jsonl").write_text('{"body": "w6 w7 w8"}\n\n{"body": "w9"}\n{"body": "w2 w2 w2"}\n')
    pool = read_pool(TextConfig(source=str(tmp_path), field="body"), tokenizer, 3, 3, seed=0)
    assert sorted(ids.tolist() for ids in pool.ids) == [[2, 2, 2], [3, 4, 5], [6, 7, 8]]
    again = read_pool(TextConfig(source=str(tmp_path), field="body"), tokenizer, 3, 3, seed=0)
    assert again.names == pool.names
    with pytest.raises(ValueError, match=r"2 documents of 3|3 documents of 3 tokens or more, and 4 are needed"):
        read_pool(TextConfig(source=str(tmp_path), field="body"), tokenizer, 4, 3, seed=0)
