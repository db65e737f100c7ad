"""A model's folder of any size whose weights take no room: files with holes in them, which read as zeros."""

import json
import struct
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from torchtrain.config import ModelConfig
from torchtrain.planning.memory import shape_of_model

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_source(config: PretrainedConfig, settings: ModelConfig, folder: Path) -> Path:
    """Write config.json and a safetensors file for each layer, in the dtype of `settings`.

    config: of a model.
    settings: of a run.
    folder: made; returned.
    """
    folder.mkdir()
    config.save_pretrained(folder)
    files: dict[str, dict[str, Tensor]] = {}
    for name, x in shape_of_model(config, settings.model_copy(update={"lora": None})).named_parameters():
        layer = "-".join(part for part in name.split(".") if part.isdecimal()) or name
        files.setdefault(f"model-{layer}.safetensors", {})[name] = x
    for file, weights in files.items():
        _write_hollow(folder / file, weights)
    index = {"metadata": {}, "weight_map": {name: file for file, weights in files.items() for name in weights}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write_hollow(path: Path, weights: dict[str, Tensor]) -> None:
    header, end = {}, 0
    for name, x in weights.items():
        header[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
