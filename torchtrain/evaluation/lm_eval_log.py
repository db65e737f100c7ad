"""Results on disk as `lm_eval --output_path DIR --log_samples` leaves them, by lm-eval's own writer.

    DIR/MODEL__CHECKPOINT/results_DATE.json         what a task scores, by lm-eval's names
    DIR/MODEL__CHECKPOINT/samples_TASK_DATE.jsonl   each answer with its prompt, target and score

A task of RULER at several lengths is one task with a metric named by length, as in lm-eval. A sample has a score at its
own length alone, null at others, where lm-eval writes -1 into its mean.
"""

import datetime
import hashlib
import importlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, disk_fault, quoted
from torchtrain.evaluation import longbench
from torchtrain.evaluation.measured import THIRTEEN, Measured
from torchtrain.evaluation.results import Answer, TaskResult, check_out
from torchtrain.evaluation.ruler import Sample, prompt_of
from torchtrain.evaluation.samples import find_samples
from torchtrain.evaluation.suite import CHOICES, HELLASWAG, TASKS, benchmark_of, group_of

_NO_FILTER = "none"  # what lm-eval calls the filter that changes nothing
_MOST_NAME = 200  # bytes of a folder's name; file systems hold 255


@dataclass(frozen=True)
class _Column:
    """A number that each sample of some results has: as lm-eval names it, and where it stands in our answers."""

    metric: str
    filter: str
    length: int
    value: Callable[[Answer], float | None]

    @property
    def key(self) -> str:
        return f"{self.metric},{self.filter}"


def write_log(
    run: Measured, out: Path, cache: str | Path, say: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Write a log of each checkpoint of a run: all files, or none.

    Args:
        run: what was measured; perplexity, which lm-eval does not have by position, is left out.
        out: folder of the log; logs that stand there stay.
        cache: the suite's, where samples are found again; without them prompts and targets are empty.
        say: is told of tasks whose samples are not there.

    Returns:
        The files.

    Raises:
        UserError: nothing was measured, lm-eval is missing or another, or the folder cannot be written.
    """
    if not run.found:
        raise UserError(f"{run.name}: has no result of a task, only what did not run, or perplexity; evaluate one")
    check_out(out)
    lm = _library()
    checkpoints = dict.fromkeys(of.checkpoint for results in run.found.values() for of in results)
    expected = 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".log-") as beside:
            for name in checkpoints:
                found = [of for results in run.found.values() for of in results if of.checkpoint == name]
                _write_one(lm, found, Path(beside), cache, say)
                expected += 1 + len({of.task for of in found})
            made = sorted(path for path in Path(beside).rglob("*") if path.is_file())
            assert len(made) == expected, "lm-eval's writer leaves a file of results, and one of samples a task"
            return _move_all(made, Path(beside), out)
    except OSError as error:
        raise UserError(f"--out: {disk_fault(error)}; choose a folder that can be written") from None


def _move_all(made: Sequence[Path], beside: Path, out: Path) -> list[Path]:
    """Move files to their places, or none: results last, by which readers find a log."""
    written: list[Path] = []
    folders: list[Path] = []
    try:
        for path in sorted(made, key=lambda path: (path.name.startswith("results_"), path)):
            place = out / path.relative_to(beside)
            if not place.parent.exists():
                place.parent.mkdir()
                folders.append(place.parent)
            os.replace(path, place)
            written.append(place)
    except BaseException:
        for place in written:
            place.unlink(missing_ok=True)
        for folder in folders:
            folder.rmdir()
        raise
    return written


def _folder_name(lm: Any, result: TaskResult) -> str:
    """Return the folder of a checkpoint's log: its model's name, as lm-eval writes it, and its own."""
    source = result.source
    if {".", ".."} & set(source.split("/")):
        source = os.path.abspath(source)
    name = f"{lm.sanitize(source)}__{lm.sanitize(result.checkpoint)}"
    if len(name.encode(errors="surrogateescape")) <= _MOST_NAME:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
    start = name.encode(errors="surrogateescape")[: _MOST_NAME - 18].decode(errors="ignore")
    return f"{start}__{digest}"


def _library() -> Any:
    """Return lm-eval's tracker, utilities and metrics as one namespace."""
    from types import SimpleNamespace

    try:
        names = ("loggers.evaluation_tracker", "utils", "api.metrics")
        tracker, utils, metrics = (importlib.import_module(f"lm_eval.{name}") for name in names)
        return SimpleNamespace(
            tracker=tracker.EvaluationTracker,
            hash_string=utils.hash_string,
            sanitize=utils.sanitize_model_name,
            plain=utils.handle_non_serializable,
            mean_stderr=metrics.mean_stderr,
            pooled_stderr=metrics.pooled_sample_stderr,
        )
    except ImportError as error:
        raise UserError(f"lm-eval's log needs the package {error.name}: pip install 'anchorline[eval]'") from None
    except AttributeError as error:
        raise UserError(f"lm-eval is not that of 0.4.13 ({error}); pip install lm_eval==0.4.13") from None


def _write_one(lm: Any, found: Sequence[TaskResult], out: Path, cache: str | Path, say: Callable[[str], None]) -> None:
    by_task: dict[str, list[TaskResult]] = {}
    for result in sorted(found, key=lambda of: of.length):
        by_task.setdefault(result.task, []).append(result)
    samples = {task: _samples(lm, results, cache, say) for task, results in by_task.items()}
    tracker, first = lm.tracker(output_path=str(out)), found[0]
    arguments = {**first.settings.engine, "pretrained": first.source, "dtype": first.settings.dtype}
    general = tracker.general_config_tracker
    general.log_experiment_args(first.settings.engine.get("backend", "hf"), arguments, None, None, None)
    general.model_name_sanitized = _folder_name(lm, first)
    general.start_time = time.perf_counter() - sum(of.seconds for of in found)
    log = logging.getLogger("lm_eval.loggers.evaluation_tracker")
    faults: list[str] = []  # its writer tells a failure to its log alone, the reason after it

    class _Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            faults.append(record.getMessage())

    keep, level, spreads = _Keep(), log.level, log.propagate
    log.addHandler(keep)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        tracker.save_results_aggregated(results=_aggregated(lm, by_task, arguments), samples=samples)
        for task, of_task in samples.items():
            tracker.save_results_samples(task_name=task, samples=of_task)
    finally:
        log.removeHandler(keep)
        log.setLevel(level)
        log.propagate = spreads
    if bad := next((i for i, line in enumerate(faults) if line.startswith("Could not")), None):
        raise UserError(f"--out: lm-eval's writer: {quoted(' '.join(faults[bad : bad + 2]))}; choose another folder")


def _columns(results: Sequence[TaskResult]) -> list[_Column]:
    """Return the metrics of a task by lm-eval's names. Of what is not RULER several lengths are told by the filter."""
    task, columns = results[0].task, []
    for result in results:
        if benchmark_of(task) == "ruler":
            columns.append(_Column(str(result.length), _NO_FILTER, result.length, lambda of: of.score))
            continue
        of_length = _NO_FILTER if len(results) == 1 else str(result.length)
        if benchmark_of(task) == "longbench":
            columns.append(_Column("score", of_length, result.length, lambda of: of.score))
        elif task == HELLASWAG:
            columns.append(_Column("acc", of_length, result.length, lambda of: of.acc))
            columns.append(_Column("acc_norm", of_length, result.length, lambda of: of.score))
        else:
            columns.append(_Column("acc", of_length, result.length, lambda of: of.score))
    return columns


def _aggregated(lm: Any, by_task: dict[str, list[TaskResult]], arguments: dict[str, Any]) -> dict[str, Any]:
    every = [of for results in by_task.values() for of in results]
    tables: dict[str, dict[str, Any]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for task, results in by_task.items():
        of_length = {result.length: result.answers for result in results}
        count = sum(map(len, of_length.values()))
        row: dict[str, Any] = {"name": task, "alias": task, "sample_len": count}
        for column in _columns(results):
            values = [v for answer in of_length[column.length] if (v := column.value(answer)) is not None]
            if values:  # `acc` of HellaSwag is younger than the first results
                error = lm.mean_stderr(values) if len(values) > 1 else "N/A"
                row |= {column.key: sum(values) / len(values)}
                sizes[task, column.key] = len(values)
                row |= {f"{column.metric}_stderr,{column.filter}": error}
        tables[task] = row
    version = {task: _version(results[0]) for task, results in by_task.items()}
    found: dict[str, Any] = {
        "results": tables,
        "group_subtasks": {task: [] for task in by_task},
        "configs": {task: _config(results) for task, results in by_task.items()},
        "versions": version,
        "n-shot": {task: _shots(results[0]) for task, results in by_task.items()},
        "higher_is_better": {task: {of.metric: True for of in _columns(results)} for task, results in by_task.items()},
        "n-samples": {task: dict.fromkeys(("original", "effective"), tables[task]["sample_len"]) for task in by_task},
        "config": {
            "model": every[0].settings.engine.get("backend", "hf"),
            "model_args": arguments,
            "batch_size": None,
            "device": every[0].device,
            "limit": max(len(of.answers) for of in every),
            "model_sha": every[0].settings.weights,
            "anchor": every[0].settings.anchor,
            "checkpoint": every[0].checkpoint,
            "step": every[0].step,
        },
        "date": min(datetime.datetime.fromisoformat(of.created).timestamp() for of in every),
        "lm_eval_version": every[0].versions.get("lm_eval", "unknown"),
        "transformers_version": every[0].versions.get("transformers", "unknown"),
        "max_length": max(of.length for of in every),
    }
    _add_groups(lm, found, sizes)
    return found


def _add_groups(lm: Any, found: dict[str, Any], samples: dict[tuple[str, str], int]) -> None:
    """Add the averages that lm-eval has of whole groups: RULER's 13 of one weight each, MMLU's of all questions.

    Args:
        lm: lm-eval's own.
        found: the log's content.
        samples: how many each number of a task is the mean of.
    """
    tables, wholes = found["results"], {}
    thirteen = [next((of for of in (task, f"{task}_2024_10") if of in tables), task) for task in THIRTEEN]
    subjects = list(group_of("mmlu")) if any(task.startswith("mmlu_") for task in tables) else []
    for group, tasks in (("ruler", thirteen), ("mmlu", subjects)):
        if not tasks or not set(tasks) <= set(tables):
            continue  # an average of a part is another number
        row: dict[str, Any] = {"name": group, "alias": group}
        for key in tables[tasks[0]]:
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not all(key in tables[task] for task in tasks):
                continue
            sizes = [samples[task, key] if group == "mmlu" else 1 for task in tasks]
            errors = [tables[task][f"{metric}_stderr,{chosen}"] for task in tasks]
            row[key] = sum(tables[task][key] * size for task, size in zip(tasks, sizes, strict=True)) / sum(sizes)
            known = "N/A" not in errors
            pooled = lm.pooled_stderr(errors, sizes) if group == "mmlu" and known else None
            alike = sum(of**2 for of in errors) ** 0.5 / len(errors) if known else "N/A"
            row[f"{metric}_stderr,{chosen}"] = alike if pooled is None else pooled
        wholes[group] = row
        # lm-eval's make_table shows a group above its tasks
        found["group_subtasks"] = {group: tasks, **found["group_subtasks"]}
        found["versions"][group] = found["versions"][tasks[0]]
        found["higher_is_better"][group] = found["higher_is_better"][tasks[0]]
    if wholes:
        found["results"] = {**wholes, **tables}
        found["groups"] = wholes


def _version(result: TaskResult) -> str:
    """Return what tells our samples from lm-eval's of the same name."""
    return f"anchorline {result.versions.get('anchorline', 'unknown')}"


def _shots(result: TaskResult) -> int:
    return int(result.identity.get("shots") or 0)


def _chooses(results: Iterable[TaskResult]) -> bool:
    """Whether each choice's likelihood is known: of results from before it was recorded, what was chosen is text."""
    return all(answer.log_likelihoods is not None for result in results for answer in result.answers)


def _config(results: Sequence[TaskResult]) -> dict[str, Any]:
    first, metrics = results[0], dict.fromkeys(column.metric for column in _columns(results))
    known = benchmark_of(first.task) in CHOICES and _chooses(results)
    return {
        "task": first.task,
        "dataset_path": "anchorline",
        "dataset_name": first.task,
        "test_split": "test",
        "output_type": "multiple_choice" if known else "generate_until",
        "num_fewshot": _shots(first),
        "repeats": 1,
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
        "metadata": {"version": _version(first), "max_seq_lengths": [of.length for of in results]}
        | {f"samples_{of.length}": of.identity for of in results},
    }


def _samples(
    lm: Any, results: Sequence[TaskResult], cache: str | Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a task's samples as lm-eval logs them.

    Those of its lengths alternate: each part of the file that a reader takes at a time has every metric, by which it
    finds their types.
    """
    columns, rows = _columns(results), []
    metrics = list(dict.fromkeys(column.metric for column in columns))
    known = benchmark_of(results[0].task) in CHOICES and _chooses(results)
    for result in results:
        found = find_samples(result.identity, result.settings.samples, cache)
        if found is None:
            say(f"{result.checkpoint} {result.task} {result.length:,}: its samples are not in the cache; no prompts")
        of_index = {sample["index"]: sample for sample in found.samples} if found is not None else {}
        own = [column for column in columns if column.length == result.length]
        for answer in result.answers:
            sample = of_index.get(answer.index)
            prompt, target, arguments = _asked(result.task, sample)
            doc = sample or {"index": answer.index, "samples_sha256": result.settings.samples}
            responses: list[Any] = [[answer.prediction]]
            if known and answer.log_likelihoods is not None:
                responses = [[[value]] for value in answer.log_likelihoods]
            row = {
                "doc": doc,
                "target": target,
                "arguments": arguments,
                "resps": responses,
                "filtered_resps": [of[0] for of in responses],
                "filter": own[0].filter,
                "metrics": [column.metric for column in own],
                "doc_hash": lm.hash_string(json.dumps(doc, indent=2, default=lm.plain, ensure_ascii=False)),
                "prompt_hash": lm.hash_string(prompt),
                "target_hash": lm.hash_string(str(target)),
                "max_length": result.length,
                **dict.fromkeys(metrics),
                **{column.metric: column.value(answer) for column in own},
            }
            rows.append(((answer.index, result.length), row))
    rows.sort(key=lambda of: of[0])
    return [{"doc_id": i, **row} for i, (_, row) in enumerate(rows)]


def _asked(task: str, sample: Sample | None) -> tuple[str, Any, list[tuple[Any, ...]]]:
    """Return prompt, target and what lm-eval calls a request's arguments."""
    if benchmark_of(task) in CHOICES:
        if sample is None:
            return "", "", [("", "")]
        return sample["prompt"], sample["answer"], [(sample["prompt"], choice) for choice in sample["choices"]]
    room = TASKS[task][0] if task in TASKS else longbench.room_of(task)
    settings = {"do_sample": False, "temperature": 0.0, "max_gen_toks": room, "until": []}
    if sample is None:
        return "", "", [("", settings)]
    prompt = prompt_of(sample) if task in TASKS else sample["prompt"]
    return prompt, sample["outputs"], [(prompt, settings)]
