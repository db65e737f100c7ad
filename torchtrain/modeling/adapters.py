"""LoRA: low-rank adapters on frozen weights, by PEFT (`model.lora`).

PEFT replaces a linear layer by a module that computes W x + (alpha / rank) B A x, W frozen, B zeros at first. The model
stays one of transformers, without a wrapper. Modules in `also_train` are trained in place; PEFT would keep a frozen
copy. An adapter has the model's dtype, and the optimizer its float32 masters.

Legend: O, I width of what a layer makes and takes · R rank.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anchorline.errors import UserError, one_line, quoted
from anchorline.files import write_file
from torchtrain.config import LoraSettings
from torchtrain.modeling.head import head_of
from torchtrain.products import LINEAR

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAMBA_2 = {"BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "Zamba2MambaMixer"}
FOLDER = "adapter"  # in an exported model's
_NAME = "default"  # PEFT's of a model's first adapter
_BASE, _A, _B = ".base_layer.", f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_PREFIX = "base_model.model."  # of names in PEFT's files


def add_adapters(model: "PreTrainedModel", lora: LoraSettings, seed: int) -> None:
    """Freeze a model's weights, add adapters to its linear layers (the seed draws A, alike on all ranks), and unfreeze
    `also_train`. Raises UserError: no PEFT, or it refuses; or settings name what the model has not, or twice.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise UserError("model.lora: needs the package peft: pip install 'anchorline[lora]'") from None
    linear = _linear_layers(model)
    if not linear:
        raise UserError(f"model.lora: {model.config.model_type} has no linear layers for adapters; set it to null")
    settings = _settings_of(model, lora, linear)
    targets: list[str] = sorted(settings.target_modules)
    for target in targets:
        if not any(_is_end(target, name) for name in linear):
            raise UserError(
                f"model.lora.target_modules {quoted(target)}: is the end of no linear layer's name in "
                f"{model.config.model_type}; it has {', '.join(sorted(_ends(linear)))} (embedding, head and norms: "
                "model.lora.also_train)"
            )
    if fused := [
        name for name in linear if any(_is_end(target, name) for target in targets) and _is_fused(model, name)
    ]:
        raise UserError(
            f"model.lora.target_modules: mamba-ssm's kernel reads the weight of {fused[0]} and passes by its adapter; "
            f"name others, such as [{', '.join(sorted(_ends(set(linear)) - {'out_proj'}))}]"
        )
    _check_rank(lora.rank, {name: linear[name] for name in linear if any(_is_end(target, name) for target in targets)})
    owners = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    also = _named_by(lora.also_train, owners, model)
    if twice := [name for name in also if name in linear and any(_is_end(target, name) for target in targets)]:
        raise UserError(
            f"model.lora.also_train: {twice[0]} has an adapter, by model.lora.target_modules, too; remove it from one"
        )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that it calls transformers by an older name
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys", RuntimeWarning)  # its own
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, model, _NAME)
        except ValueError as error:
            raise UserError(f"model.lora: PEFT adapts no {model.config.model_type} so: {one_line(error)}") from None
    # In families whose experts are tensors, PEFT takes gate, up and down for those of the experts, too.
    if strange := [n for n, m in model.named_modules() if _has_adapter(m) and m.base_layer not in linear.values()]:
        raise UserError(
            f"model.lora.target_modules: PEFT puts adapters on {strange[0]}, which is no linear layer, so that a "
            f"merged model would lack them; name others, such as [{', '.join(_attention(linear))}]"
        )
    for module in model.modules():
        if _has_adapter(module):  # PEFT leaves what has shapes alone in float32
            module.to(model.dtype)
    for name in also:
        model.get_submodule(name).requires_grad_(True)


def split_off(model: "PreTrainedModel", weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take apart the whole state dict of a model with adapters; it is emptied, so that nothing lies there twice.

    Returns the weights of a model without adapters, W + (alpha / rank) B A, computed in float32 (or a wider dtype) and
    rounded to W's dtype once; and what PEFT's file holds: A, B and what else was trained, as they are.
    """
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if _has_adapter(module)}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    whole = {name for name, x in model.state_dict(keep_vars=True).items() if id(x) in trained}
    merged, adapter = dict[str, Tensor](), dict[str, Tensor]()
    for layer in layers:
        for end in (_A, _B):
            adapter[f"{_PREFIX}{layer}{end.replace(f'.{_NAME}', '')}"] = weights.pop(layer + end)
    for name in list(weights):
        x = weights.pop(name)
        layer, base, rest = name.rpartition(_BASE)
        if base and rest == "weight":
            a_RI, b_OR = (adapter[f"{_PREFIX}{layer}.lora_{which}.weight"] for which in "AB")
            wide = torch.promote_types(x.dtype, torch.float32)
            x = torch.addmm(x.to(wide), b_OR.to(wide), a_RI.to(wide), alpha=layers[layer].scaling[_NAME]).to(x.dtype)
        elif name in whole:
            adapter[_PREFIX + name] = x
        merged[f"{layer}.{rest}" if base else name] = x
    return merged, adapter


def save_adapter(
    model: "PreTrainedModel", lora: LoraSettings, base: str, adapter: dict[str, Tensor], folder: Path
) -> None:
    """Write `split_off`'s adapter as PEFT reads it into a new folder. base: hub id or folder. Raises OSError."""
    from safetensors.torch import save_file

    layers = [name for name, module in model.named_modules() if _has_adapter(module)]
    whole = {name.removeprefix(_PREFIX).rpartition(".")[0] for name in adapter if ".lora_" not in name}
    # A tied weight has two names, and PEFT reads both only if both are named.
    tied = sorted(name for name in whole if not any(name.endswith(end) for end in lora.also_train))
    settings = _settings_of(
        model,
        lora,
        layers,
        modules_to_save=[*lora.also_train, *tied] or None,
        ensure_weight_tying=bool(tied),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    folder.mkdir()
    text = json.dumps(settings.to_dict(), default=sorted, indent=2, sort_keys=True)  # sets, whose order is no order
    write_file(folder / "adapter_config.json", text.encode() + b"\n")
    once = {name: x.contiguous().clone() for name, x in adapter.items()}  # tied weights: safetensors knows no two names
    save_file(once, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _settings_of(model: "PreTrainedModel", lora: LoraSettings, layers: Iterable[str], **more: Any) -> Any:
    """Return PEFT's settings, for a model whose linear layers but the head are these."""
    from peft import LoraConfig

    # PEFT knows layers by the ends of names, and the head's may be that of others: this one, of that very name, not.
    head = head_of(model)
    more["exclude_modules"] = re.escape(next(name for name, module in model.named_modules() if module is head))

    targets = sorted(_ends(layers)) if lora.target_modules == "all-linear" else lora.target_modules
    alpha: Any = lora.alpha  # any number, though PEFT says an integer
    rank, dropout = lora.rank, lora.dropout
    return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets), **more)


def layer_and_factors(module: nn.Module) -> tuple[nn.Linear, tuple[nn.Linear, nn.Linear, float] | None]:
    """Return a linear layer without its adapter, and the adapter's A, B and scale; None: it has none."""
    if not _has_adapter(module):
        assert isinstance(module, nn.Linear)
        return module, None
    found: Any = module
    return found.base_layer, (found.lora_A[_NAME], found.lora_B[_NAME], found.scaling[_NAME])


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer, with an adapter (that draws nothing) or without."""
    if _has_adapter(module):
        return isinstance(module.base_layer, nn.Linear) and isinstance(module.lora_dropout[_NAME], nn.Identity)
    return isinstance(module, nn.Linear)


def _has_adapter(module: Any) -> bool:
    return _NAME in getattr(module, "lora_A", ())


def _is_fused(model: nn.Module, name: str) -> bool:
    """Whether a layer is the last of a Mamba-2 mixer. In training the kernel of mamba-ssm computes the whole mixer."""
    owner, _, end = name.rpartition(".")
    return end == "out_proj" and type(model.get_submodule(owner)).__name__ in MAMBA_2


def _attention(linear: Iterable[str]) -> list[str]:
    """Return the ends of linear layers' names that stand in attention alone."""
    inside = {name for name in linear if "attn" in name or "attention" in name}
    return sorted(_ends(inside) - _ends(set(linear) - inside))


def _linear_layers(model: "PreTrainedModel") -> dict[str, nn.Linear]:
    """Return all linear layers but the head by name; of the class (or `LINEAR`) that most are: others compute more."""
    head = head_of(model)
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    kinds = {name: nn.Linear if type(m) in LINEAR else type(m) for name, m in found.items()}
    most = Counter(kinds.values()).most_common(1)
    return {name: m for name, m in found.items() if kinds[name] is most[0][0]}


def _check_rank(rank: int, layers: dict[str, nn.Linear]) -> None:
    """Check that at least one of the layers that get adapters can use so high a rank."""
    name, widest = max(layers.items(), key=lambda item: min(item[1].in_features, item[1].out_features))
    most = min(widest.in_features, widest.out_features)
    if rank > most:
        raise UserError(
            f"model.lora.rank {rank}: is more than any layer that gets an adapter can use, {most} in {name} "
            f"({widest.in_features} to {widest.out_features}); set it to {most} or less"
        )


def _named_by(ends: Iterable[str], owners: list[str], model: "PreTrainedModel") -> list[str]:
    def found() -> Iterator[str]:
        for end in ends:
            if not (named := [name for name in owners if name.endswith(end)]):
                raise UserError(
                    f"model.lora.also_train {quoted(end)}: is the end of no name of a module with weights in "
                    f"{model.config.model_type}; it has {', '.join(sorted(_ends(owners)))}"
                )
            yield from named

    return list(dict.fromkeys(found()))


def _is_end(end: str, name: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _ends(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}
