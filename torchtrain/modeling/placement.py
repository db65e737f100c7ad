"""A model whose layers lie on several devices (accelerate's device map): where its inputs go, and its weights.

Weights of a layer that is kept in the host's memory or on disk are loaded only while the layer runs.
"""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anchorline.errors import UserError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DeviceMap = str | dict[str, int | str]


def check_can_spread(device_map: DeviceMap) -> None:
    """Check for accelerate, and for a GPU where one is needed. Raises UserError: missing; or a map names no device."""
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("device_map needs the package accelerate: pip install accelerate, or remove device_map")
    if isinstance(device_map, str) and not torch.accelerator.is_available():
        raise UserError(f"device_map {device_map}: there is no GPU here; remove it, and the CPU holds all")

    if isinstance(device_map, dict):
        if not device_map:
            raise UserError("device_map {}: names no module; say where each lies, or remove device_map")
        for name, place in device_map.items():
            _check_device(name, place)


def _check_device(name: str, place: int | str) -> None:
    if place in ("cpu", "disk"):
        return
    found = re.fullmatch(r"(?:cuda:)?(0|[1-9]\d{0,3})", str(place), re.ASCII)
    if found is None or (isinstance(place, str) and not place.startswith("cuda:")):
        raise UserError(
            f"device_map {quoted(name)}: {quoted(place)} is no place; give a GPU's number or cuda:N, cpu, or disk"
        )
    gpus = torch.accelerator.device_count() if isinstance(place, int) else torch.cuda.device_count()
    if int(found[1]) >= gpus:
        raise UserError(
            f"device_map {quoted(name)}: {quoted(place)} is not here, where there are {gpus} GPUs; give another"
        )


def check_covers(model: nn.Module, device_map: dict[str, int | str]) -> None:
    """Check that a map by module places every weight once. Raises UserError: it does not, or names no module."""
    modules = {name for name, _ in model.named_modules()}
    if unknown := next((name for name in device_map if name not in modules), None):
        children = ", ".join(name for name, _ in model.named_children())
        raise UserError(f"device_map {quoted(unknown)}: the model has no such module; it has {children}")
    for weight, _ in model.named_parameters(remove_duplicate=False):
        held = [name for name in device_map if not name or weight.startswith(f"{name}.")]
        if not held:
            raise UserError(f"device_map: names no place for {weight}; add its module")
        if len(held) > 1:
            raise UserError(f"device_map: {weight} lies under {quoted(held[0])} and {quoted(held[1])}; keep one")


def check_spread(model: "PreTrainedModel", device_map: DeviceMap) -> None:
    """Check that a map by name put all weights on GPUs. Raises UserError: accelerate, silently, did not."""
    if isinstance(device_map, str) and any(of.device.type in ("cpu", "meta") for of in model.parameters()):
        raise UserError(
            f"device_map {device_map}: the model does not fit on the GPUs, or accelerate does not see their memory; "
            "free them or take more, or say in device_map which module lies on cpu or disk"
        )


def input_device(model: "PreTrainedModel") -> torch.device:
    """Return where token ids go: where the embedding runs. `model.device` may be that of weights that do not exist."""
    embedding = model.get_input_embeddings()
    place = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return model.device if place is None else torch.device(place)


def weights_of(module: nn.Module) -> AbstractContextManager[None]:
    """Let a module's own weights exist, where it runs, for the time of the block."""
    if getattr(module, "_hf_hook", None) is None:
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def all_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by name, a tied one by each of its names; each exists until the next is asked for."""
    for prefix, module in model.named_modules():
        with weights_of(module):
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{prefix}.{name}".lstrip("."), parameter


def format_devices(model: "PreTrainedModel") -> str:
    """Return what a model runs on, in words: the GPUs' names and how many, what was put off, or the one device."""
    places = getattr(model, "hf_device_map", None) or {"": input_device(model)}
    devices = dict.fromkeys(str(torch.device(of)) if of != "disk" else "disk" for of in places.values())
    names = [torch.cuda.get_device_name(torch.device(of)) if of.startswith("cuda") else of for of in devices]
    counted = {name: names.count(name) for name in names}
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counted.items())
