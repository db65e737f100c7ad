"""Time AnchorAttention against full attention, engine by engine, as ratios within one run.

    python benchmarks/attention.py --out results/attention.json

Both masks run on the same tensors, in turn (anchor, full, anchor, full, ...), forward and backward; the figure to read
is the median of the ratios pair by pair, beside the ratio of live pairs, which is what the work alone would give.
Engines that cannot run here are listed with the reason.
"""

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from anchorline.errors import UserError
from anchorline.files import save
from torchtrain.attention import ENGINES, attend, make_plan, resolve_engine
from torchtrain.attention.flash import leave_newer
from torchtrain.attention.plan import AttentionPlan


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    length: Annotated[list[int] | None, typer.Option(help="tokens a row; may be given several times")] = None,
    document: Annotated[int, typer.Option(help="tokens a document under `anchor`")] = 2048,
    heads: Annotated[int, typer.Option(help="query heads")] = 32,
    kv_heads: Annotated[int, typer.Option(help="key/value heads")] = 8,
    head_dim: Annotated[int, typer.Option(help="head dimension")] = 128,
    pairs: Annotated[int, typer.Option(help="timed pairs after one warm-up pair")] = 10,
) -> None:
    """Time every engine on every length and write what came out."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = [
        _compare(engine, T, document, (heads, kv_heads, head_dim), pairs, device)
        for T in length or [8192, 32768]
        for engine in ENGINES
    ]
    report = {"environment": _environment(device), "document_tokens": document, "results": results}
    out.parent.mkdir(parents=True, exist_ok=True)
    save(out, (json.dumps(report, indent=1) + "\n").encode())
    _print(results)


def _compare(
    engine: str, T: int, document: int, sizes: tuple[int, int, int], pairs: int, device: torch.device
) -> dict[str, Any]:
    H, K, D = sizes
    dtype = torch.bfloat16
    row = {"engine": engine, "tokens": T, "heads": [H, K, D], "dtype": "bfloat16"}
    leave_newer()  # of the engine before
    try:
        resolve_engine(engine, device, dtype)
    except UserError as error:
        return row | {"skipped": str(error)}
    if engine == "dense":
        return row | {"skipped": "dense materialises T x T; it is for tests"}
    index = torch.arange(T, device=device)
    anchor_ids = torch.where(index == 0, 0, 1 + (index - 1).clamp(min=0) // document)[None]
    plans = {"anchor": make_plan(anchor_ids), "full": make_plan(torch.ones_like(anchor_ids))}
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, T, n, D, device=device, dtype=dtype, generator=generator).requires_grad_() for n in (H, K, K)
    )
    steps = {name: _step(engine, q, k, v, plan) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(pairs + 1):
        for name, step in steps.items():
            elapsed = _time(step, device)
            if i:  # the first pair compiles and warms up
                seconds[name].append(elapsed)
    ratios = sorted(full / anchor for anchor, full in zip(seconds["anchor"], seconds["full"], strict=True))
    return row | {
        "full_over_anchor": {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]},
        "live_pairs_full_over_anchor": plans["full"].live_pairs / plans["anchor"].live_pairs,
        "median_ms": {name: 1e3 * statistics.median(values) for name, values in seconds.items()},
        "tflops": {
            # forward 4 D per live pair and head, backward two and a half times that
            name: 3.5 * 4 * D * H * plans[name].live_pairs / statistics.median(values) / 1e12
            for name, values in seconds.items()
        },
    }


def _step(engine: str, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Callable[[], None]:
    weight = torch.ones_like(q)

    def run() -> None:
        out, _ = attend(q, k, v, plan, engine=engine)
        torch.autograd.grad(out, (q, k, v), weight)

    return run


def _time(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _environment(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _print(results: list[dict[str, Any]]) -> None:
    table = Table("engine", "tokens", "anchor ms", "full ms", "full / anchor", "live pairs full / anchor")
    for row in results:
        if "skipped" in row:
            table.add_row(row["engine"], str(row["tokens"]), row["skipped"])
            continue
        times, ratio = row["median_ms"], row["full_over_anchor"]
        table.add_row(
            row["engine"],
            str(row["tokens"]),
            f"{times['anchor']:.1f}",
            f"{times['full']:.1f}",
            f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
            f"{row['live_pairs_full_over_anchor']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
