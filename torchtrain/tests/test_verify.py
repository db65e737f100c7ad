"""`torchtrain verify`, and what a run does with tokens that have changed, with copies and with written special
tokens.
"""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from anchorline.errors import UserError
from torchtrain.checkpoint.identity import check_identity
from torchtrain.config import Preparation, TokenizerConfig, load_config
from torchtrain.data import prepare, prepare_store
from torchtrain.modeling.source import open_tokenizer
from torchtrain.run import recipe
from torchtrain.run.folder import RunFolder
from torchtrain.run.lock import hold
from torchtrain.run.setup import set_up
from torchtrain.run.verify import verify_folder
from torchtrain.tests.run_fixtures import QUIET
from torchtrain.tests.runs import flip
from torchtrain.tests.tiny import tiny_tokenizer


def findings(folder: Path) -> list[str]:
    return [f"{found.good} {found.what.split(' /')[0]}" for found in verify_folder(folder)]


def test_a_run_and_its_store_are_verified(straight, place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    models = ["True exports/step-00000002", "True exports/step-00000004", "True model"]
    saved = ["True checkpoint of step 4", "True checkpoint of step 6", "True metrics.jsonl"]
    assert findings(run) == [*saved, *models, "True base", "True tokens"]
    record = json.loads((run / "run.json").read_text())
    store = Path(record["config"]["data"]["cache"]) / "corpus" / record["corpus_fingerprint"]
    assert findings(store) == ["True tokens"]

    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text("{")
    (bad, *others) = list(verify_folder(run))
    assert str(bad).startswith("BAD  config.yaml: ")
    assert all(found.good for found in others)
    (run / "config.yaml").write_text(config)

    flip(next((run / "checkpoints" / "step-00000004").glob("state-*")))
    flip(run / "metrics.jsonl")
    flip(run / "model" / "model.safetensors")
    flip(store / "tokens-00000.bin")
    bad = list(verify_folder(run))
    assert [found.good for found in bad] == [False, True, False, True, True, False, True, False]
    assert "its content has changed" in str(bad[0])
    assert "model.safetensors: its content has changed" in str(bad[5])
    assert "tokens-00000.bin: its content has changed" in str(bad[7])
    assert all(str(found).isprintable() for found in bad)
    flip(store / "tokens-00000.bin")
    assert findings(store) == ["True tokens"]

    for lie in ({"config": []}, {"identity": {"data": 5}}, {"identity": {"model": {"rope_parameters": 5}}}):
        (run / "run.json").write_text(json.dumps(record | lie))
        with pytest.raises(UserError, match=r"run\.json: is damaged|the run's identity: rope: 5"):
            RunFolder(run).check_run().training()
    with pytest.raises(UserError, match=r"is neither a run's folder nor a token store's"):
        findings(tmp_path)


@pytest.mark.parametrize("at_work", [True, False])
@pytest.mark.parametrize(
    "gone", ["checkpoints/step-00000004", "checkpoints/step-00000006", "exports/step-00000004", "model"]
)
def test_what_a_run_at_work_removes_or_has_not_named_yet_is_not_bad(done, gone, at_work):
    with hold(done / ".lock") if at_work else nullcontext():
        found = verify_folder(done)
        first = next(found)
        (done / gone).rename(done / f"{gone}.deleted")
        bad = [finding for finding in (first, *found) if not finding.good]
    again = gone.endswith("4") and "checkpoints" in gone  # it was read before it went
    assert bool(bad) == (not at_work and not again), bad


@pytest.mark.parametrize("change", ["cache", "prepared"])
def test_a_run_is_verified_against_the_store_that_it_was_resumed_with(stopped, tmp_path, change):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    config, moved = load_config(run / "config.yaml"), tmp_path / "moved"
    if change == "cache":
        shutil.copytree(config.data.cache, moved)
        fingerprint = json.loads((run / "run.json").read_text())["corpus_fingerprint"]
        store, where = moved / "corpus" / fingerprint, f"data.cache={moved}"
    else:
        source = config.model.source
        preparation = Preparation(tokenizer=TokenizerConfig(source=source), data=config.data)
        store, where = prepare_store(preparation, open_tokenizer(source, False), moved).folder, f"data.prepared={moved}"
    recipe.resume(load_config(run / "config.yaml", [f"run.folder={run}", where]), console=QUIET)
    said = str(list(verify_folder(run))[-1])
    assert said.startswith(f"good tokens {store}: "), said
    flip(store / "tokens-00000.bin")
    assert str(list(verify_folder(run))[-1]).startswith(f"BAD  tokens {store}: ")


def config_of(tree, write_config, *overrides: str):
    return load_config(write_config(tree), overrides)


def test_tokens_that_have_changed_are_not_trained_on(tree, write_config):
    config = config_of(tree, write_config)
    store = prepare(config.data, tiny_tokenizer())
    flip(store.folder / "tokens-00000.bin")
    with pytest.raises(UserError, match=r"tokens-00000\.bin: its content has changed.*delete the folder"):
        set_up(config, lambda line: None)


def test_rows_without_a_target_are_refused(tree, write_config, tmp_path):
    """Each document is one token, which has no next one."""
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in "abcdefghij" * 20))
    tree["data"]["sources"] = [{"files": str(path)}]
    config = config_of(tree, write_config, "data.append_eos=false", "pack.variant=intra")
    with pytest.raises(UserError, match=r"data\.sources: no row has a token to train on: each of the \d+ training doc"):
        recipe.train(config, console=QUIET)
    assert not Path(config.run.folder).exists()


def test_more_rows_a_step_than_there_are_is_warned_of(tree, write_config):
    rows, warned = len(set_up(config_of(tree, write_config), lambda line: None).rows), {}
    for more in (0, 1, 70):
        said: list[str] = []
        set_up(config_of(tree, write_config, f"train.sequences_per_step={rows + more}"), said.append)
        warned[more] = [line for line in said if line.startswith("warning")]
    assert not warned[0]
    for more in (1, 70):
        assert warned[more][0].startswith(
            f"warning   train.sequences_per_step {rows + more} is more than the {rows} rows"
        )


def test_copies_and_written_special_tokens_are_told(tree, write_config, tmp_path):
    path = tmp_path / "copies.jsonl"
    texts = [f"text {i % 20} of twenty" + (" </s>" if i % 20 == 3 else "") for i in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tree["data"]["sources"] = [{"files": str(path)}]
    said: list[str] = []
    setup = set_up(config_of(tree, write_config), said.append)
    told = {line.split()[0]: line for line in said}
    assert told["copies"].startswith("copies    180 of 200 documents hold the text of another; ")
    assert told["special"] == "special   10 of 200 records spell a special token; it is read as text"
    assert setup.record.corpus.copies == 180
    assert setup.record.identity["split"]["copies_moved"] == setup.record.corpus.copies_moved > 0
    with pytest.raises(UserError, match=r"documents are divided otherwise into training and held out"):
        check_identity(setup.record.identity, setup.record.identity | {"split": {"copies_moved": 0}})
    assert 257 not in set(setup.store.document(0)[:-1].tolist())
