"""Both ways, bit for bit; and what is refused before anything is written."""

import hashlib
import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest

from jaxref.model import to_arrays
from jaxref.optim import adamw
from jaxref.storage import checkpoint as module
from jaxref.storage.checkpoint import FILES, restore, save
from jaxref.storage.weights import load_hf, save_hf
from jaxref.tests.decoders import tiny
from jaxref.tests.test_cli import jaxref  # noqa: F401
from jaxref.tests.test_weights import assert_bitwise

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture
def convert(jaxref):  # noqa: F811
    return lambda *arguments: jaxref("convert", *map(str, arguments))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One of each kind, of the same decoder."""
    folder = tmp_path_factory.mktemp("folders")
    decoder = tiny("llama", ml_dtypes.bfloat16, num_hidden_layers=1)
    save_hf(folder / "model", decoder)
    save(folder / "checkpoint", decoder)
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "fp32"])
def test_there_and_back_no_bit_changes(convert, tmp_path, caplog, dtype, tied):
    decoder = tiny("qwen2", dtype, num_hidden_layers=1, tie_word_embeddings=tied)
    save_hf(tmp_path / "model", decoder)
    code, printed, err = convert(tmp_path / "model", tmp_path / "checkpoint")
    assert (code, err) == (0, "")
    assert printed.startswith(f"{tmp_path / 'checkpoint'}: an Orbax checkpoint")
    restored, _ = restore(tmp_path / "checkpoint")
    assert restored.config == decoder.config
    assert_bitwise(to_arrays(restored), to_arrays(decoder))

    code, printed, err = convert(tmp_path / "checkpoint", tmp_path / "again")
    assert (code, err) == (0, "")
    assert printed.startswith(f"{tmp_path / 'again'}: config.json and model.safetensors")
    config, loaded = load_hf(tmp_path / "again")
    assert config == decoder.config
    assert_bitwise(to_arrays(loaded), to_arrays(decoder))
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "model" / "config.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "checkpoint", "again"}
    assert not [record for record in caplog.records if record.levelname != "INFO"]  # Orbax warns on standard error


def test_from_orbax_to_hugging_face_and_back(convert, tmp_path):
    """Every number of RoPE comes through both forms; an optimizer's state stays behind and it is said."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [1.0, 3.0, 4.0],
    }
    decoder = tiny("qwen3", num_hidden_layers=1, tie_word_embeddings=True, rope_parameters=rope)
    optimizer = adamw(1e-2, lambda name: True, max_grad_norm=1.0)
    save(tmp_path / "step", decoder, optimizer.init(to_arrays(decoder)))
    code, printed, _ = convert(tmp_path / "step", tmp_path / "model")
    assert code == 0
    assert "the optimizer's state stays behind" in printed
    assert convert(tmp_path / "model", tmp_path / "again")[0] == 0
    restored, _ = restore(tmp_path / "again")
    assert restored.config == decoder.config
    assert_bitwise(to_arrays(restored), to_arrays(decoder))


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def change_config(**changes):
    def change(folder):
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | changes))

    return change


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (remove("config.json"), "is neither a Hugging Face folder (it has no config.json) nor a checkpoint of jaxref"),
        (write("config.json", "{"), "config.json is not JSON ("),
        (change_config(model_type="gpt2"), "model_type: 'gpt2' is not implemented"),
        (change_config(hidden_size=24), "is not the "),
        (remove("model.safetensors"), "model.safetensors does not exist; neither does model.safetensors.index.json"),
        (cut, "not safetensors, or damaged ("),
        (
            write("model.safetensors.index.json", r'{"weight_map": {"a": "\ud800"}}'),
            "but model.safetensors.index.json names",
        ),
        (lambda folder: [(folder / name).mkdir() for name in ("about", "params")], "and a checkpoint too"),
    ],
    ids=["no config", "no JSON", "unknown", "size", "no weights", "cut", "no shard", "both"],
)
def test_a_hugging_face_folder_that_cannot_be_read_is_one_line(convert, folders, tmp_path, damage, line):
    source = shutil.copytree(folders / "model", tmp_path / "model")
    damage(source)
    code, printed, err = convert(source, tmp_path / "target")
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert line in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def flip(folder):
    """One bit in the middle of the parameters."""
    (file,) = (folder / "params" / "d").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def relist(folder):
    """The digests are right, and the content is of another program."""
    metadata = folder / "about" / "metadata"
    metadata.write_text("[]")
    files = json.loads((folder / FILES).read_text())
    files["about/metadata"] = {"bytes": 2, "sha256": hashlib.sha256(b"[]").hexdigest()}
    (folder / FILES).write_text(json.dumps(files))


def pipe(folder):
    (folder / "params" / "manifest.ocdbt").unlink()
    os.mkfifo(folder / "params" / "manifest.ocdbt")


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda folder: shutil.rmtree(folder / "params"), "is neither a Hugging Face folder"),
        (lambda folder: shutil.rmtree(folder / "params" / "d"), "is missing; the checkpoint is damaged"),
        (remove("params/manifest.ocdbt"), "manifest.ocdbt is missing; the checkpoint is damaged, take another"),
        (write("about/metadata", "{"), "about/metadata is cut off or overwritten (1 bytes; "),
        (flip, "its content has changed"),
        (pipe, "manifest.ocdbt is missing; the checkpoint is damaged"),
        (remove(FILES), "files.json: no such file or directory"),
        (write(FILES, "{"), "files.json is not JSON ("),
        (write(FILES, '{"a": 1}'), "files.json: "),
        (relist, "damaged, or not a checkpoint of jaxref"),
    ],
    ids=range(10),
)
def test_a_checkpoint_that_cannot_be_read_is_one_line(convert, folders, tmp_path, damage, line):
    source = shutil.copytree(folders / "checkpoint", tmp_path / "checkpoint")
    damage(source)
    code, printed, err = convert(source, tmp_path / "target")
    assert (code, printed, err.count("\n")) == (2, "", 1), err
    assert line in err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_target_that_cannot_be_made_is_refused_first(convert, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_hf", None)
    monkeypatch.setattr(module, "restore", None)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for target, line in (
        (tmp_path, f"target: {tmp_path} exists; give a new one"),
        (tmp_path / "file", "exists; give a new one"),
        (tmp_path / "link", "is a link to what is not there"),
        (tmp_path / "no" / "parent", f"target: {tmp_path / 'no'} is not a folder; make it first"),
        (tmp_path / "file" / "below", "target: "),
    ):
        for source in ("model", "checkpoint"):
            code, printed, err = convert(folders / source, target)
            assert (code, printed, err.count("\n")) == (2, "", 1)
            assert line in err
    for source in (tmp_path / "nothing", tmp_path / "file"):
        code, _, err = convert(source, tmp_path / "new")
        assert (code, err) == (
            2,
            f"jaxref: source: {source} is not a folder; give one of Hugging Face or a checkpoint of jaxref\n",
        )
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("source", ["model", "checkpoint"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "stop"])
def test_what_stops_in_the_middle_leaves_nothing(convert, folders, tmp_path, monkeypatch, source, error):
    def stop(*_):
        raise error

    monkeypatch.setattr("anchorline.files.commit", stop)
    code, _, err = convert(folders / source, tmp_path / "target")
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_files_have_the_mode_of_what_this_process_makes(convert, folders, tmp_path):
    (tmp_path / "plain").touch()
    mode = (tmp_path / "plain").stat().st_mode
    for source in ("model", "checkpoint"):
        assert convert(folders / source, tmp_path / source)[0] == 0
        assert {path.stat().st_mode for path in (tmp_path / source).rglob("*") if path.is_file()} == {mode}
