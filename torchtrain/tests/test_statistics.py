"""Statistics against slow twins."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from torchtrain import cli
from torchtrain.config import DataConfig, MixtureConfig, Source
from torchtrain.data import PackPlan, prepare
from torchtrain.data.statistics import count_rows, count_store
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl


@pytest.mark.parametrize("length", [7, 64, 1000])
def test_rows_are_those_of_the_packing_plan(length):
    random = np.random.default_rng(1)
    lengths, domains = random.integers(1, 90, 400), random.integers(0, 3, 400)
    plan = PackPlan(lengths, length, np.zeros(400, dtype=np.int64), seed=5)
    spans = [span for row in range(len(plan)) for span in plan.spans(row)]
    told = count_rows(lengths, domains, ["a", "b", "c"], length, seed=5)
    assert told.rows == len(plan)
    for number, name in enumerate("abc"):
        own = [span for span in spans if domains[span.document_index] == number]
        assert told.sequences[name] == len(own)
        assert told.mixture_ratio[name] == len(own) / len(spans)
    squares = sum((span.stop - span.start) ** 2 for span in spans)
    seen = [n for span in spans for n in range(1, span.stop - span.start)]  # by each prediction within its document
    for one in told.contexts:
        assert one.targets == sum(one.start <= n < 2 * one.start for n in seen) > 0
    assert sum(one.targets for one in told.contexts) == len(seen)
    far = [one for one in told.contexts if one.start >= told.tail]
    assert length / 8 < told.tail <= length / 4 < 2 * told.tail
    assert {one.weight for one in told.contexts if one not in far} <= {1.0}
    assert len({round(one.targets * (one.weight - 1)) for one in far if one.weight < 11}) <= 1, "each gets as much"
    assert told.live_pair_ratio == pytest.approx(squares / (len(plan) * length**2), abs=1e-12)


def test_under_a_mixture_it_tells_what_is_taken_and_what_changed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "w1 " * (1 + 40 * (i % 10 == 0))} for i in range(200)])
    mixture = MixtureConfig(long_tokens=30, long_share=0.95, most_repeats=2)
    data = DataConfig(sources=[Source(files=str(path))], cache=str(tmp_path / "cache"), mixture=mixture)
    store = prepare(data, word_tokenizer())
    told = count_store(store, [64])
    assert told.before is not None
    assert told.mixture is not None
    (before,) = told.before
    assert (before.documents, before.tokens, before.longest) == (200, store.token_count, 42)
    assert told.all.tokens == int((store.repeats * store.lengths).sum())
    long, short = told.mixture
    assert (long.documents, long.tokens, long.most_repeats) == (20, 20 * 42, 2)
    assert long.wanted == round(0.95 * store.token_count) > long.taken - 42
    assert (short.documents, short.wanted) == (180, store.token_count - long.wanted)
    assert told.domains[0].long_token_share > told.before[0].long_token_share


def test_the_verb_writes_json_and_prints_a_table(tmp_path):
    records = [{"text": "w1 " * (1 + i % 50), "domain": ("<b>x</b>", "[y]")[i % 2]} for i in range(100)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    data = DataConfig(
        sources=[Source(files=str(path), domain_field="domain")],
        cache=str(tmp_path / "cache"),
        mixture=MixtureConfig(long_tokens=30, long_weight=4),
    )
    store = prepare(data, word_tokenizer())
    call = CliRunner().invoke
    done = call(cli.app, ["stats", str(store.folder), "--out", str(tmp_path / "out"), "--sequence-length", "128"])
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert told["all"]["tokens"] == int((store.repeats * store.lengths).sum())
    (rows,) = told["rows"]
    table = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines() if line[:1] == "│"]
    x, y, both, *contexts = table
    assert [line[1] for line in contexts] == [f"{one['start']} to {2 * one['start'] - 1}" for one in rows["contexts"]]
    assert (x[1], y[1], both[1], both[3]) == ("<b>x</b>", "[y]", "all, and r", f"{told['all']['tokens']:,}")
    assert x[2] == f"{told['before'][0]['documents']} → {told['domains'][0]['documents']}"
    assert (x[-2], both[-2]) == (f"{rows['mixture_ratio']['<b>x</b>']:.2%}", f"{rows['live_pair_ratio']:.4f}")
    assert "50 documents are copies of others." in done.stdout
    again = call(cli.app, ["stats", str(tmp_path / "nowhere")])
    assert again.exit_code == 2
    assert "nowhere: is no finished token store; give a folder with store.json" in again.stderr
