"""Record what a torch model computes, array by array, into a safetensors file: torch alone, to be copied anywhere.

    with record(model, "dump.safetensors"):
        model(**batch).loss.backward()

The file holds every module's output under the module's name, in the order of the computation, in its own dtype; inputs
of the modules in `INPUTS` as `NAME.input`, because a function computed them; and after a backward pass the gradients of
the parameters as `gradients.NAME`. Arrays are written as they come, so that memory does not grow. `parity compare`
reads it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

INPUTS = (
    *("*.o_proj", "*.out_proj", "*.wo", "*.linear_proj"),  # the heads' output
    *("*.post_attention_layernorm", "*.ffn_norm", "*.pre_feedforward_layernorm"),  # the residual
)
_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_CODES |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_CODES |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


@contextmanager
def watch(model: nn.Module, take: Callable[[str, Tensor], None], inputs: Sequence[str] = INPUTS) -> Iterator[None]:
    """Call `take(name, tensor)` for every output of a module, in the order of the computation; hooks change nothing."""

    def read(name: str, found: Any) -> None:
        if isinstance(found, Tensor):
            take(name, found.detach())
        elif isinstance(found, Mapping | tuple | list):
            pairs = found.items() if isinstance(found, Mapping) else enumerate(found)
            for key, value in pairs:
                read(f"{name}.{key}" if key else name, value)

    hooks = []
    for name, module in model.named_modules():
        if any(fnmatchcase(name, pattern) for pattern in inputs):
            hooks.append(module.register_forward_pre_hook(lambda _, args, name=name: read(f"{name}.input", args)))
        if name:
            hooks.append(module.register_forward_hook(lambda _, args, out, name=name: read(name, out)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def record(model: nn.Module, path: str | Path, names: str | Sequence[str] = "*", **inputs: Tensor) -> Iterator[None]:
    """Write what the model computes in the block to a file, which is there when the block ends.

    model: any module; with ranks, each rank writes a file of its own (`rank0.safetensors`, ...).
    path: the file.
    names: patterns of names to record; * is any text.
    inputs: tensors that are recorded as `inputs.NAME` (`input_ids`, `position_ids`, labels).
    """
    patterns, modules = (names,) if isinstance(names, str) else names, dict(model.named_modules())
    header: dict[str, Any] = {}
    partial = Path(f"{path}.partial")
    # The header stands first and is known last: room is left for it, and what it does not fill are spaces.
    room = 4096 * 64 + 512 * (4 * len(modules) + len(list(model.parameters())))
    try:
        with partial.open("wb") as file:
            file.seek(8 + room)

            def take(name: str, tensor: Tensor) -> None:
                if not any(fnmatchcase(name, pattern) for pattern in patterns):
                    return
                number = sum(key == name or key.startswith(f"{name} #") for key in header) if name in header else 0
                raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
                begin = file.tell() - 8 - room
                file.write(raw.data)
                code, shape = _CODES[str(tensor.dtype).removeprefix("torch.")], list(tensor.shape)
                entry = {"dtype": code, "shape": shape, "data_offsets": [begin, begin + raw.size]}
                header[f"{name} #{number + 1}" if number else name] = entry

            for name, tensor in inputs.items():
                take(f"inputs.{name}", tensor)
            with watch(model, take):
                yield
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    take(f"gradients.{name}", parameter.grad)
            # Gradients come parameter by parameter: `parity compare` sorts what the order lacks.
            metadata = {"order": json.dumps([name for name in header if not name.startswith("gradients.")])}
            config: Any = getattr(model, "config", None)
            if hasattr(config, "to_json_string"):  # transformers
                metadata["config"] = config.to_json_string(use_diff=False)
            text = json.dumps({"__metadata__": metadata, **header}).encode()
            if len(text) > room:
                raise ValueError(f"{len(header)} arrays: name fewer with `names`; the header has no room for them")
            file.seek(0)
            file.write(room.to_bytes(8, "little") + text.ljust(room))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
