"""What a run is made of must be the same for a checkpoint to go on with."""

import pytest
import torch

from anchorline.errors import UserError
from torchtrain.checkpoint.identity import check_config, check_identity, describe_changes, differences
from torchtrain.checkpoint.manifest import versions
from torchtrain.config import load_config
from torchtrain.run.folder import RunFolder
from torchtrain.run.record import Corpus, RunRecord
from torchtrain.tests.checkpoint_fixtures import IDENTITY, LAYOUT, make_strategy, save
from torchtrain.tests.tiny import refused


@pytest.fixture
def saved(checkpoints, tree, write_config):
    """A manifest of a config, and a function from overrides to a config."""

    def config(*overrides: str):
        return load_config(write_config(tree), overrides)

    save(checkpoints, 1, make_strategy(updates=0), config=config().model_dump(mode="json"))
    return checkpoints.open(), config


def test_the_same_run_may_go_on_elsewhere_and_otherwise_spread(saved):
    manifest, config = saved
    check_config(manifest.config, config())
    check_identity(manifest.identity, IDENTITY)
    check_identity(manifest.identity, {})
    free = ["run.folder=b", "data.cache=c", "distributed.zero_stage=3", "train.micro_batch=2", "train.loss_chunk=7"]
    check_config(manifest.config, config(*free, "model.activation_checkpointing=true"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=0.01", "train.learning_rate: 0.02 in the run, 0.01 now"),
        ("run.seed=4", "run.seed: 3 in the run, 4 now"),
        ("data.sources.0.max_documents=3", "data.sources.0.max_documents: None in the run, 3 now"),
        ("model.attention=dense", "model.attention: 'auto' in the run, 'dense' now"),
    ],
)
def test_another_config_is_refused(saved, override, message):
    manifest, config = saved
    with pytest.raises(UserError, match=message):
        check_config(manifest.config, config(override))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("tokenizer", "u", "the tokenizer of model.source has changed; .*tokenizer: 't' in the run, 'u' now"),
        ("model", {"rope": 2.0}, "model.rope: 1.0 in the run, 2.0 now"),
        ("data", {"sources": [{"files": "b"}]}, "data.sources.0.files: 'a' in the run, 'b' now"),
        ("data", {"sources": []}, "data.sources: "),
        ("weights", {"sha256": "e"}, "the weights of model.source have .* model.source=FOLDER .*: 'd' in the run, 'e'"),
    ],
)
def test_other_material_is_refused(saved, part, value, message):
    manifest, _ = saved
    with pytest.raises(UserError, match=message):
        check_identity(manifest.identity, IDENTITY | {part: value})


def test_what_moves_last_digits_is_told(saved):
    manifest, _ = saved
    assert describe_changes(manifest, LAYOUT) == ""
    assert {"torch", "transformers", "numpy", "safetensors", "deepspeed", "python"} < manifest.versions.keys()
    older = manifest.model_copy(update={"versions": versions() | {"torch": "1.0"}})
    here = LAYOUT.model_copy(update={"processes": 2, "device": "a GPU", "attention": "flash", "deterministic": True})
    told = "processes 1 then, 2 now, device cpu then, a GPU now, attention sdpa then, flash now, "
    told += "deterministic False then, True now, "
    assert describe_changes(older, here) == f"{told}torch 1.0 then, {torch.__version__} now"
    assert list(differences({"a": 1}, {"b": 1})) == [("a", 1, "nothing"), ("b", "nothing", 1)]


@pytest.mark.parametrize(
    ("field", "place", "free"),
    [
        ("model.source", "./deep/base", True),
        ("data.prepared", "deep/store", True),
        ("data.sources.0.files", "te*.jsonl", False),
        ("data.sources.0.texts", "deep/**", False),
    ],
)
def test_a_relative_path_resumed_from_elsewhere_says_where_it_is(
    tree, write_config, tmp_path, monkeypatch, field, place, free
):
    began, other = tmp_path / "began", tmp_path / "other"
    (began / "deep" / "base").mkdir(parents=True)
    for path in (began / "base", began / "deep" / "store", other):
        path.mkdir()
    (began / "texts.jsonl").touch()
    if field.startswith("data.sources"):
        tree["data"]["sources"] = [{field.rpartition(".")[2]: place}]
    changes = [f"{field}={place}"] if free else []
    config = load_config(write_config(tree), [*changes, f"run.folder={tmp_path / 'run'}"])
    folder = RunFolder(tmp_path / "run")
    monkeypatch.chdir(began)
    corpus = Corpus(domains=[], sources=[], made_of=None, dropped_tokens=0, copies=0, copies_moved=0)
    texts = dict.fromkeys(("device", "engine", "engine_measured", "fused", "corpus_fingerprint"), "")
    tables = {name: {} for name in ("config", "identity", "model_origin")}
    record = RunRecord(**texts, **tables, activation_checkpointing=False, processes=1, steps=1, corpus=corpus)
    with folder.create(config, record, replace=False):
        folder.check_places(config.model.source, config.data)
    monkeypatch.chdir(other)
    advice = f", or give {field}={began / place}" if free else ""
    expected = f"{field}: {config.model.source if field == 'model.source' else place} is not in {other}; "
    expected += f"the run began in {began}: resume it from there{advice}"
    assert refused(lambda: folder.check_places(config.model.source, config.data)) == expected
    for path in ("base", "deep", "texts.jsonl"):  # what is here, or in neither place, is for others to say
        (began / path).rename(other / path)
    folder.check_places(config.model.source, config.data)
    monkeypatch.chdir(began)
    folder.check_places(config.model.source, config.data)
