"""Every setting is described, and docs/settings.md says what the schema says."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchtrain.cli import app
from torchtrain.config.reference import format_page, list_settings


def test_every_setting_has_a_description():
    assert [setting.key for setting in list_settings() if not setting.meaning] == []


def test_the_page_is_what_the_schema_says():
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == format_page(), "run python -m torchtrain.config.reference"


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("train.betas", "default: [0.9, 0.95]"),
        ("data.sources.0.files", "glob of .jsonl"),
        ("model.lora", "model.lora.rank"),
        ("prepare.workers", "tasks at work at a time"),
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
