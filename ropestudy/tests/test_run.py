"""A whole study on a tiny random model: its records, how it continues, what it refuses, its command."""

import csv
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxref.decoder_config import DecoderConfig
from jaxref.model import to_arrays
from jaxref.rounding import SITES
from jaxref.storage.weights import save_hf
from jaxref.tests.decoders import hf_config, tiny
from ropestudy.cells import Bench
from ropestudy.cli import main
from ropestudy.compute.conditions import EXACT, on_alone, remedies
from ropestudy.compute.engine import Row, Stream, compare
from ropestudy.experiments import scores
from ropestudy.models import load_pretrained, random_arrays, shuffle, variant
from ropestudy.report import write_report
from ropestudy.report.figures import FIGURES
from ropestudy.run import run_study
from ropestudy.schema import read_results, write_compact
from ropestudy.spec import ModelConfig, StudyConfig, TextConfig, load_study
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
    "dose.mantissa_bits=[2]",
    "remedies.positions=[{d1: 0}, {d1: 100, d2: 116, gap: 50}]",
    *(f"{name}.sequences=1" for name in ("factorial", "remedies", "controls")),
]
OTHERS = ("setups", "dose", "sites", "shift_pairs", "factorial", "remedies", "controls", "places", "masks")
ONE_LENGTH = [*(f"{name}=off" for name in OTHERS), "lengths.lengths=[6]", f"lengths.contestants=[{HALF}]"]


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
        patch.setattr(scores, "on_alone", lambda: [one for one in on_alone() if one.site == "table"])
        patch.setattr(scores, "remedies", lambda base: remedies(base)[:1])
        return run_study(load_study(TINY, given + FEWER), out), out


def of(results, kind, **wanted):
    records = [one for one in results.records if one.kind == kind]
    return [one for one in records if all(getattr(one, name) == value for name, value in wanted.items())]


def test_every_record_is_there_and_reads_back(finished, tmp_path):
    results, out = finished
    assert read_results(out) == results
    assert {one.group for one in of(results, "attention")} == {
        *("shift_pairs", "lengths", "baseline", "on_alone", "remedy", "control", "place", "mask"),
    }
    assert {one.group for one in of(results, "outputs", against="exact")} == {
        *("baseline", "on_alone", "remedy", "control", "place", "mask", "setup", "dose", "site"),
    }
    one = {"group": "shift_pairs", "model": "pretrained", "condition": "hf_eager_bf16"}
    local = of(results, "attention", mode="local", **one)
    assert [(one.d1, one.d2) for one in local] == [(0, 2), (0, 16), (0, 100), (2, 16), (16, 100)]
    assert [len(one.difference.d.values) for one in local] == [2] * 5
    assert [one.columns is not None for one in local] == [False, True, False, False, False]
    propagated = of(results, "attention", mode="propagated", **one)
    assert [(one.d1, one.d2) for one in propagated] == [(0, 16)]
    assert results.model.initialisations.keys() == {"kaiming", "kaiming_sqrt5"}
    exact = of(results, "attention", group="baseline", condition="exact", against="exact")
    assert {one.difference.d.mean for one in exact} == {0}
    assert of(results, "outputs", group="baseline", condition="exact", against="exact")[0].outputs.kl.mean == 0

    write_report(results, tmp_path)
    assert {file.stem for file in (tmp_path / "figures").iterdir()} == FIGURES.keys()
    for kind in ("attention", "outputs"):
        with (tmp_path / "tables" / f"{kind}.csv").open(newline="") as file:
            assert len(list(csv.DictReader(file))) == len(of(results, kind))
    compact = tmp_path / "kept.json.xz"
    write_compact(results, compact)
    kept = read_results(compact)
    assert len(kept.records) == len(results.records)
    assert of(kept, "outputs")[0].outputs.kl.mean == pytest.approx(of(results, "outputs")[0].outputs.kl.mean, rel=1e-6)
    compact.write_bytes(compact.read_bytes()[:-10])
    with pytest.raises(ValueError, match="does not hold the results of a study"):
        read_results(compact)


def test_every_site_alone_does_something():
    """The engine compiles piece by piece. No site may be lost on the way: each moves the outputs from float64's."""
    alone = [one for one in on_alone() if one.name != "on position fp32"]  # which rounds no position below 2^24
    decoder = tiny("llama", num_hidden_layers=1)  # in float32: of bf16 weights `embed` would have nothing to round
    row, positions = Row(np.arange(2, 10), np.ones(8, np.int64)), 4097 + np.arange(8)[None]  # not in TF32's 11 bits
    streams = [Stream(one, positions) for one in (EXACT, *alone)]
    _, (itself, *moved) = compare(decoder, row, streams, [], [((0, 0), (i, 0)) for i in range(len(streams))])
    assert itself.kl == 0
    assert [one.name for one, divergence in zip(alone, moved, strict=True) if divergence.kl <= 0] == []
    assert {one.site for one in alone} == set(SITES)


def test_reset_positions_change_nothing_in_exact_arithmetic(finished):
    exact, half = (
        of(finished[0], "attention", against="reset", mode="propagated", condition=name)[0].difference.d.mean
        for name in ("exact", "hf_eager_bf16")
    )
    assert exact <= half * 2.0**-40  # what is left is float64's rounding, 2^-45 of bf16's
    assert half > 0


def test_a_document_in_several_places(finished):
    """A shift is the same function, an anchor without distance is a BOS, and distance or no BOS is another function."""

    def outputs(**place) -> dict:
        found = of(finished[0], "outputs", group="place", **place)
        return {one.condition: one.outputs for one in found}

    behind_bos, shifted = outputs(opening="bos", d1=0), outputs(opening="bos", d1=100)
    near, far = outputs(opening="anchor", gap=0), outputs(opening="anchor", gap=100)
    bare = outputs(opening="none", d1=100)
    assert near == behind_bos
    for other, same in ((shifted, True), (far, False), (bare, False)):
        assert (other["exact"].nll_p == behind_bos["exact"].nll_p) is same
        assert max(other["exact"].kl.values) <= max(other["hf_eager_bf16"].kl.values) * 2.0**-60
    assert shifted["hf_eager_bf16"].kl != behind_bos["hf_eager_bf16"].kl


def test_an_interrupted_study_continues_and_ends_the_same(given, finished, tmp_path):
    def stop(what: str, number: int, total: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    config = load_study(TINY, [*given, *(f"{name}=off" for name in OTHERS), f"lengths.contestants=[{HALF}]"])
    with pytest.raises(KeyboardInterrupt):
        run_study(config, tmp_path, stop)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert len(kept) == 3
    assert not (tmp_path / "results.json").exists()
    resumed = run_study(config, tmp_path)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}.items()
    assert resumed.records == of(finished[0], "attention", group="lengths")


def test_a_cell_that_is_damaged_or_of_other_sources_is_computed_again(given, tmp_path, monkeypatch):
    config = load_study(TINY, [*given, *ONE_LENGTH])
    first, computed, run = run_study(config, tmp_path), [], Bench.run
    monkeypatch.setattr(Bench, "run", lambda self, cell: computed.append(cell) or run(self, cell))
    damaged, *_ = (tmp_path / "cells").iterdir()
    damaged.write_text("{")
    assert run_study(config, tmp_path).records == first.records
    assert len(computed) == 1
    monkeypatch.setattr("ropestudy.cells.digest_of_code", lambda: "others")
    assert run_study(config, tmp_path).records == first.records
    assert len(computed) == 3


def test_the_folder_of_another_study_is_refused(given, finished, tmp_path):
    with pytest.raises(ValueError, match=r"--out: .* holds another study"):
        run_study(load_study(TINY, [*given, *FEWER, "seed=1"]), finished[1])
    (tmp_path / "results.json").write_text("mine")
    with pytest.raises(ValueError, match="does not hold the results of a study"):
        run_study(load_study(TINY, given), tmp_path)


def test_every_setting_is_described():
    def undescribed(kind) -> Iterator[str]:
        for name, field in kind.model_fields.items():
            if not field.description:
                yield f"{kind.__name__}.{name}"
            for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if hasattr(part, "model_fields"):
                    yield from undescribed(part)

    assert list(undescribed(StudyConfig)) == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["setups.conditions=[bf17]"], "setups.conditions.0: 'bf17' is not a condition; choose from exact"),
        (["masks.documents=5"], "documents: 5 documents of unequal lengths need 16 tokens, and tokens is 12"),
        (["shift_pairs.toknes=3"], "shift_pairs.toknes: unknown key (did you mean shift_pairs.tokens?"),
        (["text.tokens=11"], "text.tokens 11: the longest row has 12; give 12 or more, or remove it"),
        ([f"{name}=off" for name in (*OTHERS, "lengths")], "no experiment; add a section"),
        (["remedies.bases=[fp32]"], "remedies.bases.0: 'fp32'"),
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
    assert (code, printed) == (0, f"2 records in {out / 'results.json'}\ntables and figures in {out}\n")
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


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("config.json", json.dumps({"model_type": "gpt2"}), "is not a model the oracle can load: model_type: 'gpt2'"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer: "),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON ("),
        ("tokenizer_config.json", '{"bos_token": "<s>"}', ", '<s>', is not a token of its tokenizer.json"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused(given, tmp_path, file, content, line):
    folder = shutil.copytree(given[0].partition("=")[2], tmp_path / "model")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=r"model\.source: ") as refused:
        load_pretrained(ModelConfig(source=str(folder)))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_random_models_have_the_bounds_they_say(given):
    config = DecoderConfig.from_hf(hf_config("llama"))
    for name, factor in {"kaiming": 6**0.5, "kaiming_sqrt5": 1.0}.items():
        for parameter, array in random_arrays(config, name, seed=0).items():
            if array.ndim == 1:
                assert np.array_equal(array, np.ones_like(array))
            elif "embed_tokens" not in parameter:
                # Of n uniform draws the largest is below 0.9 of the bound with probability 0.9^n: at 72, one in 2,000.
                bound = np.float32(factor / array.shape[1] ** 0.5)
                assert 0.9 * bound < np.abs(array).max() <= bound
    pretrained = load_pretrained(ModelConfig(source=given[0].partition("=")[2]))
    own, mixed = to_arrays(pretrained.decoder), to_arrays(variant(pretrained, "shuffled", 0))
    for name, array in own.items():
        assert np.array_equal(np.sort(np.ravel(array)), np.sort(np.ravel(mixed[name])))
    assert not np.array_equal(mixed["lm_head.weight"], own["lm_head.weight"])
    assert np.array_equal(shuffle(own, 0)["lm_head.weight"], mixed["lm_head.weight"])


def test_rows():
    pool = Pool(["a", "b"], [np.arange(10, 20), np.arange(20, 30)])
    assert row(pool, 1, 4, BOS).ids.tolist() == [BOS, 20, 21, 22]
    assert row(pool, 1, 4, None).ids.tolist() == [20, 21, 22, 23]
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
    text = TextConfig(source=str(tmp_path), field="body")
    pool = read_pool(text, tokenizer, 3, 3, seed=0)
    assert sorted(ids.tolist() for ids in pool.ids) == [[2, 2, 2], [3, 4, 5], [6, 7, 8]]
    assert read_pool(text, tokenizer, 3, 3, seed=0).names == pool.names
