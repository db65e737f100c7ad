"""Where a run stands, from what it has left so far; nothing is written and nothing is waited for."""

import json
import statistics
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torchtrain.checkpoint.lock import is_held
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.training.folder import RunFolder
from torchtrain.training.metrics import read_metrics
from torchtrain.training.report import step_status

_LAST = 20  # steps whose time tells how long the others will take


def status_lines(folder: Path) -> Iterator[str]:
    """Yield a line for each thing that is known of a run.

    Raises:
        UserError: the folder holds no run.
    """
    run = RunFolder(folder)
    record = run.check_run()
    total = record["config"]["train"]["steps"]
    at_work = is_held(run.record)
    state = "at work" if at_work else "finished" if run.finished else "interrupted"
    yield f"run        {run.path}: {state}"

    events = read_metrics(run.metrics) if run.metrics.is_file() else []
    timings = read_metrics(run.timing) if run.timing.is_file() else []
    steps = [event for event in events if event["event"] == "step"]
    speeds = [event for event in timings if event["event"] == "step"]
    done = steps[-1]["step"] if steps else 0
    yield f"steps      {done:,} of {total:,}"
    if steps and speeds:
        yield f"last step  {step_status(speeds[-1] | steps[-1])}"
        if done < total:
            left = (total - done) * statistics.median(event["seconds"] for event in speeds[-_LAST:])
            yield f"time left  about {timedelta(seconds=round(left))}{'' if at_work else ', once it is resumed'}"
    for event in events:
        if event["event"] == "evaluation":
            yield f"held out   loss {event['loss']:.4f} after step {event['step']:,}"

    checkpoints = Checkpoints(run.checkpoints)
    for step in checkpoints.steps():
        word = "" if checkpoints.looks_good(step) else ", damaged"
        yield f"checkpoint step {step:,}{word}"
    for path in sorted(run.bad_steps.glob("step-*.json")):
        yield f"bad step   {json.loads(path.read_text(encoding='utf-8'))['step']:,}: its rows are in {path}"
    for path in sorted(run.exports.glob("step-????????")):
        yield f"model      {path}"
    if run.model.is_dir():
        yield f"model      {run.model}"
    if not at_work and not run.finished:
        yield f"to go on   torchtrain resume {run.path}"
