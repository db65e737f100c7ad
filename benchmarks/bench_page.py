"""Put results of `torchtrain bench` on a page, each between marks of its own: every number is of the JSON.

python -m benchmarks.bench_page --write docs/benchmarks.md benchmarks/results/attention-cpu.json ...
"""

import argparse
import json
from pathlib import Path
from typing import Any

from anchorline.files import save
from anchorline.marked import MarkedPlace
from anchorline.page.colours import LIGHT
from benchmarks.data.page import HEAD
from torchtrain.bench.figures import draw
from torchtrain.bench.tables import markdown_of

ROOT = Path(__file__).resolve().parents[1]
ABOUT = {
    "attention": "Attention need only compute live pairs. Its time over that of full causal attention (torch's SDPA, "
    "in the same turn) cannot be less than its live pairs over all pairs, at the same efficiency; *over the law* is "
    "how many times that it takes, and 1 would be all that can be had. Rows are of real documents; those of *least* "
    "live pairs hold the shortest. *Error* is over what the one rule allows against float64, on a shorter row, before "
    "anything is timed. `flex, its own mask` makes its block mask each time, as FlexAttention's guide does; `mask "
    "kept` has it. On a CPU FlexAttention has a forward pass alone, and is compared with the forward pass alone.",
    "step": "Whole steps: forward, backward, clipping, AdamW. Losses are compared first. *MFU* is the model's own work "
    "over the product of large matrices measured in the same turns, *executed* what the device runs, with "
    "recomputation. torchtrain and FSDP update float32 weights, of which the model's bfloat16 ones are made; the "
    "others update those.",
    "memory": "Counted by shapes, as `torchtrain plan` does, nothing run: the CUDA context, NCCL and fragments come on "
    "top, and what a kernel needs for itself (FlashAttention-2's backward pass a float32 copy of the queries). What to "
    "switch on stands above the columns, each with all before it: `model.activation_checkpointing: true` under "
    "`distributed.zero_stage: 3` and `distributed.sequence_parallel`; `distributed.offload: optimizer`; "
    "`distributed.offload: all`; `model.layer_chunk: 8192`; `model.activation_checkpointing: offload`. A row holds at "
    "most 16,777,216 tokens, up to which float32 counts positions. Under LoRA (`model.lora`) frozen weights have no "
    "masters, moments or gradients.",
}


def write(page: Path, sources: list[Path]) -> None:
    """Write a section for each result; one that the page has already is replaced, where it stands."""
    text = page.read_text(encoding="utf-8") if page.exists() else HEAD
    for source in sources:
        result = json.loads(source.read_text(encoding="utf-8"))
        place = MarkedPlace(
            f"<!-- made by benchmarks/bench_page of {source.name} -->", f"<!-- end of {source.name} -->"
        )
        text = place.put_or_append(text, _section(result, source, page.parent))
    save(page, text.encode())


def _section(result: dict[str, Any], source: Path, folder: Path) -> str:
    parts = [f"## {_title(result)}", ABOUT[result["what"]]]
    if (drawn := draw(result, paper=LIGHT["paper"])) is not None:
        figure = folder / "figures" / f"bench-{source.stem}.svg"
        figure.parent.mkdir(exist_ok=True)
        save(figure, drawn.encode())
        parts.append(f"![{result['what']}: the medians of turns, their least and most](figures/{figure.name})")
    told = source.resolve()
    told = told.relative_to(ROOT) if told.is_relative_to(ROOT) else source.name
    return "\n\n".join([*parts, markdown_of(result).rstrip(), f"All of it is in `{told}`."]) + "\n"


def _title(result: dict[str, Any]) -> str:
    device = result["environment"]["device"]
    if result["what"] == "attention":
        return f"Attention in {' and '.join(dict.fromkeys(row['dtype'] for row in result['rows']))}, {device}"
    return f"Training steps, {device}" if result["what"] == "step" else "The longest context"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True, metavar="PAGE")
    parser.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    write(arguments.write, arguments.results)
