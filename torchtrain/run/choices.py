"""What a run's `auto` stands for on this machine: the engine of attention, recomputation, compiled layers."""

from typing import TYPE_CHECKING, Literal

import torch

from anchorline.errors import UserError
from torchtrain.attention import make_plan
from torchtrain.attention.engines import measure
from torchtrain.attention.masks import caps_scores, layer_windows
from torchtrain.config import Config, ModelConfig, Recomputation
from torchtrain.data import PackedRows
from torchtrain.distributed.free_memory import free_memory
from torchtrain.distributed.world import World
from torchtrain.modeling.compilation import check_compiler, has_layers
from torchtrain.modeling.load import without_weights
from torchtrain.modeling.recompute import can_keep

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Share of the free memory that `auto` fills. The rest is for what `torchtrain.planning` does not count: Python and its
# packages, a kernel's own buffers, and fragments.
_SHARE = 0.85
_GIB = 2**30


def choose_recomputation(
    config: Config, model_config: "PretrainedConfig", engine: str, world: World
) -> tuple[ModelConfig, str]:
    """Return the settings with `activation_checkpointing: auto` decided, and the choice in words, if there was one."""
    if config.model.activation_checkpointing != "auto":
        return config.model, ""
    from torchtrain.planning import budget

    shapes, free = budget.Shapes(model_config), free_memory(world.device)

    def bytes_with(recomputation: Recomputation) -> int:
        model = config.model.model_copy(update={"activation_checkpointing": recomputation})
        needed = budget.count_memory(config.model_copy(update={"model": model}), shapes, world.size)
        return needed.gpu if world.device.type == "cuda" else needed.gpu + needed.host // world.size

    def fits(recomputation: Recomputation) -> bool:
        (fitting,) = world.sum([float(bytes_with(recomputation) <= _SHARE * free)])
        return fitting == world.size

    chosen, words = True, "recomputed in the backward pass"
    if fits(False):
        chosen, words = False, "none recomputed"
    elif can_keep(engine) and fits("keep_attention"):
        chosen, words = "keep_attention", "recomputed in the backward pass, but for attention"
    room = f"{free / _GIB:.1f} GiB are free" if free else "the free memory is not known"
    words += f": keeping them takes {bytes_with(False) / _GIB:.1f} GiB, {room}"
    return config.model.model_copy(update={"activation_checkpointing": chosen}), words


def choose_fused(
    settings: ModelConfig, against: str, source: str, model_config: "PretrainedConfig", world: World
) -> tuple[Literal["compile", "none"], str]:
    """Return `compile` or `none`, and why `auto` does not compile; on all ranks. Raises UserError: torch cannot.

    against: `Config.not_compiled`.
    """
    if settings.fused == "compile":
        check_compiler(world.device)
    if settings.fused != "auto" or world.device.type != "cuda":
        return settings.fused if settings.fused == "compile" else "none", ""
    why = against.partition(",")[0]
    if not why and not has_layers(without_weights(source, model_config, settings.trust_remote_code)):
        why = f"{model_config.model_type}, which has no decoder layers that can be compiled one by one"
    if not why:
        try:
            check_compiler(world.device)
        except UserError as error:
            why = str(error).removeprefix("model.fused compile: ")
    (able,) = world.sum([float(not why)])
    if able == world.size:
        return "compile", ""
    return "none", f"not compiled: {why or 'another process cannot compile'}"


def choose_engine(
    config: Config, engine: str, kept: str | None, model_config: "PretrainedConfig", rows: PackedRows, world: World
) -> tuple[str, str]:
    """Return the engine of the run, and what was measured, in words. All ranks must call it; rank 0 decides.

    On a GPU the numbers of the engine are checked. `auto` measures the engines there, unless layers have windows or a
    soft cap, which not every engine computes.

    engine: what `resolve_engine` returned.
    kept: what `auto` chose when the run that resumes began; it stays, because another moves the last digits.
    rows: of the run; the second is the one that counts.
    Raises UserError: the engine's numbers are wrong here, or none can be chosen.
    """
    if world.device.type != "cuda":
        return engine, ""
    text = model_config.get_text_config(decoder=True)
    plain = set(layer_windows(model_config)) == {None} and not caps_scores(model_config)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if not plain or getattr(text, "kv_lora_rank", None):  # nor heads whose keys are wider than their values
        return engine, ""
    shared = config.distributed.sequence_parallel if config.distributed.share == "heads" else 1
    keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    queries, keys = (max(1, count // shared) for count in (text.num_attention_heads, keys))
    heads = measure.Heads(queries, keys, width, getattr(torch, config.model.dtype), world.device)
    chosen, words = engine, ""
    with world.together():
        if world.rank == 0:
            if config.model.attention == "auto" and kept is None:
                plans = [make_plan(torch.from_numpy(rows.row_at(i)["document_ids"])[None]) for i in range(2)]
                found = measure.measure_engines(measure.list_candidates(), plans, heads)
                if not (times := {name: x for name, x in found.items() if isinstance(x, float)}):
                    raise UserError(f"model.attention auto: no engine can run: {'; '.join(map(str, found.values()))}")
                chosen = min(times, key=lambda name: times[name])
                words = measure.describe(found, chosen)
            else:
                chosen = engine if kept is None else kept
                measure.check_engine(chosen, heads)
    return world.from_first((chosen, words))
