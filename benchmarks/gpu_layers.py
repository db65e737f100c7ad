"""What a GPU shows of layers of real size and of attention's engines, against transformers'.

    python -m benchmarks.gpu_layers layers --seconds 170 --out results/gpu
    python -m benchmarks.gpu_layers attention --seconds 90 --out results/gpu

`layers` takes steps of four layers of Llama-2-7B and Llama-3-8B at 65,536 tokens, and of SmolLM2 at 4,096 and 16,384.
Rows alternate, and each row that counts is one of lengths that were not seen before. `attention` times engines on rows
that an engine has seen (`again_ms`) and has not (`new_ms`). Models have random weights. A case that fails is noted with
its reason, and the rest goes on. `--tiny` tries the program on a CPU.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from anchorline.errors import one_line
from benchmarks.launches import Row, make_ours, make_plain
from torchtrain.attention import make_plan
from torchtrain.attention.engines.measure import CANDIDATES, Heads, check_engine, measure_engines
from torchtrain.config import ModelConfig, PackConfig
from torchtrain.data import stack_rows
from torchtrain.planning.flops import FlopCounter, peak_flops
from torchtrain.tests.shapes_only.step import draw_row

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
# Variant, engine (empty: transformers' loop), fused, recomputation.
LOOPS = (
    ("anchor", "flash", "none", True),
    ("anchor", "flash", "compile", True),
    ("full", "flash", "none", "keep_attention"),
    ("full", "sdpa", "none", "keep_attention"),
    ("full", "", "none", True),
)


def main() -> None:
    """Run a part, and write its results after each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["layers", "attention"])
    parser.add_argument("--seconds", type=float, default=170.0, help="begin no case after so many")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
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
            what |= {"loop": f"torchtrain {engine} {fused}" if engine else "transformers"}
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
    elif engine:
        engine = "sdpa"
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    frequencies = LlamaForCausalLM(LlamaConfig(**config.to_dict() | {"num_hidden_layers": 1, "vocab_size": 8}))
    model.model.rotary_emb = frequencies.model.rotary_emb.to(device)  # float32, which bfloat16 would round
    rows = [_row(tokens, variant, seed, config.vocab_size) for seed in range(4)]
    if engine:
        settings = ModelConfig(source="random", activation_checkpointing=recomputed, fused=fused)
        take = make_ours(model, engine, settings, device)
    else:
        take = make_plain(model, masters=False, device=device)
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


def _engines(device: torch.device, tiny: bool) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    shapes = [(32, 8, 128, 65_536), (32, 32, 128, 65_536), (9, 3, 64, 4096), (9, 3, 64, 16_384), (32, 8, 128, 131_072)]
    for queries, keys, width, tokens in shapes:
        heads, n = Heads(queries, keys, width, torch.bfloat16, device), 256 if tiny else tokens
        for kind in WEIGHTED:
            for engine in CANDIDATES:
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
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
