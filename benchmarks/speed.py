"""Steps and engines of attention against transformers'.

    python -m benchmarks.speed layers --seconds 170 --out results/gpu
    python -m benchmarks.speed attention --seconds 90 --out results/gpu
    python -m benchmarks.speed pairs --turns 9 --out results/cpu

`layers` takes steps of four layers of Llama-2-7B and Llama-3-8B at 65,536 tokens, and of SmolLM2 at 4,096 and 16,384.
Rows alternate, and each row that counts is one of lengths that were not seen before. `attention` times engines on rows
that an engine has seen (`again_ms`) and has not (`new_ms`). Both are for a GPU; `--tiny` tries them on a CPU. `pairs`
takes steps of six layers of SmolLM2 at 1,024 tokens in turns and compares them turn by turn, on a CPU with one thread
and the thread's own time, so that other programs disturb it little. Plans and pinned copies are made before the time
that counts. Models have random weights. A case that fails is noted with its reason, and the rest goes on.
"""

import argparse
import copy
import datetime
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from anchorline.environment import git_state, processor, versions
from anchorline.errors import one_line
from benchmarks.launches import Row, make_ours, make_plain
from torchtrain.attention import make_plan, resolve_engine
from torchtrain.attention.engines.measure import Heads, check_engine, list_candidates, measure_engines
from torchtrain.config import ModelConfig, PackConfig
from torchtrain.data import stack_rows
from torchtrain.products import use_float32_products
from torchtrain.tests.shapes_only.step import draw_row
from torchtrain.training.flops import FlopCounter, peak_flops

WEIGHTED = {"short": 2600.0, "long": 11_000.0}  # E[n^2] / E[n] of documents, in tokens
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {"hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32, "vocab_size": 32_000},
    "Llama-3-8B": {
        **{"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "vocab_size": 128_256},
        "num_key_value_heads": 8,
    },
    "SmolLM2": {
        **{"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "vocab_size": 49_152},
        **{"num_key_value_heads": 3, "tie_word_embeddings": True},
    },
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN, MASTERS = "transformers", "transformers, float32 weights"
# Variant, engine or a loop of transformers, fused, recomputation.
LOOPS = (
    ("anchor", "flash", "none", True),
    ("anchor", "flash", "compile", True),
    ("full", "flash", "none", "keep_attention"),
    ("full", "sdpa", "none", "keep_attention"),
    ("full", PLAIN, "none", True),
    ("full", MASTERS, "none", True),
)
PAIRS = {  # the first is what the others are compared with
    **{"transformers, full": ("full", PLAIN), "transformers, full, float32 weights": ("full", MASTERS)},
    **{"torchtrain, full": ("full", "auto"), "torchtrain, anchor": ("anchor", "auto")},
}


def main() -> None:
    """Run a part, and write its results after each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["layers", "attention", "pairs"])
    parser.add_argument("--seconds", type=float, default=170.0, help="begin no case after so many")
    parser.add_argument("--turns", type=int, default=9, help="of pairs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.part == "pairs":
        _pairs(given.out, given.turns, given.tiny)
        return
    device = torch.device("cpu" if given.tiny else "cuda")
    given.out.mkdir(parents=True, exist_ok=True)
    started, found = time.monotonic(), []
    for what, measure in {"layers": _layers, "attention": _engines}[given.part](device, given.tiny):
        late = time.monotonic() - started > given.seconds
        try:
            result = {"not_run": "its time was over"} if late else measure()
        except Exception as error:  # out of memory, a kernel that is missing: told, and the rest goes on
            result = {"not_run": f"{type(error).__name__}: {one_line(error)}"}
        found.append(what | result)
        print(
            "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found[-1].items()), flush=True
        )
        (given.out / f"{given.part}.json").write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _row(tokens: int, variant: str, seed: int, words: int, kind: str = "short") -> Row:
    row = stack_rows([draw_row(PackConfig(sequence_length=tokens, variant=variant), WEIGHTED[kind], seed)])
    random = torch.Generator().manual_seed(seed)
    return row | {"input_ids": torch.randint(1, words, (1, tokens), generator=random)}


def _layers(device: torch.device, tiny: bool) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    sizes = [("Llama-2-7B", 4, 65_536), ("SmolLM2", 30, 4096), ("SmolLM2", 30, 16_384), ("Llama-3-8B", 4, 65_536)]
    for shape, layers, tokens in sizes:
        for variant, engine, fused, recomputed in LOOPS:
            what = {"shape": shape, "layers": layers, "tokens": tokens, "variant": variant}
            what |= {"loop": engine if engine in (PLAIN, MASTERS) else f"torchtrain {engine} {fused}"}
            own, n, depth = SHAPES[shape], tokens, layers
            if tiny:
                own, n, depth = own | TINY | {"vocab_size": 512}, 256, 2
            config = LlamaConfig(num_hidden_layers=depth, max_position_embeddings=n, **own)
            yield (
                what,
                lambda c=config, n=n, v=variant, e=engine, f=fused, r=recomputed: _step(device, c, n, v, e, f, r),
            )


def _step(
    device: torch.device, config: LlamaConfig, tokens: int, variant: str, engine: str, fused: str, recomputed: Any
) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rows = [_row(tokens, variant, seed, config.vocab_size) for seed in range(4)]
    model = _model(config, device)
    take = _loop(model, engine, device, fused, recomputed)
    first, *turns = (_seconds(device, lambda row=row: take(row)) for row in rows)
    median = sorted(turns)[1]
    pairs = make_plan(rows[1]["document_ids"]).live_pairs
    flops = FlopCounter.of(model).flops(tokens, int((rows[1]["shift_labels"] >= 0).sum()), pairs)
    found = {"first_s": first, "ms": 1e3 * median, "least_ms": 1e3 * min(turns), "tokens_s": tokens / median}
    found["live"] = pairs / (tokens * (tokens + 1) / 2)
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if peak := peak_flops(device, torch.bfloat16):
            found["mfu"] = flops / median / peak
    return found


def _model(config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    frequencies = LlamaForCausalLM(LlamaConfig(**config.to_dict() | {"num_hidden_layers": 1, "vocab_size": 8}))
    model.model.rotary_emb = frequencies.model.rotary_emb.to(device)  # float32, which bfloat16 would round
    return model


def _loop(
    model: LlamaForCausalLM, engine: str, device: torch.device, fused: Any = "none", recomputed: Any = False
) -> Callable[[Row], object]:
    if engine in (PLAIN, MASTERS):
        return make_plain(model, engine == MASTERS, device, bool(recomputed))
    use_float32_products(model)
    settings = ModelConfig(source="random", activation_checkpointing=recomputed, fused=fused)
    return make_ours(model, "sdpa" if device.type == "cpu" else engine, settings, device)


def _pairs(folder: Path, turns: int, tiny: bool) -> None:
    """Take turns; write the result, and the ratios of each turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    tokens, sizes = (128, SHAPES["SmolLM2"] | TINY) if tiny else (1024, SHAPES["SmolLM2"])
    config = LlamaConfig(num_hidden_layers=6, max_position_embeddings=tokens, **sizes)
    model, loops = _model(config, device), dict[str, Callable[[Row], object]]()
    for name, (_, engine) in PAIRS.items():
        engine = resolve_engine(engine, device, torch.bfloat16) if engine == "auto" else engine
        loops[name] = _loop(copy.deepcopy(model), engine, device)
    rows = {v: [_row(tokens, v, seed, config.vocab_size) for seed in range(2)] for v in ("full", "anchor")}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(-2, turns):  # two rows alternate, and each loop sees both before it counts
        order = list(loops)[turn % len(loops) :] + list(loops)[: turn % len(loops)]
        for name in order:
            gc.collect()
            taken = _seconds(device, lambda name=name, n=turn % 2: loops[name](rows[PAIRS[name][0]][n]))
            if turn >= 0:
                seconds[name].append(taken)
    first, found = next(iter(seconds.values())), []
    for name, own in seconds.items():
        ratios = [mine / its for mine, its in zip(own, first, strict=True)]
        spread = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        speed = tokens / statistics.median(own)
        found.append(
            {"loop": name, "tokens": tokens, "of_yardstick": spread, "tokens_per_second": speed, "seconds": own}
        )
        print(
            f"{name:36} {spread['median']:.3f} ({spread['least']:.3f} to {spread['most']:.3f}) {speed:9,.0f} tokens/s"
        )
    made = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
        "seconds": "wall time" if device.type == "cuda" else "CPU time of one thread",
        "command": shlex.join(["python", "-m", "benchmarks.speed", *sys.argv[1:]]),
        "commit": git_state(Path(__file__).parents[1])[0],
        "versions": versions(("torch", "transformers")),
    }
    folder.mkdir(parents=True, exist_ok=True)
    result = {"what": "step", "environment": made, "layers": 6, "turns": turns, "rows": found}
    (folder / "step.json").write_text(json.dumps(result, indent=1) + "\n")


def _engines(device: torch.device, tiny: bool) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    shapes = [(32, 8, 128, 65_536), (32, 32, 128, 65_536), (9, 3, 64, 4096), (9, 3, 64, 16_384), (32, 8, 128, 131_072)]
    for queries, keys, width, tokens in shapes:
        heads, n = Heads(queries, keys, width, torch.bfloat16, device), 256 if tiny else tokens
        for kind in WEIGHTED:
            for engine in list_candidates():
                what = {"heads": [queries, keys, width], "tokens": tokens, "documents": kind, "engine": engine}
                yield what, lambda h=heads, n=n, k=kind, e=engine: _attention(h, n, k, e)


def _attention(heads: Heads, tokens: int, kind: str, engine: str) -> dict[str, Any]:
    check_engine(engine, heads)
    one, other = (make_plan(_row(tokens, "anchor", seed, 9, kind)["document_ids"]) for seed in range(2))
    times = [measure_engines([engine], rows, heads)[engine] for rows in ([one, other], [other, other])]
    if isinstance(times[0], str) or isinstance(times[1], str):
        return {"not_run": times[0]}
    new, again = times[0], times[1]
    flops = 14 * heads.queries * heads.width * other.live_pairs
    return {"new_ms": 1e3 * new, "again_ms": 1e3 * again, "tflops": flops / again / 1e12}


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    clock = time.perf_counter if device.type == "cuda" or torch.get_num_threads() > 1 else time.thread_time
    started = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


if __name__ == "__main__":
    main()
