"""Put results of `benchmarks.speed`, and of the command `torchtrain bench` before it, on a page of Markdown.
Each result has a section between two marks.

python -m benchmarks.bench_page --write docs/benchmarks.md benchmarks/results/attention-cpu.json ...
"""

import argparse
import json
from pathlib import Path
from typing import Any

from anchorline.files import save
from anchorline.marked import MarkedPlace


def write(page: Path, sources: list[Path]) -> None:
    """Write a section for each result, between its marks."""
    text = page.read_text(encoding="utf-8")
    for source in sources:
        result = json.loads(source.read_text(encoding="utf-8"))
        start, end = f"<!-- made by benchmarks/bench_page of {source.name} -->", f"<!-- end of {source.name} -->"
        text = MarkedPlace(start, end).put(text, _section(result, source))
    save(page, text.encode())


def _section(result: dict[str, Any], source: Path) -> str:
    if result["what"] == "launches":
        where = f"`{result['command']}`, torch {result['torch']} (`benchmarks/results/{source.name}`)."
    else:
        made = result["environment"]
        where = f"{made['date']}, {made['device']}, `{made['command']}` (`benchmarks/results/{source.name}`)."
    return f"{where}\n\n{_TABLES[result['what']](result)}\n"


def format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table as Markdown; the first column is aligned left, the others right."""
    lines = [head, ("---", *("---:" for _ in head[1:])), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)


def _name_of(row: dict[str, Any]) -> str:
    return row["name"] if row["engine"] is None else f"torchtrain {row['name']}"


def _attention(result: dict[str, Any]) -> str:
    """Return a table of time over that of full attention, with a column for each length and row."""
    rows = {(row["tokens"], row["row"], row["name"]): row for row in result["rows"] if "of_full" in row}
    columns = list(dict.fromkeys((tokens, which) for tokens, which, _ in rows))
    names = dict.fromkeys(
        name for _, _, name in rows if "causal" not in name and "intra" not in name and "dense," not in name
    )
    live = {name: [rows.get((*column, name)) for column in columns] for name in names}
    share = (
        "*live pairs over all pairs*",
        *(f"{rows[*column, 'sdpa, anchor']['live_ratio']:.2f}" for column in columns),
    )
    cells = [(_name_of(next(row for row in own if row)), *map(_share, own)) for own in live.values()]
    return format_table(("", *(f"{tokens:,} {which}" for tokens, which in columns)), [share, *cells])


def _share(row: dict[str, Any] | None) -> str:
    """Return the time over that of full attention; of a window with its own share of live pairs."""
    if row is None:
        return ""
    live = f" (live {row['live_ratio']:.2f})" if "window" in row["name"] else ""
    return f"{row['of_full']['median']:.2f}{live}"


def _step(result: dict[str, Any]) -> str:
    several = len({row["tokens"] for row in result["rows"]}) > 1
    rows = [
        (
            f"{row['tokens']:,}, {row['loop']}" if several else row["loop"],
            "{median:.3g} ({least:.3g} to {most:.3g})".format(**row["of_yardstick"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['mfu']:.0%}" if "mfu" in row else "",
            f"{result['losses'][row['loop']]['error_ratio']:.2f}" if row["loop"] in result.get("losses", ()) else "",
        )
        for row in result["rows"]
    ]
    head = ("", "time / transformers, full", "tokens/s", "MFU", "error of the losses")
    shown = [place for place in range(len(head)) if place < 3 or any(row[place] for row in rows)]
    return format_table(tuple(head[n] for n in shown), [tuple(row[n] for n in shown) for row in rows])


def _launches(result: dict[str, Any]) -> str:
    loops = [name for name, own in result.items() if isinstance(own, dict)]
    lengths = list(result["transformers"])
    rows = [(name.replace("_", ", "), *(_over(result, name, tokens) for tokens in lengths)) for name in loops]
    return format_table(("launches, over transformers', and GB", *(f"{int(tokens):,}" for tokens in lengths)), rows)


def _over(result: dict[str, Any], loop: str, tokens: str) -> str:
    own, its = result[loop][tokens], result["transformers"][tokens]
    return f"{own['launches']:,} ({own['launches'] / its['launches']:.2f}), {own['gigabytes']:.0f}"


_TABLES = {"attention": _attention, "step": _step, "launches": _launches}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True, metavar="PAGE")
    parser.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    write(arguments.write, arguments.results)
