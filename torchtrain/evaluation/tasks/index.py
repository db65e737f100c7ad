"""lm-eval's tasks by name, ours in front of its own, and the data that a suite gives them."""

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorline import environment
from anchorline.errors import UserError, did_you_mean, quoted, quoted_reason
from anchorline.files import expand
from torchtrain.evaluation.suite import IN_2024, TASKS, is_ruler, key_of
from torchtrain.evaluation.tasks.materials import CannotRunError, Materials, quiet_library
from torchtrain.evaluation.tasks.ruler import as_dataset, open_samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Job:
    """One task at one length of one model; `length` is the most tokens of a prompt and its answer."""

    task: str
    length: int
    identity: dict[str, Any]  # all that its samples depend on
    built: Any = None  # lm-eval's task; None: perplexity


@functools.cache
def _manager(part: str, include: str | None) -> Any:
    """Return lm-eval's task manager with our tasks: for one folder of lm-eval's, or for all of them (8 seconds)."""
    from lm_eval.tasks import TaskManager

    folder = Path(str(importlib.import_module("lm_eval.tasks").__file__)).parent / part
    paths: list[str | Path] = [folder] if part and folder.is_dir() else []
    paths += [Path(__file__).parent, *([] if include is None else [expand(include)])]
    with quiet_library():
        return TaskManager(include_path=paths, include_defaults=part == "all")


def _manager_of(name: str, include: str | None) -> Any:
    """Return a manager that knows a task, and all tasks of a group or tag."""
    for part in ("", name.partition("_")[0], "all"):
        index = (manager := _manager(part, include)).task_index
        if name in index and all(leaf in index for leaf in _members(manager, name)):
            return manager
    known = f"; known: {', '.join(TASKS)}, and lm-eval's tasks (lm_eval ls tasks)"
    hint = did_you_mean(name, _manager("all", include).all_tasks) or known
    raise UserError(f"tasks: {quoted(name)} is not known{hint}")


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
    """Return a group's or tag's tasks, or the task. include: folder of task files. Raises UserError: there is none."""
    return (name,) if is_ruler(name) else tuple(_members(_manager_of(name, include), name))


def build_job(task: str, length: int, materials: Materials, tokenizer: "PreTrainedTokenizerFast", folder: str) -> Job:
    """Return a task with its samples.

    length: tokens of a prompt and its answer, at most.
    folder: of the model, for tasks that make their own samples.
    Raises CannotRunError: its data are missing, or the length leaves no room.
    Raises UserError: its data are damaged.
    """
    suite, include = materials.suite, None
    overrides: dict[str, Any] = {"task": task}
    if is_ruler(task):
        samples, identity = open_samples(task, length, tokenizer, materials)
        overrides["custom_dataset"] = lambda **_: as_dataset(samples)
    else:
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
        include = suite.include_path
        entry = _manager_of(task, include).task_index[task]
        overrides["metadata"] = {**(entry.cfg or {}).get("metadata", {}), "pretrained": folder}
        if setting is not None:
            overrides |= _local_data(expand(suite.data[setting]), (entry.cfg or {}).get("dataset_kwargs") or {})
    from lm_eval.models.utils import normalize_gen_kwargs

    try:
        with quiet_library():  # a group of one, because lm-eval replaces settings in the tasks of a group alone
            group = _manager_of(task, include).load({"group": "one", "task": [overrides]})
    except (UserError, MemoryError):
        raise
    except Exception as error:  # datasets raises anything if a data set is not there
        hint = "" if overrides.keys() & {"dataset_path", "dataset_kwargs"} else f"; data.{task}=FOLDER names local data"
        raise CannotRunError(
            f"lm-eval cannot load it ({type(error).__name__}: {quoted_reason(error)}){hint}"
        ) from error
    built = group["tasks"][task]
    if built.OUTPUT_TYPE == "generate_until" and task not in IN_2024:
        room = normalize_gen_kwargs(dict(built.config.generation_kwargs or {})).get("max_gen_toks", 256)
        if room >= length:
            raise CannotRunError(f"its answers have up to {room:,} tokens, which {length:,} do not hold")
    return Job(task, length, identity, built)


def _local_data(folder: Path, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that make a task read a data set of the hub from a folder. `kwargs`: its `dataset_kwargs`."""
    given = kwargs.get("data_files")
    if not isinstance(given, dict) or not all(str(file).startswith("hf://datasets/") for file in given.values()):
        return {"dataset_path": str(folder)}
    # hf://datasets/OWNER/NAME/FILE: the task asks for files of the hub, whatever its dataset_path is.
    return {"dataset_kwargs": {**kwargs, "data_files": {k: str(folder / f.split("/", 5)[5]) for k, f in given.items()}}}
