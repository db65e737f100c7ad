"""The configs that come with the repository: all validate, and the paper's say what the paper says."""

import json
from pathlib import Path

import pytest
import zstandard

from torchtrain.config import BASE_VARIANTS, PAPER_ROPE_THETA, Config, Source, load_config
from torchtrain.data.corpus import Document, read
from torchtrain.modeling.source import published_models
from torchtrain.planning.budget import model_config
from torchtrain.run.session import exported_steps

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = sorted((CONFIGS / "paper").glob("*.yaml"))

MODELS = published_models()


@pytest.fixture(params=PAPER, ids=lambda path: path.stem)
def paper(request) -> tuple[Path, Config]:
    return request.param, load_config(request.param)


def test_the_recipe(paper):
    path, config = paper
    train = config.train
    assert (train.learning_rate, train.weight_decay, train.betas) == (2e-5, 0.1, (0.9, 0.95))
    assert (train.steps, train.sequences_per_step) == (2000, 8)
    assert config.data.sources[0].domain_field == "meta.redpajama_set_name"
    assert config.model.dtype == "bfloat16"
    assert config.run.folder == f"runs/{path.stem}"
    saved = [step for steps in config.save.schedule(train.steps) for step in steps]
    assert saved == [*range(100, 2000, 100), *range(1960, 2001, 10)]
    # The models of the last five are kept to be averaged, however few checkpoints are.
    assert [*exported_steps(config.save, train.steps), train.steps] == [1960, 1970, 1980, 1990, 2000]


def test_the_corpus_holds_the_tokens_of_the_run(paper):
    _, config = paper
    needed = config.train.steps * config.train.sequences_per_step * config.pack.sequence_length
    # SlimPajama: 627 billion tokens in 590 million documents.
    held = config.data.sources[0].max_documents * (627e9 / 590e6) * (1 - config.data.held_out_share)
    assert held > needed


@pytest.fixture(scope="module")
def slimpajama(tmp_path_factory) -> Path:
    """A folder laid out as SlimPajama-627B is: splits of chunks of .jsonl.zst files, one with two frames."""
    folder = tmp_path_factory.mktemp("SlimPajama")
    compress = zstandard.ZstdCompressor().compress
    for split, chunk, number in (
        ("train", 1, 0),
        ("train", 1, 1),
        ("train", 2, 0),
        ("validation", 1, 0),
        ("test", 1, 0),
    ):
        path = folder / split / f"chunk{chunk}" / f"example_{split}_{number}.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        records = [
            {
                "text": f"{split} {chunk} {number} {i}",
                "meta": {"redpajama_set_name": f"RedPajama{('C4', 'Book')[i % 2]}"},
            }
            for i in range(4)
        ]
        lines = [json.dumps(record).encode() + b"\n" for record in records]
        path.write_bytes(compress(b"".join(lines[:3])) + compress(lines[3]))
    return folder


def test_it_reads_slimpajama_as_it_lies_on_the_hub(paper, slimpajama):
    path, _ = paper
    config = load_config(path, [f"data.sources.0.dataset={slimpajama}"])
    source = config.data.sources[0]
    assert source.streaming
    records = list(read(source))
    places = [(1, 0), (1, 1), (2, 0)]
    assert records == [
        Document(f"train {chunk} {number} {i}", f"RedPajama{('C4', 'Book')[i % 2]}")
        for chunk, number in places
        for i in range(4)
    ]
    # And so do its files.
    files = Source(files=f"{slimpajama}/train/**/*.jsonl.zst", domain_field=source.domain_field)
    assert list(read(files)) == records


def test_rope_gets_the_papers_base_and_length(paper):
    _, config = paper
    extended = model_config(config)
    assert extended.max_position_embeddings == config.pack.sequence_length
    assert extended.rope_parameters == {
        "rope_type": "default",
        "rope_theta": PAPER_ROPE_THETA[config.pack.sequence_length],
    }


def test_every_model_and_variant_is_there():
    runs = {(c.model.source, c.pack.sequence_length, c.pack.variant) for c in map(load_config, PAPER)}
    assert len(runs) == len(PAPER)
    for variant in BASE_VARIANTS:
        assert ("meta-llama/Llama-2-7b-hf", 65536, variant) in runs
    assert {source for source, length, variant in runs if (length, variant) == (131072, "anchor")} <= set(MODELS)
    assert len({source for source, _, _ in runs}) == 4


def test_runs_of_one_model_and_length_differ_in_nothing_but_the_variant():
    groups: dict[tuple, list[Config]] = {}
    for config in map(load_config, PAPER):
        groups.setdefault((config.model.source, config.pack.sequence_length), []).append(config)
    for configs in groups.values():
        same = [
            config.model_copy(update={"run": None, "pack": config.pack.model_copy(update={"variant": ""})})
            for config in configs
        ]
        assert all(other == same[0] for other in same)


def test_the_demo_goes_beyond_the_models_own_length_with_three_domains():
    config = load_config(CONFIGS / "demo.yaml")
    assert config.model.source == "smollm2"
    assert config.pack.sequence_length > 8192
    assert config.pack.variant == "anchor"
    assert [source.demo for source in config.data.sources] == ["speeches", "encyclopedia", "code"]
