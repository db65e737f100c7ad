"""The command: what it prints, what it refuses, in one line, with which exit code, leaving nothing."""

import ast
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from torchtrain.cli import app, main
from torchtrain.config import load_config
from torchtrain.tests.tiny import POSITIONS, tiny_config, tiny_tokenizer


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
    last = call("config", "train.steps=20", "save.every=8").stdout
    assert last.endswith("\n# saves after step 8, 16, 20; `torchtrain plan` counts the bytes\n")


def test_train_and_the_table(call, tree):
    result = call("train", "train.steps=3")
    assert result.exit_code == 0
    folder = Path(tree["run"]["folder"])
    assert (folder / "model" / "config.json").is_file()
    for word in ("numbers", "letters", "before", "after", "tokens seen", "tokens/s", "model in"):
        assert word in result.stdout
    for word in ("training 3/3", "tokens/s", " GiB · ", "held out 2/2"):
        assert word in result.stderr
    # Each stage says that it begins, in this order.
    stages = ["tokenising ", "loading ", "variant   anchor: a token sees", "training 1/3", f"exporting to {folder}"]
    places = [result.stderr.index(stage) for stage in stages]
    assert places == sorted(places)
    assert "left out" not in result.stderr
    assert "MFU" not in result.output  # no peak is known on a CPU
    steps = [line for line in result.stderr.splitlines() if re.match(r"training \d/3 ", line)]
    assert len(steps) == 3
    assert all(re.search(r" · \d+:\d\d:\d\d left$", line) for line in steps)
    assert steps[-1].endswith(" · 0:00:00 left")


def test_what_is_left_out_is_said_and_recorded(call, tree, corpus, tmp_path):
    lines = [*corpus.read_text().splitlines(), "{broken", '{"txt": "x"}', '{"text": "short", "domain": "letters"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    overrides = [f"data.sources.0.files={tmp_path / 'a.jsonl'}", "data.bad_record_share=0.1", "data.min_tokens=10"]
    result = call("train", "train.steps=2", "pack.last=drop", "run.seed=0", *overrides)
    record = json.loads((Path(tree["run"]["folder"]) / "run.json").read_text())["corpus"]
    (said,) = (line for line in result.stderr.splitlines() if line.startswith("left out  "))
    (noted,) = Path(tree["data"]["cache"]).glob("corpus/*/bad_records.txt")
    first = noted.read_text().splitlines()[0]
    assert first.startswith(f"{tmp_path}/a.jsonl:49: is not JSON")
    dropped = record["dropped_tokens"]
    assert 0 < dropped < tree["pack"]["sequence_length"]
    assert said == (
        f"left out  2 bad records (first {first}; all in {noted}), 1 short documents (5 tokens), "
        f"{dropped} tokens dropped with the last row"
    )
    assert (record["sources"][0]["records"], record["sources"][0]["bad_records"]) == (51, 2)
    assert {d["domain"]: d["short_tokens"] for d in record["domains"]}["letters"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'FILE'; see `torchtrain train --help`"),
        (["confg", "x"], "No such command 'confg'. Did you mean 'config'?"),
        (["train", "x", "--bogus"], "No such option: --bogus"),
        (["train", "none.yaml"], "config none.yaml: no such file"),
        (
            ["export"],
            "export: there is no such command, because a run exports by itself: the trained model into model/",
        ),
        (["export", "runs/x", "--last", "2"], "export: there is no such command, because a run exports by itself"),
    ],
)
def test_mistakes_in_the_arguments_are_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["torchtrain", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torchtrain: {message}")


GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="flash runs on this machine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rope.theta=keep", f"the model holds {POSITIONS} positions"),
        ("model.source=/no/such/folder", "no folder with a config.json here, and no hub id"),
        ("data.sources.0.files=/no/such/*.jsonl", "matches no file"),
        ("train={epochs: 0.1, warmup_steps: 9}", "train.epochs 0.1: warmup_steps 9 is more than steps 1; lower"),
        ("pack.anchor=100000", "pack.anchor 100000"),
        ("data.cache=/dev/null/cache", "data.cache '/dev/null/cache' cannot be written: "),
        ("run.folder=/dev/null/run", "run.folder /dev/null/run: Not a directory; choose a folder that can be written"),
        ("run.folder=/proc/run", "run.folder /proc/run: "),
        pytest.param("model.attention=flash", "attention flash: needs a CUDA device", marks=GPU),
        pytest.param("model.attention=flex", "attention flex: no backward pass on cpu", marks=GPU),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(call, tree, override, message):
    assert message in one_line(call("train", override))
    assert not Path(tree["run"]["folder"]).exists()


def test_a_missing_package_is_refused_before_the_imports(call, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torchtrain.run.recipe", None)  # importing it is an error
    assert "log.report_to ['wandb']: the package wandb" in one_line(call("train", "log.report_to=[wandb]"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("rope", "pack.sequence_length 128: the model holds 64 positions and the rope settings leave them"),
        ("config", "its config.json has rope_parameters.rope_theta '10000', which is not a number"),
        ("no tokenizer", "the folder holds no tokenizer; put the model's tokenizer.json there"),
        ("tokenizer", "tokenizer.json is not "),
        ("documents", "the file is empty; give one with documents"),
    ],
)
def test_what_a_look_shows_is_refused_before_the_imports(call, tree, monkeypatch, tmp_path, spoil, message):
    monkeypatch.setitem(sys.modules, "torchtrain.run.recipe", None)
    model = tmp_path / "spoilt"
    shutil.copytree(tree["model"]["source"], model)
    tree["model"]["source"] = str(model)
    if spoil == "config":
        written = json.loads((model / "config.json").read_text())
        written["rope_parameters"]["rope_theta"] = "10000"
        (model / "config.json").write_text(json.dumps(written))
    elif spoil == "no tokenizer":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).unlink()
    elif spoil == "tokenizer":
        (model / "tokenizer.json").write_text("{")
    elif spoil == "documents":
        (tmp_path / "empty.jsonl").touch()
        tree["data"]["sources"] = [{"files": str(tmp_path / "empty.jsonl")}]
    assert message in one_line(call("train", *(["rope.theta=keep"] if spoil == "rope" else [])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "abc"}, "its config.json is refused: .*'hidden_size' expected int, got str"),
        (
            {"intermediate_size": 64},
            r"6 weights do not fit its config.json, the first is model\.layers\.0\.mlp\.down_proj\.weight: \[32, 48\] "
            r"in "
            r"the file, \[32, 64\] by the config",
        ),
    ],
)
def test_a_config_that_does_not_fit(call, tree, model_folder, tmp_path, change, message):
    source = shutil.copytree(model_folder(), tmp_path / "m")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | change))
    assert re.search(message, one_line(call("train", f"model.source={source}")))
    assert not Path(tree["run"]["folder"]).exists()


def test_a_tokenizer_of_another_model(call, tree, tmp_path):
    AutoModelForCausalLM.from_config(tiny_config(vocab_size=200, pad_token_id=None)).save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    assert "do not belong together" in one_line(call("train", f"model.source={tmp_path / 'small'}"))
    assert not Path(tree["run"]["folder"]).exists()


@pytest.mark.parametrize(
    ("family", "changes", "override", "message"),
    [
        ("llama", {"attention_dropout": 0.1}, "run.seed=3", "attention_dropout 0.1"),
        ("gemma2", {}, "model.attention=sdpa", "attention sdpa: does not cap logits"),
        ("gemma3_text", {}, "model.layer_chunk=16", "its Gemma3RMSNorm is another norm"),
        ("granitemoehybrid", {}, "model.layer_chunk=16", "what follows attention is not one"),
        ("granitemoehybrid", {}, "model.lora={}", "passes by its adapter; name others, such as [in_proj"),
        ("deepseek_v3", {}, "model.lora={}", "PEFT puts adapters on model.layers.1.mlp.experts"),
    ],
)
def test_models_that_the_engines_do_not_honour(call, tree, model_folder, family, changes, override, message):
    folder = model_folder(family, **changes)
    assert message in one_line(call("train", f"model.source={folder}", "rope.theta=5e6", override))
    assert not Path(tree["run"]["folder"]).exists()


def test_an_interruption_is_one_line_and_leaves_no_thread(call, monkeypatch):
    """The garbage collector may run in the thread of batches, and cannot join the thread it runs in."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtrain.training.step.accumulate", interrupted)
    result = call("train")  # which holds the traceback, and with it every frame
    assert one_line(result, code=130) == "torchtrain: interrupted"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]
    monkeypatch.undo()
    # What is left is recognised as a run.
    assert call("train", "--replace", "train.steps=2").exit_code == 0


def imported(code: str, *arguments: str) -> tuple[set[str], str]:
    """Return which installed packages a process has imported by its end, and what it printed."""
    told = (
        "import atexit, sys; before = set(sys.modules); atexit.register(lambda: print(sorted({name.partition('.')[0] "
        "for name, module in sys.modules.items() if name not in before and 'site-packages' in "
        f"str(getattr(module, '__file__', ''))}}), file=sys.stderr)); {code}"
    )
    result = subprocess.run([sys.executable, "-c", told, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(ast.literal_eval(result.stderr.splitlines()[-1])), result.stdout


# Half a second together, where PyTorch alone takes two. By what is imported, not by a clock.
CLI = {"annotated_doc", "annotated_types", "pydantic", "pydantic_core", "shellingham", "typer", "typing_extensions"}
CLI |= {"typing_inspection", "yaml"}
HELP = CLI | {"attr", "markdown_it", "mdurl", "pygments", "rich"}  # rich looks whether attrs is there


def test_the_package_and_help_start_at_once():
    assert imported("import torchtrain")[0] == set()
    packages, printed = imported("from torchtrain.cli import main; main()", "--help")
    assert "extend a language model's context" in printed.lower()
    assert {"typer"} < packages <= HELP


def test_status_needs_nothing_that_computes(call, tree):
    """It is asked of runs at work, again and again: it answers in half a second, and PyTorch alone takes some."""
    assert call("train", "train.steps=2").exit_code == 0
    packages, printed = imported("from torchtrain.cli import main; main()", "status", tree["run"]["folder"])
    assert "steps      2 of 2" in printed
    assert "checkpoint step 2" in printed
    assert {"typer"} < packages <= CLI
