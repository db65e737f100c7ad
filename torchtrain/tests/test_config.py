"""The schema: strict, with every mistake in one line that names the field, the value and the fix."""

from typing import get_args

import pytest
import yaml

from anchorline.errors import UserError
from torchtrain.attention import ENGINES
from torchtrain.config import PAPER_ROPE_THETA, Config, ModelConfig, RopeConfig, Source, dump_config, load_config

MINIMAL = """
run: {folder: runs/x}
model: {source: smollm2}
data:
  sources:
    - demo: code
    - files: "books-*.jsonl"
pack: {sequence_length: 4096}
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str = MINIMAL, *overrides: str) -> Config:
        path = tmp_path / "c.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return load


def test_defaults_are_the_papers(load):
    config = load()
    assert (config.train.steps, config.train.sequences_per_step, config.train.learning_rate) == (2000, 8, 2e-5)
    assert (config.train.weight_decay, config.train.betas) == (0.1, (0.9, 0.95))
    assert config.pack.variant == "anchor"


@pytest.mark.parametrize(
    "overrides", [(), ("train.learning_rate=3e-4", "rope.theta=paper", "pack.sequence_length=65536")]
)
def test_the_resolved_config_reads_back_equal(load, overrides):
    config = load(MINIMAL, *overrides)
    text = dump_config(config)
    assert load(text) == config
    assert yaml.safe_load(text)["train"]["clip_norm"] == 1.0  # defaults are written out


def test_overrides(load):
    config = load(
        MINIMAL,
        "train.steps=20",
        "train.betas=[0.8, 0.9]",
        "rope.theta=5e5",
        "data.sources.1.files=other.jsonl",
        "train.clip_norm=null",
        "pack.variant=intra+tag",
    )
    assert config.train.steps == 20
    assert config.train.betas == (0.8, 0.9)
    assert config.rope.theta == 5e5
    assert config.data.sources[1].files == "other.jsonl"
    assert config.train.clip_norm is None
    assert (config.pack.base_variant, config.pack.tag, config.pack.interleave) == ("intra", True, False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=20", r"train\.step: unknown key; did you mean train\.steps\?"),
        ("trian.steps=20", r"trian: unknown key; did you mean train\?"),
        ("data.sources.0.demoo=code", r"data\.sources\.0\.demoo: unknown key; did you mean data\.sources\.0\.demo\?"),
        ("run.zzz=1", r"run\.zzz: unknown key; known: folder, seed"),
        ("Train.steps=3", r"Train: unknown key; did you mean train\?"),
        ("train.Steps=3", r"train\.Steps: unknown key; did you mean train\.steps\?"),
        ("train.micro-batch=3", r"train\.micro-batch: unknown key; did you mean train\.micro_batch\?"),
        ("data.sources.0.Demo=code", r"data\.sources\.0\.Demo: unknown key; did you mean data\.sources\.0\.demo\?"),
        ("pack.anchor=[x]", r"pack\.anchor\.0: 'x': give an integer$"),
        ("rope.theta=1.0", r"rope\.theta: 1\.0: give more than 1"),
        ("rope.long_factor=[0.0]", r"rope\.long_factor\.0: 0\.0: give 1e-06 or more"),
        (
            "run.folder=!!timestamp 2026-11-31",
            "could not determine a constructor for the tag",
        ),
        ("run={folder: a, folder: b}", r"^override 'run=.*': key 'folder' appears twice; remove one"),
        ("train.steps=0", r"train\.steps: 0: "),
        ("train.steps=twenty", r"train\.steps: 'twenty': "),
        ("train.steps=2.5", r"train\.steps: 2\.5: "),
        ("train.steps='20'", r"train\.steps: '20': "),
        ("train.learning_rate=-1e-4", r"train\.learning_rate: -0\.0001: "),
        ("train.learning_rate=.nan", r"train\.learning_rate: nan: "),
        ("train.learning_rate=.inf", r"train\.learning_rate: inf: "),
        ("rope.theta=.inf", r"rope\.theta: inf: "),
        ("train.betas=[0.9]", r"train\.betas"),
        ("train.betas=[0.9, 1.0]", r"train\.betas"),
        ("train.warmup_steps=3000", r"train: warmup_steps 3000 is more than steps 2000"),
        ("train.micro_batch=3", r"train: sequences_per_step 8 is not a multiple of micro_batch 3"),
        ("model.dtype=float16", r"model\.dtype: 'float16': "),
        ("model.attention=fash", r"model\.attention: 'fash': .*'flash'"),
        ("pack.variant=anker", r"pack: variant 'anker': 'anker' is none of full, intra, intra_reset, anchor"),
        ("pack.variant=anchor+tags", r"pack: variant 'anchor\+tags'"),
        ("pack.variant=anchor+tag+tag", r"pack: variant 'anchor\+tag\+tag'"),
        ("pack.sequence_length=1", r"pack\.sequence_length: 1: "),
        ("rope.theta=paper", r"rope\.theta 'paper': .*4096.*32768, 65536, 131072, 262144: give a number"),
        ("rope.theta=papers", r"rope\.theta: 'papers': "),
        ("rope.factor=2.0", r"rope: rope type 'keep' does not take factor"),
        ("rope.type=longrope", r"rope: rope type 'longrope' needs long_factor, short_factor"),
        ("data.sources.0.files=x.jsonl", r"data\.sources\.0: a source is exactly one of .*\['demo', 'files'\]"),
        ("data.sources.0.split=test", r"data\.sources\.0: .*belong to a `dataset` source"),
        (
            "data={prepared: a, min_tokens: 2}",
            r"data: min_tokens belongs to what made the store of prepared; remove it, or give its sources",
        ),
        ("data.sources=[]", r"data: there is nothing to read; give sources, or prepared"),
        ("data.held_out_share=1.5", r"data\.held_out_share: 1\.5: "),
        ("train", r"override 'train': write section\.key=value"),
        ("data.sources.7.demo=code", r"override 'data\.sources\.7\.demo=code': '7' is not an index of a list of 2"),
        ("run.folder.x=1", r"override 'run\.folder\.x=1': 'folder' holds a value, not a section"),
        ("train.steps=[", r"override 'train\.steps=\[': not valid YAML"),
        ("pack=", r"pack.sequence_length: missing"),
    ],
)
def test_mistakes(load, override, message):
    with pytest.raises(UserError, match=message) as caught:
        load(MINIMAL, override)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor 4.0 must be above"),
        ({"type": "yarn", "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast 1.0 must be above beta_slow 2.0"),
        ({"type": "yarn", "beta_fast": 0.5}, "beta_fast 0.5 must be above beta_slow 1"),
    ],
)
def test_rope_parameters_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**settings)


@pytest.mark.parametrize("section", ["run", "model", "data", "pack"])
def test_a_missing_section(load, section):
    tree = yaml.safe_load(MINIMAL)
    del tree[section]
    with pytest.raises(UserError, match=f"{section}: missing; add it"):
        load(yaml.safe_dump(tree))


def test_all_mistakes_are_told_at_once(load):
    with pytest.raises(UserError, match=r"pack\.variant_: .*; train\.step: "):
        load(MINIMAL, "pack.variant_=x", "train.step=1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {source: a}\nmodel: {source: b}", "line 2: key 'model' appears twice"),
        ("? [a, b]\n: c", "line 1: key .* is not a name; quote it"),
        ("model:\n  1: a", "line 2: key '1' is not a name; quote it"),
        ("a: !!int x", "not valid YAML"),
        ("[" * 10_000, "values are nested more than 64 deep"),
        ("a: [", "not valid YAML"),
        ("- a", "holds a list; give sections such as `run:` and `model:`"),
        ("", "is empty; give sections such as"),
    ],
)
def test_files_that_are_no_config(load, text, message):
    with pytest.raises(UserError, match=message):
        load(text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r": is a directory; give a YAML file"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(UserError, match=r"latin\.yaml: byte 3 is not UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_what_looks_like_a_date_is_a_name(load):
    for folder in ("2026-11-30", "2026-11-31"):
        assert load(MINIMAL, f"run.folder={folder}").run.folder == folder


def test_an_empty_section_has_its_defaults(load):
    assert load(f"{MINIMAL}\ntrain:\n") == load()
    assert load(f"{MINIMAL}\ntrain:\n", "train.steps=3").train.steps == 3


def test_a_config_does_not_change(load):
    with pytest.raises(ValueError, match="frozen"):
        load().train.steps = 3


def test_paper_theta_of_every_length(load):
    for length in PAPER_ROPE_THETA:
        assert load(MINIMAL, "rope.theta=paper", f"pack.sequence_length={length}").rope.theta == "paper"


@pytest.mark.parametrize("field", ["dataset", "files", "split", "text_field", "domain", "domain_field"])
def test_a_source_says_nothing_by_an_empty_name(field):
    with pytest.raises(ValueError, match=rf"{field}\n.*at least 1 character"):
        Source(**({"dataset": "a/b", field: ""}))


def test_the_schema_names_every_engine():
    assert get_args(ModelConfig.model_fields["attention"].annotation) == ("auto", *ENGINES)
