"""The configs that come with the repository: all validate, and the paper's say what the paper says."""

import json
from pathlib import Path

import pytest
import zstandard
from datatrove.data import Document as PipelineDocument

from torchtrain.config import PAPER_ROPE_THETA, Config, Preparation, load_config, load_preparation
from torchtrain.data.corpus import Document, list_parts, make_filters, read
from torchtrain.modeling.source import published_models
from torchtrain.planning.budget import GIB, RESERVE, model_config, propose
from torchtrain.planning.memory import Shapes

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = sorted((CONFIGS / "paper").glob("*-*.yaml"))
DATA = sorted((CONFIGS / "data").glob("*.yaml"))
CONFIG_OF = {path: load_config(path) for path in PAPER}

MODELS = published_models()
LLAMA, OTHERS = "meta-llama/Llama-2-7b-hf", ("llama3-8b", "mistral-7b", "qwen1.5-1.8b")

# What the paper trained (arXiv 2411.13476): table 5 on each data set, table 6, tables 2 and 4, table 3.
TABLE_5 = {
    "slimpajama-64k": "full intra intra_reset intra+interleave anchor anchor+tag anchor+interleave",
    "slimpajama-128k": "full intra intra_reset intra+interleave anchor anchor+tag",
    "upsampledmix-128k": "full intra intra_reset anchor anchor+tag",
}
TABLE_6 = "full anchor anchor+tag"
BASES_64K = {"default": (1e6, 5e6, 1e7), "yarn": (1e4, 1e6, 5e6, 1e7), "ntk": (1e4, 1e6, 5e6, 1e7)}
BASES_32K = (2e5, 6e5, 9e5, 5e6, 1e9)  # 500 and 1e4 are refused: by them the model does not hold so many positions
# Token ratios of appendix C.
RATIOS = {"C4": 19.53, "ArXiv": 5.86, "GitHub": 6.61, "StackExchange": 1.64, "CommonCrawl": 58.14, "Wikipedia": 3.51}
RATIOS["Books"] = 4.69
REVISION = "2d0accdd58c5d5511943ca1f5ff0e3eb5e293543"


@pytest.fixture(params=PAPER, ids=lambda path: path.stem)
def paper(request) -> tuple[Path, Config]:
    return request.param, CONFIG_OF[request.param]


@pytest.fixture(params=DATA, ids=lambda path: path.stem)
def corpus(request) -> tuple[Path, Preparation]:
    return request.param, load_preparation(request.param)


def preparation_of(config: Config) -> tuple[Path, Preparation]:
    """Return the data config whose store a run reads, by the store's name."""
    assert config.data.prepared is not None
    name = config.data.prepared.removeprefix("data/")
    for model in OTHERS:
        name = name.removesuffix(f"-{model}")
    return (path := CONFIGS / "data" / f"{name}.yaml"), load_preparation(path)


def test_the_recipe(paper):
    path, config = paper
    train = config.train
    assert (train.learning_rate, train.weight_decay, train.betas) == (2e-5, 0.1, (0.9, 0.95))
    assert train.steps == 2000
    # 0.5 million tokens a step at 64K, 1 million at 128K; the ablation at 32K has as many steps for its billion tokens.
    assert train.sequences_per_step * config.pack.sequence_length in (2**19, 2**20)
    assert config.model.dtype == "bfloat16"
    assert config.run.folder == f"runs/{path.stem}"
    assert list(config.save.before_last(train.steps)) == [*range(100, 2000, 100)]
    # The models of the last five are kept to be averaged, however few checkpoints are.
    assert [*config.save.exports(train.steps), train.steps] == [1960, 1970, 1980, 1990, 2000]


def test_the_corpus_holds_the_tokens_of_the_run(paper):
    _, config = paper
    needed = config.train.steps * config.train.sequences_per_step * config.pack.sequence_length
    data = preparation_of(config)[1].data
    held = data.mixture.tokens if data.mixture else data.sources[0].sample_files * 627e9  # SlimPajama's tokens
    assert held * (1 - config.data.held_out_share) > needed


def test_a_corpus_is_pinned_sampled_by_seed_and_named_as_the_paper_does(corpus):
    path, preparation = corpus
    (source,) = preparation.data.sources
    assert (source.dataset, source.revision) == ("cerebras/SlimPajama-627B", REVISION)
    assert source.max_documents is None
    assert source.sample_files is not None
    assert set(source.rename.values()) == set(RATIOS)
    assert {name.removeprefix("RedPajama").lower() for name in source.rename} == {
        name.removesuffix("s").lower() for name in RATIOS
    }
    mixture = preparation.data.mixture
    if path.stem.startswith("upsampledmix"):
        assert mixture is not None
        assert mixture.shares == {name: pytest.approx(ratio / 100) for name, ratio in RATIOS.items()}
        assert mixture.long_tokens == 4096
    else:
        assert mixture is None


@pytest.fixture(scope="module")
def slimpajama(tmp_path_factory) -> Path:
    """A folder laid out as SlimPajama-627B is: splits of chunks of .jsonl.zst files, one with two frames."""
    folder = tmp_path_factory.mktemp("SlimPajama")
    compress = zstandard.ZstdCompressor().compress
    files = [("train", 1, 0), ("train", 1, 1), ("train", 2, 0), ("validation", 1, 0), ("test", 1, 0)]
    for split, chunk, number in files:
        path = folder / split / f"chunk{chunk}" / f"example_{split}_{number}.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        sets = [{"redpajama_set_name": f"RedPajama{name}"} for name in ("C4", "Book") * 2]
        records = [{"text": f"{split} {chunk} {number} {i}", "meta": meta} for i, meta in enumerate(sets)]
        lines = [json.dumps(record).encode() + b"\n" for record in records]
        path.write_bytes(compress(b"".join(lines[:3])) + compress(lines[3]))
    return folder


def test_it_reads_slimpajama_as_it_lies_on_the_hub(corpus, slimpajama):
    path, _ = corpus
    here = [f"data.sources.0.dataset={slimpajama}", "data.sources.0.revision=null"]
    source = load_preparation(path, [*here, "data.sources.0.sample_files=null"]).data.sources[0]
    assert source.streaming
    records = list(read(source))
    places = [(1, 0), (1, 1), (2, 0)]
    assert records == [
        Document(f"train {chunk} {number} {i}", ("C4", "Books")[i % 2]) for chunk, number in places for i in range(4)
    ]
    # Shard by shard, as tasks read it; a sample is one of whole files.
    parts = list_parts(source)
    assert len(parts) == 3
    assert [record for part in parts for record in read(source, part)] == records
    sampled = source.model_copy(update={"sample_files": 0.4})
    (part,) = list_parts(sampled)
    assert list(read(sampled)) == records[4 * part.number : 4 * part.number + 4]


def test_rope_gets_the_papers_base_and_length(paper):
    path, config = paper
    extended = model_config(config)
    length = config.pack.sequence_length
    assert extended.max_position_embeddings == length
    _, _, ablated = path.stem.partition("-rope_")
    if not ablated:
        assert extended.rope_parameters == {"rope_type": "default", "rope_theta": PAPER_ROPE_THETA[length]}
        return
    kind, base = ablated.split("_")
    found = extended.rope_parameters
    scale = length / 4096
    if kind == "ntk":
        base = float(base) * scale ** (128 / 126)  # heads of 128
    assert found["rope_theta"] == pytest.approx(float(base), rel=1e-12)
    assert found["rope_type"] == ("yarn" if kind == "yarn" else "default")
    assert found.get("factor") == (scale if kind == "yarn" else None)


GPUS, EACH = 8, 80 * GIB
SHAPES = {  # of each model and length the first config: an anchor's, where there is one
    (config.model.source, config.pack.sequence_length): path.stem for path, config in reversed(CONFIG_OF.items())
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", SHAPES.values())
def test_the_layout_is_the_fastest_that_its_gpus_hold(name):
    config = CONFIG_OF[CONFIGS / "paper" / f"{name}.yaml"]
    changes, memory = propose(config, Shapes(model_config(config)), GPUS, EACH)
    assert changes == []
    assert memory.gpu + RESERVE < EACH


def test_every_run_of_the_papers_tables_is_there():
    expected = {(LLAMA, f"data/{data}", variant) for data, row in TABLE_5.items() for variant in row.split()}
    sources = {"llama3-8b": "meta-llama/Meta-Llama-3-8B", "mistral-7b": "mistralai/Mistral-7B-v0.3"}
    sources["qwen1.5-1.8b"] = "Qwen/Qwen1.5-1.8B"
    expected |= {
        (sources[model], f"data/slimpajama-128k-{model}", variant) for model in OTHERS for variant in TABLE_6.split()
    }
    plain = [path for path in PAPER if "-rope_" not in path.stem]
    runs = [(c.model.source, c.data.prepared, c.pack.variant) for c in map(CONFIG_OF.get, plain)]
    assert set(runs) == expected
    assert len(runs) == len(expected)
    assert {source for source, _, _ in runs} <= set(MODELS)

    ablated = [config for path, config in CONFIG_OF.items() if "-rope_" in path.stem]
    found = sorted((c.pack.sequence_length, c.rope.type, c.rope.theta) for c in ablated)
    assert found == sorted(
        [(65536, kind, base) for kind, bases in BASES_64K.items() for base in bases]
        + [(32768, "default", base) for base in BASES_32K]
    )
    assert {(c.data.prepared, c.pack.variant) for c in ablated} == {("data/slimpajama-64k", "full")}


AUTHORS = {
    "llama2-7b-64k-anchor": "llama2-7b-64k-anchor",
    "llama2-7b-64k-anchor_interleave": "llama2-7b-64k-anchor_interleave",
    "llama2-7b-128k-upsampled-anchor": "llama2-7b-upsampledmix-anchor",
}


@pytest.mark.parametrize("name", AUTHORS)
def test_the_authors_configs_differ_from_the_papers_in_what_their_heads_say(name):
    """And their corpora hold the documents that the code of arXiv 2402.10171 takes, without an EOS."""
    path = CONFIGS / "authors" / f"{name}.yaml"
    config, paper = load_config(path), CONFIG_OF[CONFIGS / "paper" / f"{AUTHORS[name]}.yaml"]
    own, papers = config.model_dump(), paper.model_dump()
    changes = {
        (section, key): value for section in own for key, value in own[section].items() if value != papers[section][key]
    }
    store = "authors-upsampled" if "upsampled" in name else "authors-slimpajama"
    assert changes == {
        ("run", "folder"): f"runs/authors-{name}",
        ("data", "prepared"): f"data/{store}",
        ("pack", "cross_document_targets"): True,
        ("train", "warmup_steps"): 200,
        ("train", "clip_norm"): None,
    } | ({("pack", "split"): "authors"} if "interleave" in name else {})
    corpus = CONFIGS / "authors" / f"{store.removeprefix('authors-')}.yaml"
    assert f"torchtrain prepare configs/authors/{corpus.name} --out {config.data.prepared}\n" in path.read_text()
    data = load_preparation(corpus).data
    assert (data.append_eos, data.sources[0].sample_files) == (False, 0.02)
    if "upsampled" in name:
        short, long = ({"text": "a" * length} for length in (15073, 15074))
        assert len(short["text"]) / 3.68 < 4096 <= len(long["text"]) / 3.68
        (block,) = make_filters(data.sources[0])
        texts = [PipelineDocument(text=of["text"], id="") for of in (short, long)]
        assert [len(of.text) for of in block.run(texts)] == [15074]
        assert data.mixture is not None
        assert data.mixture.most_repeats == 1
