"""Under ZeRO 3 a model is cut up as it is read: the bits of one that was loaded whole, its mistakes in one line, and no
rank that holds all of it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CohereConfig, GPT2Config, MixtralConfig, PretrainedConfig

from anchorline.errors import quoted
from torchtrain.config import ModelConfig
from torchtrain.planning.memory import shape_of_model
from torchtrain.tests.forks import forks
from torchtrain.tests.tiny import SIZES, tiny_config

ROWS, TOKENS = 4, 40
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
}
SETTINGS = {"sequences_per_step": ROWS, "loss_chunk": 32, "learning_rate": 1e-2, "weight_decay": 0.3, "clip_norm": 0.5}
ONE_LAYER = SIZES | {"num_hidden_layers": 1}
NO_HEAD_DIM = {name: size for name, size in ONE_LAYER.items() if name != "head_dim"}
CONFIGS: dict[str, PretrainedConfig] = {
    "plain": tiny_config("mistral", num_hidden_layers=1),
    "tied": tiny_config("qwen3", num_hidden_layers=1, tie_word_embeddings=True),
    "biased": tiny_config("qwen2", num_hidden_layers=1, rope_parameters=LONGROPE),
    # Weights that are not multiplied by `F.linear`, and those that stand in other shapes in the file.
    "gpt2": GPT2Config(vocab_size=264, n_positions=128, n_embd=32, n_layer=1, n_head=4, attn_pdrop=0.0),
    "experts": MixtralConfig(**ONE_LAYER, num_local_experts=4, sliding_window=None),
    "scaled": CohereConfig(**NO_HEAD_DIM, logit_scale=0.5),
}


def case(model: str, stored: str, dtype: str, shared: int = 1, offload: str = "none") -> dict[str, Any]:
    distributed = {"zero_stage": 3, "sequence_parallel": shared, "offload": offload}
    found = {"name": f"{model}-{stored}-{dtype}-sp{shared}-{offload}", "model": f"{model}-{stored}", "dtype": dtype}
    return found | {"settings": SETTINGS | {"micro_batch": shared}, "distributed": distributed}


SAME = [
    case("plain", "bfloat16", "float32", offload="all"),
    case("biased", "float32", "float32", shared=2),
    case("tied", "float32", "bfloat16"),
    case("gpt2", "float32", "float32"),
    case("experts", "bfloat16", "bfloat16"),
]
# What is wrong with the folder -> on which rank (None: on all), and what is said.
MISTAKES: dict[str, tuple[int | None, str]] = {
    "missing": (None, "1 weights are missing, the first is model.layers.0.mlp.up_proj.weight"),
    "shape": (None, "1 weights do not fit its config.json, the first is model.layers.0.mlp.up_proj.weight: [3, 32] in"),
    "infinite": (None, "rank 1: model.source {}: model.layers.0.mlp.up_proj.weight holds a number that is not finite"),
    "short": (None, "model.source {}: 'model.safetensors': a safetensors file is damaged or cut off"),
    "other": (1, "rank 1: model.source {}: the weights here are not those of rank 0"),
    "scaled": (None, "model.source: cohere does more than one linear layer to make logits"),
    "leaking": (None, "model.layers.0.mlp (MistralMLP): carries one document into another"),
}
# 38 million weights, none of more than 1 in 70 of all.
LARGE = tiny_config("mistral", hidden_size=512, intermediate_size=1024, num_hidden_layers=16, head_dim=128)
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models by name, whole and broken, and a batch."""
    folder = tmp_path_factory.mktemp("cut")
    for name in {item["model"] for item in SAME}:
        model, _, stored = name.partition("-")
        write_model(CONFIGS[model], getattr(torch, stored), folder / name)
    AutoModelForCausalLM.from_config(LARGE, dtype=torch.float32).save_pretrained(folder / "large-float32")
    write_model(CONFIGS["scaled"], torch.float32, folder / "scaled")
    for name in ("whole", "leaking"):
        write_model(CONFIGS["plain"], torch.float32, folder / name)
    for name in ("missing", "shape", "infinite", "other"):
        shutil.copytree(folder / "whole", folder / name)
        weights = load_file(path := folder / name / "model.safetensors")
        if name == "missing":
            del weights[WEIGHT]
        elif name == "shape":
            weights[WEIGHT] = weights[WEIGHT][:3].clone()
        else:  # its last number, which is the last rank's
            weights[WEIGHT].view(-1)[-1] = torch.inf if name == "infinite" else 5
        save_file(weights, path, metadata={"format": "pt"})
    shutil.copytree(folder / "whole", folder / "short")
    (folder / "short" / "model.safetensors").write_bytes((folder / "whole" / "model.safetensors").read_bytes()[:-1])
    torch.save(batch(), folder / "batch.pt")
    return folder


def write_model(config: PretrainedConfig, dtype: torch.dtype, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def batch() -> dict[str, torch.Tensor]:
    """Rows of two documents, of two domains."""
    positions = torch.arange(TOKENS).repeat(ROWS, 1)
    tokens = torch.randint(250, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    second = (positions >= 17).long()
    labels = tokens.roll(-1, dims=1).masked_fill(positions == TOKENS - 1, -100)
    return {
        "input_ids": tokens,
        "position_ids": positions,
        "document_ids": 1 + second,
        "shift_labels": labels,
        "domain_ids": second,
    }


@pytest.fixture(scope="module")
def found(folder):
    """Return a function from a case's name to what each of two ranks left; all cases run at once."""
    cases = [*SAME, case("large", "float32", "bfloat16") | {"memory": True}]
    for name, (rank, _) in MISTAKES.items():
        model = name if rank is None else "whole"
        cases.append(case(model, "", "float32") | {"name": name, "mistake": rank, "broken": str(folder / name)})
    for item in cases:
        item |= {"model": str(folder / item["model"].removesuffix("-")), "batch": str(folder / "batch.pt")}
    path, log, out = folder / "cases.json", folder / "log", folder / "out"
    path.write_text(json.dumps(cases))
    out.mkdir()
    done = forks().run(str(path), str(out), main="torchtrain.tests.load_worker", processes=2, log=log)
    assert done["codes"] == [0, 0], log.read_text()[-6000:]
    return lambda name: [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", [item["name"] for item in SAME])
def test_weights_buffers_masters_and_a_step_have_the_bits_of_a_model_loaded_whole(found, name):
    assert found(name) == [[], []]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_of_one_rank_or_of_all(found, folder, name):
    """As `load_for_training` says of a whole model, and no rank waits for one that found something."""
    (_, message), (line,) = MISTAKES[name], [line for lines in found(name) for line in lines]
    assert message.format(quoted(str(folder / name))) in line
    assert line.startswith("rank 1:") == message.startswith("rank 1:")


def test_no_rank_holds_the_model(found):
    """Of a file of another dtype, a part of which cannot just be mapped. The host's memory is the device's here, so
    each of two ranks must have half of the model; to that comes what is cut at one time, and what the checks make.
    """
    whole = sum(p.numel() for p in shape_of_model(LARGE, ModelConfig(source="large")).parameters()) * 2
    for cut, uncut in found(case("large", "float32", "bfloat16")["name"]):
        assert whole / 2 < cut < whole < uncut
