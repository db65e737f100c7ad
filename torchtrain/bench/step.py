"""`torchtrain bench step`: training steps of one row, by torchtrain and by a plain loop of transformers.

First each token's loss is compared with the loss of the same weights in a wider dtype. Then the loops take turns. A
product of large matrices takes a turn too, and MFU is a share of its FLOP/s.

Legend: T tokens of a row · V vocabulary.
"""

import copy
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anchorline.errors import UserError, one_line
from torchtrain.attention import make_plan, resolve_engine, visible_BTT
from torchtrain.attention.hf import implementation_name
from torchtrain.bench.config import BenchConfig, StepBench
from torchtrain.bench.measure import Clock, error_ratio, spread_of
from torchtrain.bench.rows import Corpus
from torchtrain.config import RopeConfig, TrainConfig
from torchtrain.data import check_store, stack_rows
from torchtrain.distributed.world import World
from torchtrain.marks import IGNORED
from torchtrain.modeling.compilation import check_compiler
from torchtrain.modeling.load import load_for_training, set_up_layers
from torchtrain.modeling.rope import extend
from torchtrain.modeling.source import check_config, open_config, resolve_source
from torchtrain.planning.flops import FlopCounter
from torchtrain.products import describe_products
from torchtrain.training.step import make_micro_batches, take_step
from torchtrain.training.strategy import Replicated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

YARDSTICK = "transformers, full"
_LEARNING_RATE = 1e-5
Row = dict[str, Tensor]  # the five arrays [1, T], on the host


class Ours:
    """A step of `torchtrain train`, with a copy of the model's weights."""

    def __init__(self, model: "PreTrainedModel", bench: StepBench, device: torch.device) -> None:
        self.model, self.world = copy.deepcopy(model), World(device=device)
        self.model.set_attn_implementation(implementation_name(bench.model.attention))
        if bench.model.fused == "compile":
            check_compiler(device)
            set_up_layers(self.model, bench.model)
        self.train = TrainConfig(sequences_per_step=1, learning_rate=_LEARNING_RATE, steps=2**20)
        self.strategy = Replicated(self.model, self.train, self.world)

    def step(self, row: Row) -> float:
        """Take a training step; return its mean loss."""
        batches = make_micro_batches([row], [], self.world)
        loss = take_step(self.strategy, batches, [], 0, self.train, lambda loss: None).losses.overall.value
        assert loss is not None
        return loss

    def losses(self, row: Row) -> Tensor:
        """Return the loss of each labelled token, without training."""
        (batch,) = (batch.to(self.world.device) for batch in make_micro_batches([row], [], self.world))
        with torch.no_grad():
            _, each_BT = self.strategy.losses(batch.part, batch.plan, self.train.loss_chunk)
        return each_BT.flatten()[batch.labels.index_n]


class Plain:
    """A step of a plain loop: transformers' model with SDPA and torch's AdamW, with a copy of the weights.

    `masked` separates documents by a dense mask [1, 1, T, T].
    """

    def __init__(self, model: "PreTrainedModel", bench: StepBench, device: torch.device, masked: bool) -> None:
        self.model, self.device, self.masked = copy.deepcopy(model), device, masked
        self.model.set_attn_implementation("sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)

    def step(self, row: Row) -> float:
        """Take a training step; return its mean loss."""
        self.optimizer.zero_grad()
        labels = F.pad(row["shift_labels"][:, :-1], (1, 0), value=IGNORED)  # transformers shifts them itself
        loss = self.model(**self._inputs(row), labels=labels.to(self.device)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def losses(self, row: Row) -> Tensor:
        """Return the loss of each labelled token, in float32 or wider, without training."""
        with torch.no_grad():
            logits_TV = self.model(**self._inputs(row)).logits[0]
        labels_T = row["shift_labels"][0].to(self.device)
        kept = labels_T != IGNORED
        logits_nV, labels_n = logits_TV[kept], labels_T[kept]
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
        return logits_nV.logsumexp(-1) - logits_nV.gather(-1, labels_n[:, None])[:, 0]

    def _inputs(self, row: Row) -> dict[str, Any]:
        mask = visible_BTT(row["document_ids"].to(self.device))[:, None] if self.masked else None
        given = {name: row[name].to(self.device) for name in ("input_ids", "position_ids")}
        return given | {"attention_mask": mask, "use_cache": False}


def open_loop(name: str, model: "PreTrainedModel", bench: StepBench, device: torch.device) -> Ours | Plain:
    """Make a loop by its name.

    Raises:
        UserError: this machine cannot compile it.
    """
    if name.startswith("torchtrain"):
        return Ours(model, bench, device)
    return Plain(model, bench, device, masked=name.endswith("mask"))


def row_of(corpus: Corpus, tokens: int, loop: str) -> Row:
    """Return a loop's row, in the loop's variant."""
    return stack_rows([corpus.row(tokens, "full" if loop.endswith("full") else "anchor")])


def measure_step(
    config: BenchConfig, clock: Clock, log: Callable[[str], None], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure steps. Arguments and result are those of `measure_attention`.

    Raises:
        UserError: there is no section `step`, the model cannot be loaded, or torchtrain's losses break the error rule.
    """
    bench = config.step
    if bench is None:
        raise UserError("step: missing; add the section, as in configs/bench/cpu.yaml")
    corpus = Corpus(config)
    log(f"loading {bench.model.source}")
    model = load_model(config, bench, corpus, clock)
    if products := describe_products(model.dtype, clock.device):
        log(f"products  {products}")
    counter, loops, missing = FlopCounter.of(model), dict[str, Ours | Plain](), dict[str, str]()
    for name in bench.loops:
        try:
            loops[name] = open_loop(name, model, bench, clock.device)
        except UserError as error:
            missing[name] = one_line(error)
    log(f"checking the losses of {len(loops)} loops on {bench.lengths[0]:,} tokens")
    rows = list[dict[str, Any]]()
    result = {
        "model": bench.model.source,
        "layers": model.config.num_hidden_layers,
        "weights": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "losses": _check_losses(loops, model, bench, corpus, clock),
        "rows": rows,
        "not_run": missing,
    }
    for tokens in bench.lengths:
        log(f"timing {tokens:,} tokens, {config.repeats} turns")
        rows += _time(config, bench, loops, counter, corpus, tokens, model.dtype, clock)
        save(result)
    return result


def load_model(config: BenchConfig, bench: StepBench, corpus: Corpus, clock: Clock) -> "PreTrainedModel":
    """Load the model as a run does, and keep only its first `layers` if the config says so.

    Raises:
        UserError: as `load_for_training`; or the model has fewer layers.
    """
    trusted, longest = bench.model.trust_remote_code, max(bench.lengths)
    source = resolve_source(bench.model.source, config.data.cache, trust_remote_code=trusted)
    own = open_config(source, trusted)
    check_config(own, longest)
    check_store(corpus.store, own.vocab_size)
    engine = resolve_engine(bench.model.attention, clock.device, getattr(torch, bench.model.dtype))
    rope = RopeConfig(type="ntk") if longest > own.max_position_embeddings else RopeConfig()
    plain = bench.model.model_copy(update={"fused": "none"})  # a compiled loop compiles its own copy
    model = load_for_training(source, extend(own, rope, longest), plain, engine, clock.device)
    if bench.layers is not None:
        held = model.config.num_hidden_layers
        if bench.layers > held:
            raise UserError(f"step.layers {bench.layers}: the model has {held}; lower it")
        decoder: Any = model.base_model
        decoder.layers = nn.ModuleList(list(decoder.layers)[: bench.layers])
        model.config.num_hidden_layers = bench.layers
    return model


def _check_losses(
    loops: dict[str, Ours | Plain], model: "PreTrainedModel", bench: StepBench, corpus: Corpus, clock: Clock
) -> dict[str, Any]:
    """Judge each loop's losses by token against transformers with the same weights in a wider dtype."""
    wider = torch.float64 if model.dtype == torch.float32 else torch.float32
    judged = dict[str, Any]()
    for name, loop in loops.items():
        row = row_of(corpus, bench.lengths[0], name)
        coarse = Plain(model, bench, clock.device, masked=not name.endswith("full"))
        reference = coarse.losses(row)
        for parameter in coarse.model.parameters():  # not buffers: RoPE's frequencies are float32 already
            parameter.data = parameter.data.to(wider)
        truth, own = coarse.losses(row), loop.losses(row)
        ratio = error_ratio(own, truth, reference, model.dtype)
        if ratio > 1 and name.startswith("torchtrain"):
            raise UserError(
                f"step: the error of the losses of {name} is {ratio:.3g} times what the error rule allows: a bug"
            )
        judged[name] = {"tokens": bench.lengths[0], "mean": own.double().mean().item(), "error_ratio": ratio}
    return judged


def _time(
    config: BenchConfig,
    bench: StepBench,
    loops: dict[str, Ours | Plain],
    counter: FlopCounter,
    corpus: Corpus,
    tokens: int,
    dtype: torch.dtype,
    clock: Clock,
) -> list[dict[str, Any]]:
    rows = {name: row_of(corpus, tokens, name) for name in loops}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    square, ceilings = torch.ones(bench.ceiling, bench.ceiling, dtype=dtype, device=clock.device), list[float]()
    for _ in range(config.repeats):
        ceilings.append(2 * bench.ceiling**3 / clock.seconds(lambda: square @ square))
        for name, loop in loops.items():
            gc.collect()
            seconds[name].append(clock.seconds(lambda loop=loop, name=name: loop.step(rows[name])))
    ceiling, results = spread_of(ceilings), []
    for name, own in seconds.items():
        labelled, pairs = int((rows[name]["shift_labels"] >= 0).sum()), make_plan(rows[name]["document_ids"]).live_pairs
        flops = counter.flops(tokens, labelled, pairs)
        row = {"loop": name, "tokens": tokens, "seconds": spread_of(own), "ceiling": ceiling}
        if YARDSTICK in seconds:
            turns = zip(own, seconds[YARDSTICK], strict=True)
            row["of_yardstick"] = spread_of([mine / its for mine, its in turns])
        median = row["seconds"]["median"]
        row |= {
            "tokens_per_second": tokens / median,
            "days_per_billion": median / tokens * 1e9 / 86_400,
            "flops": flops,
            "mfu": flops / median / ceiling["median"],
        }
        results.append(row)
    return results
