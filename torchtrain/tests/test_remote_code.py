"""Code that comes with a model runs only where `model.trust_remote_code` says so, and nobody is asked."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from anchorline.errors import UserError
from torchtrain.config import ModelConfig
from torchtrain.modeling.load import load_for_training
from torchtrain.modeling.source import open_config, open_tokenizer, resolve_source

ROOT = Path(__file__).parents[2]
CONFIG = """
from pathlib import Path
from transformers import LlamaConfig
Path(__file__).with_name("ran").touch()
Path({ran!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODEL = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own(model_folder, tmp_path, monkeypatch) -> Path:
    """A folder whose model is a Llama under its own name, with its own code, which leaves a mark where it runs."""
    folder = shutil.copytree(model_folder(), tmp_path / "own")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "configuration_own.py").write_text(CONFIG.format(ran=str(tmp_path / "ran")))
    (folder / "modeling_own.py").write_text(MODEL)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def command(tree, write_config, tmp_path) -> subprocess.CompletedProcess:
    """Run `yes | torchtrain train`."""
    return subprocess.run(
        f"yes | {sys.executable} -m torchtrain train {write_config(tree)} train.steps=2",
        shell=True, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip


def test_whatever_is_typed_no_code_runs(own, tree, write_config, tmp_path):
    tree["model"]["source"] = str(own)
    ended = command(tree, write_config, tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "it needs code that comes with the model" in ended.stderr.splitlines()[-1]
    assert "set model.trust_remote_code=true" in ended.stderr.splitlines()[-1]
    assert "[y/N]" not in ended.stdout + ended.stderr
    assert not (tmp_path / "ran").exists()


def test_code_that_is_trusted_is_loaded(own, tmp_path):
    source = resolve_source(str(own), tmp_path, trust_remote_code=True)
    config = open_config(source, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    settings = ModelConfig(source=source, dtype="float32", trust_remote_code=True)
    assert type(load_for_training(source, config, settings, "sdpa", torch.device("cpu"))).__name__ == "OwnForCausalLM"


def test_a_known_model_with_code_beside_it_takes_none_of_it(model_folder, tmp_path):
    folder = shutil.copytree(model_folder(), tmp_path / "known")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"auto_map": {"AutoConfig": "evil.Evil"}}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["evil.Evil", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text("raise SystemExit('code has run')")
    source = resolve_source(str(folder), tmp_path)
    assert open_config(source).model_type == "llama"
    assert open_tokenizer(source).bos_token == "<s>"


def test_a_pickle_is_never_read(model_folder, tmp_path):
    folder = shutil.copytree(model_folder(), tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"no weights in \*\.safetensors; 'pytorch_model.bin' may run code when it is read"
    ):
        resolve_source(str(folder), tmp_path)
    save_file({"x": torch.zeros(1)}, folder / "adapter.safetensors")
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, local_files_only=True)


def test_every_call_says_whether_it_trusts():
    """transformers asks on standard input where nothing is said."""
    calls = []
    for package in ("torchtrain", "jaxref", "parity_tests"):
        for path in (ROOT / package).rglob("*.py"):
            if "tests" in path.parts or path.name.startswith("test_"):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                if owner.startswith("Auto") and node.func.attr in ("from_pretrained", "from_config"):
                    said = "trust_remote_code" in {keyword.arg for keyword in node.keywords}
                    calls.append((f"{path.relative_to(ROOT)}:{node.lineno}", said))
    assert len(calls) > 5
    assert not [place for place, said in calls if not said]
