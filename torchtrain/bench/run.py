"""What the verbs of `torchtrain bench` do: open the folder, measure, write the result, show it, compare it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from anchorline.errors import UserError, quoted
from anchorline.files import read_json, resolve_folder
from torchtrain.bench import attention, memory, step
from torchtrain.bench.baseline import compare_with
from torchtrain.bench.clock import open_clock
from torchtrain.bench.config import BenchConfig
from torchtrain.bench.figures import draw
from torchtrain.bench.record import open_record, tell_environment, write_result
from torchtrain.bench.tables import markdown_of, tables_of

What = Literal["attention", "step", "memory"]
# What must be alike for measurements to stand in one folder; and what only chooses among them, so that more may follow.
_ALIKE = ("data", "tokenizer", "device", "threads", "seed")
_CHOICES = {
    "lengths",
    "dtypes",
    "rows",
    "variants",
    "engines",
    "rivals",
    "dense_tokens",
    "loops",
    "modelled",
    "models",
    "explained",
}
VERBS = {"attention": attention.measure, "step": step.measure, "memory": memory.measure}


def run(what: What, config: BenchConfig, out: Path, check: Path | None, say: Callable[[str], None]) -> list[str]:
    """Measure, or go on measuring, and write FOLDER/WHAT.json, .md and .svg.

    Args:
        what: which measurement.
        config: its settings.
        out: the folder.
        check: an earlier result to compare with.
        say: takes one line at a time on what begins.

    Returns:
        What moved against the earlier result by more than both measured as noise, a line each.

    Raises:
        UserError: a setting, the folder or the earlier result cannot be used; nothing was measured.
    """
    folder = resolve_folder("--out", out)
    before = None if check is None else read_result(check, what)
    clock = open_clock(config.device, config.threads)
    settings = config.model_dump(mode="json", include={*_ALIKE, "repeats", what})
    environment = tell_environment(clock)
    own = settings[what] or {}
    kept = {name: settings[name] for name in _ALIKE} | {
        what: {name: value for name, value in own.items() if name not in _CHOICES},
        "device": environment["device"],
        "versions": environment["versions"],
    }
    with open_record(folder, what, kept) as record:
        found = VERBS[what](config, record, clock, say)
        result = {"what": what, "environment": environment, "settings": settings, **found}
        write_result(folder, what, result)
        for name, content in {f"{what}.md": markdown_of(result), f"{what}.svg": draw(result)}.items():
            if content is not None:
                (folder / name).write_text(content, encoding="utf-8")
    console = Console()
    for table in tables_of(result):
        console.print(table)
    return [] if before is None else compare_with(before, result)


def read_result(path: Path, what: str) -> dict[str, Any]:
    """Read what a verb left.

    Raises:
        UserError: it is not there, damaged, or of another verb.
    """
    result = read_json(path, f"--check {quoted(path)}")
    if result.get("what") != what or not isinstance(result.get("rows"), list):
        raise UserError(f"--check {quoted(path)}: is no result of `torchtrain bench {what}`; give a {what}.json of one")
    return result
