"""Loads weights into a model, all or none: to train it, or to evaluate it with transformers' own attention.

Under ZeRO 3 transformers' ordinary loader reads, converts and ties weights, each cut up as it is read: its own code for
ZeRO 3 reads the whole model into the first rank's memory.
"""

import copy
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anchorline.background import in_background
from anchorline.errors import UserError, quoted
from anchorline.files import read_json
from torchtrain.config import ModelConfig
from torchtrain.modeling.adapters import add_adapters
from torchtrain.modeling.chunks import check_chunks
from torchtrain.modeling.compilation import compile_layers
from torchtrain.modeling.head import check_head
from torchtrain.modeling.placement import DeviceMap, all_weights, check_can_spread, check_covers, check_spread
from torchtrain.modeling.recompute import hand_layers_over, save_memory
from torchtrain.modeling.source import check_no_adapter, first_line, open_config, read_by_library
from torchtrain.modeling.weights import first_not_finite
from torchtrain.products import use_float32_products

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from torchtrain.distributed.cut import Cutter
    from torchtrain.distributed.world import World

_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names what a weight is of without a quantization
_READERS = 8  # files of weights that are hashed at a time
_SAMPLES, _SAMPLE = 64, 2**14  # pieces of a file, and bytes of a piece


def load_for_training(
    source: str,
    config: "PretrainedConfig",
    model: ModelConfig,
    engine: str,
    device: torch.device,
    cutter: "Cutter | None" = None,
    seed: int = 0,
) -> "PreTrainedModel":
    """Load a model in training mode with this config and attention engine, and check what training relies on.

    source, config, engine: what `resolve_source`, `rope.extend` and `resolve_engine` returned.
    cutter: cuts weights up among the ranks, all of which call this; default: they stay whole.
    seed: draws adapters.
    Raises UserError: weights missing, cut off, of another shape or not finite, an adapter beside them, attention that
        cannot be replaced, or a check that fails (`torchtrain.modeling.head`, `torchtrain.attention.separation`).
    Raises OtherRankFailed: with a cutter: another rank found one of these, and says so.
    """
    from torchtrain.attention.hf import implementation_name, register
    from torchtrain.attention.recurrent import separate_layers
    from torchtrain.attention.separation import check_separation
    from torchtrain.modeling.rotation import check_rotation, rotate_in_float32

    register()
    with nullcontext() if cutter is None else cutter.world.together():  # before ranks gather what they hold
        loaded = _load(
            source,
            config,
            getattr(torch, model.dtype),
            implementation_name(engine),
            device,
            model.trust_remote_code,
            cutter,
        )
    separate_layers(loaded)
    if model.rotation == "float32":
        rotate_in_float32(loaded)
    if model.lora is not None:
        add_adapters(loaded, model.lora, seed)
        use_float32_products(loaded)  # those of adapters, too
        if cutter is not None:
            cutter.cut_rest(loaded)
    with nullcontext() if cutter is None else cutter.whole_where_used(loaded):
        if model.rotation == "float32":
            check_rotation(loaded)
        check_head(loaded)
        check_separation(loaded)
        if model.layer_chunk is not None:
            check_chunks(loaded)
    set_up_layers(loaded, model)
    return loaded.train()


def set_up_layers(loaded: "PreTrainedModel", model: ModelConfig) -> None:
    """Let layers recompute, run in chunks and run compiled, as its settings say. Raises UserError: none can."""
    save_memory(loaded, model)
    if model.fused == "compile":
        if not model.recomputation:
            hand_layers_over(loaded)
        compile_layers(loaded, model.recomputation)


def load_for_evaluation(
    folder: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    device_map: DeviceMap | None = None,
) -> "PreTrainedModel":
    """Load a model of a folder in evaluation mode, with SDPA as transformers has it and a KV cache.

    None of training's checks is made: a window, capped logits or dropout are as good here as anything that transformers
    runs. Defaults: the dtype that was saved, the CPU.

    device_map: put layers on several devices instead, as transformers and accelerate understand it.
    Raises UserError: a device map without accelerate or room; no causal language model, or an adapter beside it; or
        weights missing, cut off, of another shape or not finite.
    """
    config = open_config(folder)
    config.use_cache = True  # what a training left in config.json may say otherwise
    if device_map is not None:
        check_can_spread(device_map)
    if isinstance(device_map, dict):
        check_covers(without_weights(folder, config, trust_remote_code=False), device_map)
    place = device or torch.device("cpu")
    loaded = _load(folder, config, dtype, "sdpa", place, trust_remote_code=False, device_map=device_map)
    if device_map is not None:
        check_spread(loaded, device_map)
    if loaded.generation_config is not None:
        loaded.generation_config.use_cache = True
    return loaded.eval()


def without_weights(
    folder: str, config: "PretrainedConfig", trust_remote_code: bool, **settings: Any
) -> "PreTrainedModel":
    """Return the model of a config on `meta`: its modules, and weights of no size. settings: such as dtype."""
    from transformers import AutoModelForCausalLM

    with read_by_library(folder, "the model cannot be built", trust_remote_code), torch.device("meta"):
        own = copy.deepcopy(config)
        return AutoModelForCausalLM.from_config(own, trust_remote_code=trust_remote_code, **settings)


def _load(
    source: str,
    config: "PretrainedConfig",
    dtype: torch.dtype | None,
    attention: str,
    device: torch.device,
    trust_remote_code: bool,
    cutter: "Cutter | None" = None,
    device_map: DeviceMap | None = None,
) -> "PreTrainedModel":
    """Load all weights, each finite, into a model built in its dtype: a cast would round RoPE's float32 frequencies."""
    from transformers import AutoModelForCausalLM

    check_no_adapter(source, source)
    integers = _check_weights(source)
    cutting = nullcontext() if cutter is None else _cut_as_they_come(cutter)
    with read_by_library(source, "the model cannot be built", trust_remote_code), cutting:
        loaded: PreTrainedModel
        loaded, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            source,
            config=config,
            dtype="auto" if dtype is None else dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # and refused here: transformers names them only in a report that it logs
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,  # a pickle may run code
            device_map=device_map,
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise UserError(
            f"model.source {quoted(source)}: {len(mismatched)} weights do not fit its config.json, the first is "
            f"{name}: {list(found)} in the file, {list(expected)} by the config"
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"model.source {quoted(source)}: {len(missing)} weights are missing, the first is {missing[0]}")
    trained = {name for name, _ in loaded.named_parameters()}
    whole = next((name for name in integers if name in trained or name.endswith("weight")), None)
    if whole is not None and getattr(config, "quantization_config", None) is None:
        raise UserError(
            f"model.source {quoted(source)}: {whole} holds {integers[whole]} in the file, and the config.json has no "
            "quantization_config with which to read it; convert the model to bfloat16 or float32 first"
        )
    if device_map is None:
        _note_untied(loaded)
    if cutter is None:
        held = loaded.named_parameters() if device_map is None else all_weights(loaded)
    else:
        cutter.cut_rest(loaded)
        held = ((name, cutter.own_part(parameter)) for name, parameter in loaded.named_parameters())
    if (name := first_not_finite(held)) is not None:
        raise UserError(
            f"model.source {quoted(source)}: {name} holds a number that is not finite in "
            f"{str(loaded.dtype).removeprefix('torch.')}; copy or download it again, or choose another model or "
            "model.dtype"
        )
    if device_map is not None:
        return loaded
    loaded = loaded.to(device)  # pyright: ignore[reportArgumentType]
    use_float32_products(loaded)
    return loaded


def _note_untied(loaded: "PreTrainedModel") -> None:
    """Say in the config that the head is not tied, where files hold another than the embedding: readers go by it."""
    head, embedding = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        for config in (loaded.config, loaded.config.get_text_config(decoder=True)):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False


@contextmanager
def _cut_as_they_come(cutter: "Cutter") -> Iterator[None]:
    """Let transformers' loader (5.17 to 5.23, core_model_loading.py) hand weights to a cutter; tied ones at its end."""
    from transformers import core_model_loading

    real = core_model_loading.set_param_for_module
    ahead = "HF_DEACTIVATE_ASYNC_LOAD"  # threads that read ahead would fill the host's memory
    before = os.environ.get(ahead)

    def set_and_cut(model: "PreTrainedModel", target_name: str, *args: Any) -> None:
        path, _, name = target_name.rpartition(".")
        module = model.get_submodule(path)
        before = getattr(module, name, None)
        real(model, target_name, *args)
        parameter, tied = getattr(module, name, None), model.all_tied_weights_keys
        if not isinstance(parameter, nn.Parameter) or parameter is before:  # a buffer; or the file's does not fit
            return
        if target_name not in tied and target_name not in tied.values():
            cutter.cut(parameter)

    core_model_loading.set_param_for_module, os.environ[ahead] = set_and_cut, "1"
    try:
        yield
    finally:
        core_model_loading.set_param_for_module = real
        os.environ.pop(ahead)
        if before is not None:
            os.environ[ahead] = before


def check_same_files(source: str, world: "World") -> None:
    """Check that all ranks read the same weights, by size and `_SAMPLES` places. Raises UserError, OtherRankFailed."""
    with world.together():
        own = _sample(source)
    first = world.from_first(own)
    with world.together():
        if own != first:
            raise UserError(
                f"model.source {quoted(source)}: the weights here are not those of rank 0; copy the same model to "
                "every machine"
            )


def _sample(source: str) -> str:
    """Return a digest of the files of weights by `_SAMPLES` pieces of each, the header among them."""
    digest = hashlib.sha256()
    for path in weight_files(source):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(size * number // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def weight_files(source: str) -> list[Path]:
    """Return a folder's model.safetensors, or its index's files. Raises UserError: the index is damaged."""
    folder = Path(source)
    if (whole := folder / "model.safetensors").exists():
        return [whole]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    named = read_json(index, f"model.source {quoted(source)}").get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise UserError(f"model.source {quoted(source)}: {quoted(index)} has no weight_map of tensors to files")
    names = sorted(set(named.values()))
    if stray := next((name for name in names if Path(name).name != name or not (folder / name).is_file()), None):
        raise UserError(f"model.source {quoted(source)}: {quoted(index)} names {quoted(stray)}, which is not there")
    return [folder / name for name in names]


def digest_weights(source: str) -> str:
    """Return the SHA-256 of a folder's weights: names, dtypes, shapes and bytes, however they are cut into files.
    Raises UserError: a file is damaged, cut off, or not there.
    """
    from safetensors import safe_open

    _check_weights(source)

    def digest_files(paths: Sequence[Path]) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    x = file.get_tensor(name)
                    digest = hashlib.sha256(f"{x.dtype} {list(x.shape)} ".encode())
                    digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
                    found[name] = digest.hexdigest()
        return found

    paths, found = weight_files(source), dict[str, str]()
    shares = [paths[number::_READERS] for number in range(_READERS)]
    for wait in [in_background(partial(digest_files, share), "digest-weights") for share in shares if share]:
        found |= wait()  # hashing lets other threads run
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _check_weights(source: str) -> dict[str, str]:
    """Open every file of weights, and the index; return the dtype of each tensor that holds no floats."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for path in weight_files(source):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    dtype: str = file.get_slice(name).get_dtype()
                    if dtype not in _FLOATS:
                        found[name] = dtype
        except Exception as error:  # SafetensorError, or of the system
            raise UserError(
                f"model.source {quoted(source)}: {quoted(path.name)}: a safetensors file is damaged or cut off "
                f"({first_line(error)}); copy or download it again"
            ) from None
    return found
