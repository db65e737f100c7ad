"""A model whose layers lie on several devices (accelerate's device map): where its inputs go, and its weights.

Weights of a layer that was put off to the host's memory or to disk exist only while the layer runs.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anchorline.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DeviceMap = str | dict[str, int | str]


def check_can_spread(device_map: DeviceMap) -> None:
    """Check that what places layers is installed, and that there is a GPU where it is to choose.

    Raises:
        UserError: it is not, or there is none.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("device_map needs the package accelerate: pip install accelerate, or remove device_map")
    if isinstance(device_map, str) and not torch.accelerator.is_available():
        raise UserError(f"device_map {device_map}: there is no GPU here; remove it, and the CPU holds all")


def check_spread(model: "PreTrainedModel", device_map: DeviceMap) -> None:
    """Check that a map by name left nothing off the GPUs: accelerate puts there what it finds no room for, unasked.

    Raises:
        UserError: it did.
    """
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


def tell_devices(model: "PreTrainedModel") -> str:
    """Return what a model runs on, in words: the GPUs' names and how many, what was put off, or the one device."""
    places = getattr(model, "hf_device_map", None) or {"": input_device(model)}
    devices = dict.fromkeys(str(torch.device(of)) if of != "disk" else "disk" for of in places.values())
    names = [torch.cuda.get_device_name(torch.device(of)) if of.startswith("cuda") else of for of in devices]
    counted = {name: names.count(name) for name in names}
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counted.items())
