"""A model whose layers lie on two of the stand-in's GPUs, beside the same on one.

main FILE       writes, as JSON, of each map whether all answers and losses are the same bits, and the devices; and
                    what is said where accelerate finds no room
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from anchorline.errors import UserError
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.tests.test_placement import measure
from torchtrain.tests.tiny import tiny_model

MAPS: dict[str, Any] = {
    "a layer each": {
        "model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1,
        "lm_head": 1,
    },
    "the head where the first layer is not": {
        "model.embed_tokens": 1, "model.rotary_emb": 1, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1,
        "lm_head": 0,
    },
    "balanced": "balanced",
}  # fmt: skip


def main() -> None:
    """Measure one model in several places."""
    torch.set_num_threads(1)
    same, devices = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("qwen3", max_position_embeddings=256).save_pretrained(folder)
        whole = measure(load_for_evaluation(folder, device=torch.device("cuda:0")))
        try:  # accelerate cannot ask the stand-in for its memory, and then takes the host's
            refused = str(load_for_evaluation(folder, device_map="auto").device)
        except UserError as error:
            refused = str(error)
        torch.cuda.mem_get_info = lambda *_: (2**33, 2**33)
        for name, places in MAPS.items():
            model = load_for_evaluation(folder, device_map=places)
            devices[name] = sorted({str(parameter.device) for parameter in model.parameters()})
            same[name] = measure(model) == whole
    Path(sys.argv[1]).write_text(json.dumps({"same": same, "devices": devices, "refused": refused}), encoding="utf-8")
