"""The progress of a run, from the files that it has written so far. It writes nothing and waits for nothing."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, disk_fault, one_line
from anchorline.files import read_json
from torchtrain.checkpoint.folder import CheckpointFolder
from torchtrain.run.folder import RunFolder
from torchtrain.run.lock import is_held
from torchtrain.training.events import read_metrics, step_status

_LAST = 20  # steps from whose time the time left is estimated
_LAST_LINES = 100  # which are read of a file of events, those of saves and exports among them
_MOST_BYTES = 1 << 26
_LONGEST = 8.6e13  # seconds that timedelta takes


def status_lines(folder: Path) -> Iterator[str]:
    """Yield lines on a run's progress, one for a damaged file, too. Raises UserError: there is no run, or no record."""
    try:
        yield from _lines(folder)
    except OSError as error:
        raise UserError(disk_fault(error)) from None


def _lines(folder: Path) -> Iterator[str]:
    run = RunFolder(folder)
    total = run.check_run().steps
    at_work = is_held(run.lock)
    finished = run.finished
    state = "at work" if at_work else "finished" if finished else "interrupted"
    yield f"run        {run.path}: {state}"

    events, timings = [], []
    for held, path in ((events, run.metrics), (timings, run.timing)):
        try:
            held += read_metrics(path, _LAST_LINES)
        except UserError as error:
            yield f"damaged    {error}"
    steps = [event for event in events if event["event"] == "step"]
    speeds = [e for e in timings if e["event"] == "step" and {"seconds", "tokens_per_second"} <= e.keys()]
    done = steps[-1]["step"] if steps else 0
    yield f"steps      {done:,} of {total:,}"
    if steps and speeds:
        yield f"last step  {one_line(step_status(speeds[-1] | steps[-1]))}"
        if done < total:
            left = (total - done) * statistics.median(event["seconds"] for event in speeds[-_LAST:])
            when = "" if at_work else ", once it is resumed"
            yield f"time left  about {timedelta(seconds=round(min(left, _LONGEST)))}{when}"
    yield from held_out_lines(events)

    checkpoints = CheckpointFolder(run.checkpoints)
    for step in checkpoints.steps():
        word = "" if checkpoints.looks_whole(step) else ", damaged"
        yield f"checkpoint step {step:,}{word}"
    for path in sorted(run.bad_steps.glob("step-*.json")):
        try:
            yield f"bad step   {int(read_json(path, most=_MOST_BYTES)['step']):,}: its rows are in {path}"
        except (UserError, LookupError, TypeError, ValueError, OverflowError) as error:
            yield f"bad step   damaged: {error if isinstance(error, UserError) else f'{path}: names no step'}"
    for path in run.exports_of_steps():
        yield f"model      {path}"
    if run.model.is_dir():
        yield f"model      {run.model}"
    if not at_work and not finished:
        yield f"resume     torchtrain resume {run.path}"


def held_out_lines(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each held-out loss among the events of `metrics.jsonl`."""
    for event in events:
        if event["event"] == "evaluation":
            loss = "none" if event["loss"] is None else f"{event['loss']:.4f}"
            yield f"held out   loss {loss} after step {event['step']:,}"
