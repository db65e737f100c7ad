"""`torchtrain bench step`: whole training steps of one row, ours beside what people write or call instead.

Losses are compared first: those of each token, before anything is learned, with the same weights in float32. Then the
loops take turns, and with them a product of large matrices, whose speed is the ceiling that MFU is a share of.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anchorline.errors import UserError, one_line
from torchtrain.attention import resolve_engine
from torchtrain.bench.clock import Clock
from torchtrain.bench.config import BenchConfig, ModelledStep, StepBench
from torchtrain.bench.loops import LOOPS, Row, TrainingLoop, inputs_of, losses_of_logits
from torchtrain.bench.record import BenchRecord
from torchtrain.bench.rows import Corpus
from torchtrain.bench.spread import spread_of
from torchtrain.bench.truth import error_ratio
from torchtrain.config import ModelConfig, RopeConfig
from torchtrain.data import check_store, collate
from torchtrain.distributed.world import World
from torchtrain.modeling.check import check_config
from torchtrain.modeling.load import load_for_training
from torchtrain.modeling.rope import extend
from torchtrain.modeling.source import open_config, resolve_source
from torchtrain.planning.flops import FlopCounter, peak_of
from torchtrain.planning.memory import Shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

YARDSTICK = "transformers, full"
_DAY, _BILLION = 86_400, 1e9


def measure(config: BenchConfig, record: BenchRecord, clock: Clock, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, or go on measuring.

    Args:
        config: what.
        record: what was measured before.
        clock: of the device.
        say: takes one line at a time on what begins.

    Returns:
        What the result holds besides its environment.

    Raises:
        UserError: there is no section `step`, the model cannot be loaded, or our losses are not the model's.
    """
    bench = config.step
    if bench is None:
        raise UserError("step: missing; add the section, as in configs/bench/cpu.yaml")
    peak = None if bench.modelled is None else _peak(bench.modelled)
    corpus = Corpus(config)
    say(f"loading {bench.model.source}")
    model = _load(config, bench, corpus, clock)
    counter, dtype = FlopCounter.of(model), model.dtype
    loops, missing = _open(bench, model, World(device=clock.device))
    rows = []
    with closing_all(loops.values()):
        say(f"checking the losses of {len(loops)} loops on {bench.lengths[0]:,} tokens")
        losses = record.once({"check": "losses"}, lambda: _check(bench, loops, model, corpus, clock))
        for tokens in bench.lengths:
            say(f"timing {tokens:,} tokens, {config.repeats} turns")
            rows += _time(config, bench, loops, counter, corpus, tokens, dtype, clock, record)
    return {
        "model": bench.model.source,
        "layers": model.config.num_hidden_layers,
        "weights": model.num_parameters(),
        "dtype": str(dtype).removeprefix("torch."),
        "losses": losses,
        "rows": rows,
        "not_run": missing,
        "modelled": [] if bench.modelled is None or peak is None else _model(config, bench.modelled, peak, corpus),
    }


def _load(config: BenchConfig, bench: StepBench, corpus: Corpus, clock: Clock) -> "PreTrainedModel":
    trusted, longest = bench.model.trust_remote_code, max(bench.lengths)
    source = resolve_source(bench.model.source, config.data.cache, trust_remote_code=trusted)
    own = open_config(source, trusted)
    check_config(own, longest)
    check_store(corpus.store, own.vocab_size)
    engine = resolve_engine(bench.model.attention, clock.device, getattr(torch, bench.model.dtype))
    rope = RopeConfig(type="ntk") if longest > own.max_position_embeddings else RopeConfig()
    plain = bench.model.model_copy(update={"fused": "none"})  # the loops that are compiled are so each by itself
    model = load_for_training(source, extend(own, rope, longest), plain, engine, clock.device)
    if bench.layers is not None:
        held = model.config.num_hidden_layers
        if bench.layers > held:
            raise UserError(f"step.layers {bench.layers}: the model has {held}; lower it")
        decoder: Any = model.base_model
        decoder.layers = nn.ModuleList(list(decoder.layers)[: bench.layers])
        model.config.num_hidden_layers = bench.layers
    return model


def _open(bench: StepBench, model: "PreTrainedModel", world: World) -> tuple[dict[str, TrainingLoop], dict[str, str]]:
    loops, missing = dict[str, TrainingLoop](), dict[str, str]()
    for name in bench.loops:
        try:
            loops[name] = LOOPS[name][0](model, bench, world)
        except UserError as error:
            missing[name] = one_line(error)
    return loops, missing


@contextmanager
def closing_all(loops: Iterable[TrainingLoop]) -> Iterator[None]:
    """Close every loop when the block ends."""
    with ExitStack() as stack:
        for loop in loops:
            stack.callback(loop.close)
        yield


def _row(corpus: Corpus, tokens: int, name: str) -> Row:
    return collate([corpus.row(tokens, LOOPS[name][1])])


def _check(
    bench: StepBench, loops: dict[str, TrainingLoop], model: "PreTrainedModel", corpus: Corpus, clock: Clock
) -> dict[str, Any]:
    """Judge each loop's losses, token by token, against those of the weights in float32.

    Raises:
        UserError: ours err more than the one rule allows.
    """
    tokens, found = bench.lengths[0], dict[str, Any]()
    references: dict[str, tuple[Tensor, Tensor]] = {}
    for name, loop in loops.items():
        row, variant = _row(corpus, tokens, name), LOOPS[name][1]
        each = loop.losses(row)
        if each is None:
            continue
        if variant not in references:
            references[variant] = _references(model, row, variant, clock.device)
        truth, reference = references[variant]
        ratio = error_ratio(each, truth, reference, model.dtype)
        if ratio > 1 and name.startswith("torchtrain"):
            raise UserError(f"step: the losses of {name} err {ratio:.3g} times what the one rule allows: a bug of ours")
        found[name] = {"tokens": tokens, "mean": each.double().mean().item(), "error_ratio": ratio}
    return found


def _references(model: "PreTrainedModel", row: Row, variant: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each token's loss by transformers itself, in float32 and in the model's dtype."""
    before, dtype = model.config._attn_implementation, model.dtype
    model.set_attn_implementation("sdpa")
    results = []
    try:
        for wanted in (dtype, torch.float32):
            # Buffers (RoPE's frequencies) are float32 in both.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(wanted)
            with torch.no_grad():
                logits = model(**inputs_of(row, device, variant != "full")).logits
            results.append(losses_of_logits(logits, row))
    finally:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.set_attn_implementation(before or "sdpa")
    reference, truth = results
    return truth, reference


def _time(
    config: BenchConfig,
    bench: StepBench,
    loops: dict[str, TrainingLoop],
    counter: FlopCounter,
    corpus: Corpus,
    tokens: int,
    dtype: torch.dtype,
    clock: Clock,
    record: BenchRecord,
) -> list[dict[str, Any]]:
    rows = {name: _row(corpus, tokens, name) for name in loops}
    seconds: dict[str, list[float]] = {name: [] for name in ("ceiling", *loops)}
    warm = set[str]()

    def once(name: str) -> float:
        if name == "ceiling":
            return _multiply(bench.ceiling, dtype, clock)
        if name not in warm and (clock.device.type == "cuda" or loops[name].compiled):  # what is made once
            loops[name].step(rows[name])
        warm.add(name)
        gc.collect()
        return clock.seconds(lambda: loops[name].step(rows[name]))[0]

    for turn in range(config.repeats):
        for name in seconds:
            key = {"tokens": tokens, "loop": name, "turn": turn}
            seconds[name].append(record.once(key, lambda name=name: once(name)))
    ceiling = spread_of([2 * bench.ceiling**3 / s for s in seconds.pop("ceiling")])
    results = []
    for name, own in seconds.items():
        row = rows[name]
        labelled = int((row["shift_labels"] >= 0).sum())
        pairs = corpus.live_pairs(tokens, LOOPS[name][1])
        flops = counter.flops(tokens, labelled, pairs)
        executed = counter.executed(tokens, labelled, pairs, recomputed=bench.model.recomputation)
        spread = spread_of(own)
        of = {}
        if YARDSTICK in seconds:
            turns = zip(own, seconds[YARDSTICK], strict=True)
            of = {"of_yardstick": spread_of([mine / its for mine, its in turns])}
        results.append(
            {
                "loop": name,
                "tokens": tokens,
                "seconds": spread,
                **of,
                "tokens_per_second": tokens / spread["median"],
                "days_per_billion": days_per_billion(spread["median"] / tokens),
                "flops": flops,
                "executed_flops": executed,
                "ceiling": ceiling,
                "mfu": flops / spread["median"] / ceiling["median"],
                "executed_share": executed / spread["median"] / ceiling["median"],
            }
        )
    return results


def _multiply(size: int, dtype: torch.dtype, clock: Clock) -> float:
    a, b = (torch.ones(size, size, dtype=dtype, device=clock.device) for _ in range(2))

    def multiply() -> Tensor:
        return a @ b

    multiply()  # what is chosen and packed once
    return clock.seconds(multiply)[0]


def days_per_billion(seconds_per_token: float) -> float:
    """Return days that a billion tokens take."""
    return seconds_per_token * _BILLION / _DAY


def _peak(modelled: ModelledStep) -> float:
    peak = peak_of(modelled.gpu)
    if peak is None:
        raise UserError(f"step.modelled.gpu {modelled.gpu!r}: no peak is known; give A100, H100 or H200")
    return peak


def _model(config: BenchConfig, modelled: ModelledStep, peak: float, corpus: Corpus) -> list[dict[str, Any]]:
    """Return days per billion tokens by the FLOP model, with the live pairs that the corpus has at each length."""
    source = resolve_source(modelled.model, config.data.cache, needs="config")
    own = open_config(source)
    counter = FlopCounter.of(Shapes(own).model(ModelConfig(source=modelled.model)))
    rows = []
    for tokens in modelled.lengths:
        for variant in ("full", "anchor"):
            flops = counter.flops(tokens, tokens, corpus.live_pairs(tokens, variant))
            seconds = flops / (modelled.mfu * peak * modelled.processes)
            rows.append(
                {
                    "tokens": tokens,
                    "variant": variant,
                    "flops": flops,
                    "days_per_billion": days_per_billion(seconds / tokens),
                }
            )
    return rows
