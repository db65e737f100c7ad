"""lm-eval's tasks by name, ours in front of its own, and the data that a suite gives them."""

import difflib
import functools
import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorline import environment
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import expand
from torchtrain.evaluation.suite import TASKS, is_ruler, key_of
from torchtrain.evaluation.tasks.materials import CannotRunError, Materials, local_data
from torchtrain.evaluation.tasks.ruler import as_dataset, open_samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """One task at one length of one model; `length` is the most tokens of a prompt and its answer."""

    task: str
    length: int
    identity: dict[str, Any]  # what the samples depend on
    built: Any = None  # lm-eval's task; None: perplexity


@contextmanager
def quiet_library() -> Iterator[None]:
    """Let lm-eval and datasets report nothing but errors."""
    logs = {log: log.level for log in map(logging.getLogger, ("lm_eval", "datasets"))}
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that lm-eval scores with
            yield
    finally:
        for log, level in logs.items():
            log.setLevel(level)


@functools.cache
def _manager(part: str, include: str | None) -> Any:
    """Return lm-eval's task manager with our tasks: for one folder of lm-eval's, or for all of them (8 seconds)."""
    from lm_eval.tasks import TaskManager

    folder = Path(str(importlib.import_module("lm_eval.tasks").__file__)).parent / part
    paths: list[str | Path] = [folder] if part and folder.is_dir() else []
    paths += [FOLDER, *([] if include is None else [expand(include)])]
    with quiet_library():
        return TaskManager(include_path=paths, include_defaults=part == "all")


def _manager_of(name: str, include: str | None) -> Any:
    for part in ("", name.partition("_")[0], "all"):
        index = (manager := _manager(part, include)).task_index
        if name in index and all(leaf in index for leaf in _members(manager, name)):
            return manager
    near = difflib.get_close_matches(name[:100], _manager("all", include).all_tasks, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(TASKS)}, and lm-eval's tasks (lm_eval ls tasks)"
    raise UserError(f"tasks: {quoted(name)} is not known; {hint}")


def _members(manager: Any, name: str) -> list[str]:
    entry = manager.task_index.get(name)
    if entry is None or entry.kind.name not in ("GROUP", "TAG"):
        return [name]
    below = sorted(entry.tags) if entry.kind.name == "TAG" else entry.cfg["task"]
    if not all(isinstance(of, str) for of in below):
        raise UserError(f"tasks: {quoted(name)} changes its tasks, which is not supported; name them one by one")
    return [leaf for of in below for leaf in _members(manager, of)]


@functools.cache
def leaves(name: str, include: str | None = None) -> tuple[str, ...]:
    """Return the tasks of a group or tag; of a task itself. `include` is a folder of task files.

    Raises:
        UserError: there is no such task.
    """
    return (name,) if is_ruler(name) else tuple(_members(_manager_of(name, include), name))


def build_job(task: str, length: int, materials: Materials, tokenizer: "PreTrainedTokenizerFast", folder: str) -> Job:
    """Return a task with its samples.

    Args:
        task: its name.
        length: tokens of a prompt and its answer, at most.
        materials: of RULER's tasks, and the suite.
        tokenizer: of the model.
        folder: of the model, which tasks that make their own samples ask for.

    Raises:
        CannotRunError: its data are missing, or the length leaves no room.
        UserError: its data are damaged.
    """
    suite = materials.suite
    if is_ruler(task):
        samples, identity = open_samples(task, length, tokenizer, materials)
        return Job(
            task, length, identity, _build({"task": task, "custom_dataset": lambda **_: as_dataset(samples)}, None)
        )
    setting, few = key_of(task, suite.data), key_of(task, suite.fewshot)
    identity = {
        "task": task,
        "length": length,
        "samples": suite.samples,
        "fewshot": None if few is None else suite.fewshot[few],
        "chat_template": suite.chat_template,
        "data": None if setting is None else suite.data[setting],
        "lm_eval": environment.version("lm_eval"),
    }
    entry = _manager_of(task, suite.include_path).task_index[task]
    overrides = {"task": task, "metadata": {**(entry.cfg or {}).get("metadata", {}), "pretrained": folder}}
    if setting is not None:
        overrides |= local_data(task, setting, expand(suite.data[setting]), entry.yaml_path.stem)
    return Job(task, length, identity, _build(overrides, suite.include_path))


def _build(overrides: dict[str, Any], include: str | None) -> Any:
    """Return lm-eval's task with parts of its configuration replaced."""
    task = overrides["task"]
    try:
        with quiet_library():  # a group of one, because a task by itself takes no replacements
            return _manager_of(task, include).load({"group": "one", "task": [overrides]})["tasks"][task]
    except (UserError, MemoryError):
        raise
    except Exception as error:  # for a data set that is not there, datasets raises anything
        raise CannotRunError(f"lm-eval cannot load it ({type(error).__name__}: {quoted_reason(error)})") from error
