"""The schema: strict, with every mistake in one line that names the field, the value and the fix."""

import re
from typing import get_args

import pytest
from typer.testing import CliRunner

from torchtrain.attention import ENGINES
from torchtrain.cli import app
from torchtrain.config import Config, ModelConfig, load_config
from torchtrain.tests.tiny import refused

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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=20", r"train\.step: unknown key \(did you mean train\.steps\?"),
        ("seed=1", r"seed: unknown key \(did you mean run\.seed or data\.mixture\.seed\?"),
        ("train.lora={rank: 3}", r"train\.lora: unknown key \(did you mean model\.lora\?"),
        ("data.sources.0.demoo=code", r"data\.sources\.0\.demoo: unknown key \(did you mean data\.sources\.0\.demo\?"),
        ("pack.anchor=[x]", r"pack\.anchor\.0: 'x': give an integer$"),
        ("rope.theta=1.0", r"rope\.theta: 1\.0: give more than 1"),
        ("rope.long_factor=[0.0]", r"rope\.long_factor\.0: 0\.0: give 1e-06 or more"),
        ("train.steps=0", r"train\.steps: 0: "),
        ("train.steps=2.5", r"train\.steps: 2\.5: "),
        ("train.learning_rate=-1e-4", r"train\.learning_rate: -0\.0001: "),
        ("train.learning_rate=.inf", r"train\.learning_rate: inf: "),
        ("train.betas=[0.9, 1.0]", r"train\.betas"),
        ("train.warmup_steps=3000", r"train: warmup_steps 3000 is more than steps 2000"),
        ("train.decay_steps=3", r"train: decay_steps belongs to schedule: wsd, and schedule is constant"),
        ("train.decay=sqrt", r"train: decay belongs to schedule: wsd, and schedule is constant"),
        ("train.schedule=wsd", r"train: schedule wsd needs decay_steps"),
        ("train.micro_batch=3", r"train: sequences_per_step 8 is not a multiple of micro_batch 3"),
        ("model.dtype=float16", r"model\.dtype: 'float16': "),
        ("model.attention=fash", r"model\.attention: 'fash': .*'flash'"),
        ("pack.variant=anker", r"pack: variant 'anker': 'anker' is none of full, intra, intra_reset, anchor"),
        ("pack.variant=anchor+tags", r"pack: variant 'anchor\+tags'"),
        ("pack.sequence_length=1", r"pack\.sequence_length: 1: "),
        ("rope.theta=paper", r"rope\.theta 'paper': .*4096.*32768, 65536, 131072, 262144: give a number"),
        ("rope.factor=2.0", r"rope: rope type 'keep' does not take factor"),
        ("data.mixture={long_share: 0.5, long_weight: 2}", r"long_share and long_weight exclude each other"),
        ("data.sources.0.files=x.jsonl", r"data\.sources\.0: a source is exactly one of .*\['demo', 'files'\]"),
        ("data.sources.0.split=test", r"data\.sources\.0: .*belong to a `dataset` source"),
        (
            "data={prepared: a, min_tokens: 2}",
            r"data: min_tokens was decided when the store of prepared was made; remove it, or give its sources",
        ),
        ("data.sources=[]", r"data: there is nothing to read; give sources, or prepared"),
        ("train.epochs=0", r"train\.epochs: 0: "),
        ("train={epochs: 2, steps: 3}", r"train: steps 3 and epochs 2 exclude each other; set one to null"),
        ("held_out.every=-1", r"held_out\.every: -1: "),
        ("data.held_out_share=1.5", r"data\.held_out_share: 1\.5: "),
        ("pack=", r"pack.sequence_length: missing"),
        ("distributed.offload=optimizer", r"distributed: offload 'optimizer' needs zero_stage 1 or more"),
        ("distributed={offload: all, zero_stage: 2}", r"offload 'all' needs zero_stage 3 or more"),
    ],
)
def test_mistakes(load, override, message):
    assert re.search(message, refused(lambda: load(MINIMAL, override)))


@pytest.mark.parametrize(
    ("file", "override", "kept"),
    [
        ("{steps: 7}", "train.epochs=null", (7, None)),
        ("{epochs: 2}", "train.epochs= null", (2000, None)),
        ("{steps: 7, epochs: 2}", "train.steps=null", (2000, 2)),
        ("{steps: 7}", "train.epochs=3", (2000, 3)),
        ("{epochs: 2}", "train.steps=3", (3, None)),
    ],
)
def test_steps_replace_epochs_and_null_replaces_nothing(tmp_path, file, override, kept):
    (tmp_path / "mine.yaml").write_text(f"{MINIMAL}\ntrain: {file}\n")
    train = load_config(tmp_path / "mine.yaml", [override]).train
    assert (train.steps, train.epochs) == kept


def test_the_schema_names_every_engine():
    assert get_args(ModelConfig.model_fields["attention"].annotation) == ("auto", *ENGINES)


# --- every setting is explained ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("train.betas", "default: [0.9, 0.95]"),
        ("data.sources.0.files", "glob of .jsonl"),
        ("model.lora", "model.lora.rank"),
        ("prepare.workers", "tasks that run at a time"),
    ],
)
def test_a_key_or_a_section_is_explained(key, told):
    answer = CliRunner().invoke(app, ["config", "--explain", key])
    assert answer.exit_code == 0, answer.stderr
    assert told in answer.stdout


@pytest.mark.parametrize(("key", "told"), [("seed", "did you mean run.seed or"), ("train.beta", "train.betas?")])
def test_an_unknown_key_names_the_nearest(key, told):
    answer = CliRunner().invoke(app, ["config", "--explain", key])
    assert answer.exit_code == 2
    assert told in answer.stderr
