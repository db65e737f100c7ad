"""Summarise what `benchmarks/gpu.sh` left: python benchmarks/gpu_summary.py benchmarks/results/gpu"""

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from anchorline.environment import git_state, versions

LIBRARIES = ("torch", "transformers", "deepspeed", "flash-attn", "flash-attn-4", "jax", "numpy")


def main(folder: Path) -> None:
    """Print the summary of a folder."""
    for line in (*_machine(), *_tests(folder), *_measured(folder), *_runs(folder), *_missing(folder)):
        print(line)


def _machine() -> Iterator[str]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    commit, dirty = git_state(Path(__file__).parents[1])
    yield f"# {len(gpus)} x {gpus[0] if gpus else 'no GPU'}"
    yield ""
    yield f"Commit {commit}{', changed' if dirty else ''}; CUDA {torch.version.cuda};"
    yield ", ".join(f"{name} {version}" for name, version in versions(LIBRARIES).items())


def _tests(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.xml")):
        yield from ("", f"## {path.stem}", "", "| test | result | s | measured, or why |", "| --- | --- | ---: | --- |")
        for case in ElementTree.parse(path).iter("testcase"):
            if not case.get("name"):  # the test that Ctrl-C interrupted, whose name pytest leaves out
                yield f"| the next one | cut off | | its time was over; {path.stem}.txt names it |"
                continue
            kind, why = "passed", ""
            for child in case:
                if child.tag in ("failure", "error", "skipped"):
                    kind, why = child.tag, (child.get("message") or "").split("\n")[0]
            measured = [f"{item.get('name')} {item.get('value')}" for item in case.iter("property")]
            name, notes = case.get("name", ""), "; ".join([*measured, why] if why else measured)
            yield f"| {_cell(name)} | {kind} | {float(case.get('time', 0)):.1f} | {_cell(notes)} |"


def _measured(folder: Path) -> Iterator[str]:
    for what in ("layers", "attention"):
        path = folder / f"{what}.json"
        if not path.exists():
            continue
        rows = json.loads(path.read_text(encoding="utf-8"))
        names = list(dict.fromkeys(name for row in rows for name in row))
        yield from ("", f"## {what}", "", f"| {' | '.join(names)} |", "| --- " * len(names) + "|")
        for row in rows:
            cells = (row.get(name, "") for name in names)
            yield f"| {' | '.join(f'{x:.4g}' if isinstance(x, float) else _cell(str(x)) for x in cells)} |"


def _runs(folder: Path) -> Iterator[str]:
    """The last step of each whole run."""
    names = ("step", "seconds", "tokens_per_second", "mfu", "memory_gib")
    logs = sorted(folder.glob("run-*.log"))
    if logs:
        yield from ("", "## whole runs", "", f"| run | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|")
    for log in logs:
        path = log.with_suffix("") / "timing.jsonl"
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        steps = [event for event in events if event["event"] == "step"]
        cells = [f"{steps[-1].get(name, ''):.4g}" if name in steps[-1] else "" for name in names] if steps else []
        yield f"| {log.stem} | {' | '.join(cells) if cells else f'no step: see {log.name}' + ' |' * (len(names) - 1)} |"


def _missing(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.txt")):
        if not any(path.with_suffix(suffix).exists() for suffix in (".xml", ".json")):
            yield from ("", f"## {path.stem}", "", f"No results: cut off or broken; see the end of {path.name}.")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
