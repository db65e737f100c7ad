"""Every task at every length of every checkpoint, by lm-eval's runner; what is finished is not computed again."""

import datetime
import difflib
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anchorline import environment
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import expand
from torchtrain.config import PackConfig
from torchtrain.data.corpus import source_name
from torchtrain.data.dataset import anchor_ids
from torchtrain.evaluation.intervals import format_perplexity, mean_interval
from torchtrain.evaluation.perplexity import (
    bucket_means,
    buckets,
    check_logits,
    digest_of,
    document_losses,
    long_documents,
    strided_loss,
)
from torchtrain.evaluation.results import (
    Answer,
    Bucket,
    Found,
    Measurement,
    NotRun,
    PerplexityResult,
    Settings,
    TaskResult,
    Training,
    check_one_model,
    check_out,
    finished_result,
    holds_scores,
    read_result,
    result_path,
    save_result,
    weights_digest,
)
from torchtrain.evaluation.suite import (
    IN_2024,
    TASKS,
    PerplexityConfig,
    Suite,
    benchmark_of,
    is_ruler,
    room_of,
    setting_of,
)
from torchtrain.evaluation.tasks.materials import CannotRunError, Materials, local_data
from torchtrain.evaluation.tasks.ruler import open_samples
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.modeling.placement import check_can_spread, format_devices
from torchtrain.modeling.source import open_config, open_tokenizer, resolve_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "tasks"
_PACKAGES = ("anchorline", "torch", "transformers", "tokenizers", "lm_eval", "vllm")
_SECONDS_BETWEEN_LINES = 5.0
_METRICS = ("score", "acc_norm", "acc", "exact_match", "em", "f1")  # the one that counts is the first that a task has


@dataclass(frozen=True)
class Checkpoint:
    """A model to evaluate: the name of its results, its step (None: not known), its source, and how it was trained
    (None: not known).
    """

    name: str
    step: int | None
    source: str
    training: Training | None = None


@dataclass(frozen=True)
class EvaluatedModel:
    """A model that is measured. `load` gives the model of transformers; vLLM loads `folder` itself."""

    checkpoint: Checkpoint
    tokenizer: "PreTrainedTokenizerFast"
    settings: Settings
    load: Callable[[], "PreTrainedModel"]
    folder: str = ""


@dataclass(frozen=True)
class Job:
    """One task at one length of one model; `length` is the most tokens of a prompt and its answer."""

    task: str
    length: int
    identity: dict[str, Any]
    overrides: dict[str, Any]  # of the task's configuration in lm-eval


def evaluate(
    checkpoints: Sequence[Checkpoint],
    suite: Suite,
    lengths: Sequence[int],
    out: Path,
    *,
    anchor: bool = False,
    processes: int = 1,
    log: Path | None = None,
    say: Callable[[str], None],
) -> list[Found]:
    """Measure, and leave a file of each result below `out`.

    Args:
        checkpoints: what to evaluate.
        suite: tasks, samples and materials.
        lengths: tokens, prompt and answer together.
        out: folder of the results; finished ones are taken over.
        anchor: put the training's anchor (BOS, or EOS where there is none) before each prompt that does not begin so.
        processes: how many share the work, each with its own model, and its own GPU where there are some.
        log: folder for lm-eval's own logs of the same results; default: none.
        say: takes lines of progress.

    Raises:
        UserError: a checkpoint without tokenizer, a length it does not hold, materials or results that are damaged.
    """
    check_suite(suite, lengths)
    check_out(out)
    models, work = [], []
    for checkpoint in checkpoints:  # all checks before any weight
        models.append(_open(checkpoint, suite, lengths, anchor, say))
        work += [(len(models) - 1, job) for job in plan(models[-1], suite, lengths, out, say)]
    if suite.backend == "vllm" and anchor and models[0].settings.anchor:
        _check_vllm_anchor(models[0])
    if processes == 1:
        for i, model in enumerate(models):
            measure(model, [job for of, job in work if of == i], suite, out, log=log, say=say)
    else:
        _measure_in_processes(models, work, suite, out, log, processes, say)
    return [
        read_result(path)
        for model in models
        for task, length in _all_of(suite, lengths)
        if (path := result_path(out, model.checkpoint.name, task, length)).is_file()
    ]


def check_suite(suite: Suite, lengths: Sequence[int]) -> None:
    """Check what needs no model.

    Raises:
        UserError: an unknown task, a stride that does not fit, perplexity by vLLM, or a package that is missing.
    """
    for package in ("lm_eval", *(("vllm",) if suite.backend == "vllm" else ())):
        if importlib.util.find_spec(package) is None:
            extra = "'anchorline[eval]'" if package == "lm_eval" else "vllm, or set backend: torch"
            raise UserError(f"the package {package} is not installed: pip install {extra}")
    if suite.device_map is not None:
        check_can_spread(suite.device_map)
    names = [name for name, _ in _all_of(suite, lengths)]
    for old, new in IN_2024.items():
        if {old, new} <= {*names}:
            raise UserError(f"tasks: {new} and {old} are one task at two times; keep one")
    if suite.perplexity is None:
        return
    stride = suite.perplexity.stride
    if stride is not None and stride >= min(lengths) // 2:
        raise UserError(f"perplexity.stride {stride}: windows are half of a length; give less than half of the least")
    if suite.backend == "vllm":
        raise UserError("perplexity: backend vllm does not give it; remove it (perplexity=null), or set backend: torch")


def _all_of(suite: Suite, lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Return every task with every length it is measured at: tasks of short prompts at the greatest alone."""
    names = [leaf for name in suite.tasks for leaf in leaves(name)]
    found = [
        (task, length)
        for length in lengths
        for task in dict.fromkeys(names)
        if benchmark_of(task) in ("ruler", "longbench") or length == max(lengths)
    ]
    return found + [("perplexity", length) for length in lengths if suite.perplexity is not None]


@functools.cache
def _index(part: str) -> Any:
    """Return lm-eval's task manager with our tasks in front: of a folder of lm-eval's alone, or of all (slow)."""
    from lm_eval.tasks import TaskManager

    with quiet_library():
        if part == "all":
            return TaskManager(include_path=str(FOLDER))
        library = Path(str(importlib.import_module("lm_eval.tasks").__file__)).parent
        paths = [str(library / part)] if part and (library / part).is_dir() else []
        return TaskManager(include_path=[*paths, str(FOLDER)], include_defaults=False)


def _manager_of(name: str) -> Any:
    for part in ("", name.partition("_")[0], "all"):
        index = (manager := _index(part)).task_index
        if name in index and all(leaf in index for leaf in _members(manager, name)):
            return manager
    near = difflib.get_close_matches(name[:100], _index("all").all_tasks, n=1, cutoff=0.6)
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
def leaves(name: str) -> tuple[str, ...]:
    """Return the tasks that a name stands for: of lm-eval's groups and tags all of theirs, else itself.

    Raises:
        UserError: there is no such task.
    """
    return (name,) if is_ruler(name) else tuple(_members(_manager_of(name), name))


@contextmanager
def quiet_library() -> Iterator[None]:
    """Let lm-eval and datasets print nothing but errors, and draw no bars."""
    import lm_eval.api.model
    import lm_eval.api.task
    from datasets.utils import logging as datasets_logging

    logs = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels, bars = [log.level for log in logs], datasets_logging.is_progress_bar_enabled()
    modules = [lm_eval.api.model, lm_eval.api.task]
    drawn = [module.tqdm for module in modules]
    for log in logs:
        log.setLevel(logging.ERROR)
    datasets_logging.disable_progress_bar()
    for module in modules:
        module.tqdm = lambda items, **_: items
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that lm-eval scores with
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        if bars:
            datasets_logging.enable_progress_bar()
        for module, bar in zip(modules, drawn, strict=True):
            module.tqdm = bar


def plan(
    model: EvaluatedModel,
    suite: Suite,
    lengths: Sequence[int],
    out: Path | None,
    say: Callable[[str], None],
    replace_old: bool = False,
) -> list[Job]:
    """Return what is to be measured of a model. What cannot run, and what is finished, is said; samples are made.

    Args:
        model, suite, lengths, say: as for `evaluate`.
        out: folder of the results; None: nothing is read or written there.
        replace_old: measure again what is of other weights or settings, which is refused otherwise.

    Raises:
        UserError: what cannot be measured, and not for want of a material or of room.
    """
    name, jobs, materials = model.checkpoint.name, [], Materials(suite)
    if out is not None and not replace_old and any(task != "perplexity" for task, _ in _all_of(suite, lengths)):
        check_one_model(out, name, model.settings)
    for task, length in _all_of(suite, lengths):
        try:
            job = _job(task, length, suite, model, materials)
        except CannotRunError as error:
            say(f"{name} {task} {length:,}: not run: {error}")
            if out is not None and not holds_scores(path := result_path(out, name, task, length)):
                save_result(out, NotRun(task=task, length=length, checkpoint=name, not_run=str(error)))
            continue
        found = None
        if out is not None:
            path = result_path(out, name, task, length)
            try:
                found = finished_result(path, _settings_of(task, model), job.identity)
            except UserError:
                if not replace_old:
                    raise
        if found is None:
            jobs.append(job)
        else:
            say(f"{name} {task} {length:,}: finished before, {_format_result(found)}")
    return jobs


def _settings_of(task: str, model: EvaluatedModel) -> Settings:
    return model.settings.model_copy(update={"anchor": [], "engine": {}}) if task == "perplexity" else model.settings


def _job(task: str, length: int, suite: Suite, model: EvaluatedModel, materials: Materials) -> Job:
    tokenizer = model.tokenizer
    if task == "perplexity":
        assert suite.perplexity is not None
        documents = long_documents(suite.perplexity, tokenizer, length)
        digest = digest_of(documents, suite.perplexity.stride)
        return Job(
            task, length, {"documents": digest, **suite.perplexity.model_dump(mode="json", exclude_defaults=True)}, {}
        )
    if is_ruler(task):
        _, identity = open_samples(task, length, tokenizer, materials)
        metadata = {"ruler": task, "length": length, "suite": suite, "tokenizer": tokenizer}
        return Job(task, length, identity, {"metadata": {"version": 1.0} | metadata})
    entry = _manager_of(task).task_index[task]
    setting = next((of for of in suite.data if task == of or task.startswith(f"{of}_")), None)
    identity = {
        "task": task,
        "length": length,
        "samples": suite.samples,
        "fewshot": setting_of(task, suite.fewshot),
        "chat_template": suite.chat_template,
        "data": suite.data.get(setting or "", None),
        "lm_eval": environment.version("lm_eval"),
    }
    overrides: dict[str, Any] = {"metadata": {**(entry.cfg or {}).get("metadata", {}), "pretrained": model.folder}}
    if setting is not None:
        folder = expand(suite.data[setting])
        load = local_data(task, setting, folder, entry.yaml_path.stem)
        overrides |= {"dataset_path": str(folder)} if load is None else {"custom_dataset": load, "dataset_path": ""}
        if load is not None:
            overrides |= {"dataset_name": None, "metadata": {"version": 1.0}}
            if setting == "hellaswag":
                overrides["training_split"] = None
    _load_task(Job(task, length, identity, overrides))  # data that are missing are told before anything runs
    return Job(task, length, identity, overrides)


def _load_task(job: Job) -> Any:
    """Return lm-eval's task.

    Raises:
        CannotRunError: its data cannot be had.
    """
    manager = _manager_of(job.task)
    try:
        with quiet_library():
            return manager._factory.build(
                manager.task_index[job.task], overrides=dict(job.overrides), registry=manager.task_index
            )
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of a data set that is not there, datasets raises anything
        raise CannotRunError(f"lm-eval cannot load it ({type(error).__name__}: {quoted_reason(error)})") from error


def measure(
    model: EvaluatedModel,
    jobs: Sequence[Job],
    suite: Suite,
    out: Path,
    *,
    log: Path | None = None,
    say: Callable[[str], None],
    pulse: Callable[[], None] = lambda: None,
) -> None:
    """Measure jobs of one model, and write a file of each result.

    Args:
        model, jobs, suite, out, log, say: as for `evaluate`.
        pulse: called between two batches of prompts, and between two documents.
    """
    if not jobs:
        return
    loaded: PreTrainedModel | None = None
    if suite.backend == "torch":
        loaded = model.load()
        from torchtrain.evaluation.model import SharedPrefixLM

        with quiet_library():
            lm: Any = SharedPrefixLM(  # pyright: ignore[reportAbstractUsage]
                loaded, model.tokenizer, suite.batch_tokens, jobs[0].length, model.settings.anchor
            )
    else:
        lm = _vllm(model, suite, max(job.length for job in jobs))
    for job in jobs:
        pulse()
        started = time.perf_counter()
        progress = _Progress(f"{model.checkpoint.name} {job.task} {job.length:,}", say, pulse)
        facts = {
            "task": job.task,
            "length": job.length,
            "checkpoint": model.checkpoint.name,
            "step": model.checkpoint.step,
            "source": model.checkpoint.source,
            "settings": _settings_of(job.task, model),
            "identity": job.identity,
            "device": "vllm" if loaded is None else format_devices(loaded),
            "versions": environment.versions(_PACKAGES),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        if job.task == "perplexity":
            assert loaded is not None
            assert suite.perplexity is not None
            result: Measurement = _perplexity(loaded, model, suite.perplexity, facts, pulse)
        else:
            lm.on_batch = progress.note
            result = _run(lm, model, job, suite, facts, log)
        result = result.model_copy(update={"seconds": round(time.perf_counter() - started, 3)})
        save_result(out, result)
        say(f"{model.checkpoint.name} {job.task} {job.length:,}: {_format_result(result)}, {result.seconds:.1f} s")


def _run(lm: Any, model: EvaluatedModel, job: Job, suite: Suite, facts: dict[str, Any], log: Path | None) -> TaskResult:
    """Run one task by lm-eval."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    run: Any = simple_evaluate
    task, own = _load_task(job), suite.backend == "torch"
    if own:
        # fwe_2024_10 leaves no room for its answer.
        lm.set_length(
            job.length + (room_of(job.task) if job.task in IN_2024 else 0), benchmark_of(job.task) == "longbench"
        )
    tracker = None if log is None else EvaluationTracker(output_path=str(log))
    with quiet_library():
        found = run(
            model=lm,
            tasks=[task],
            task_manager=_manager_of(job.task),
            limit=suite.samples,
            num_fewshot=setting_of(job.task, suite.fewshot),
            use_cache=str(_answers_cache(model, job, suite)),
            apply_chat_template=suite.chat_template,
            random_seed=suite.seed,
            numpy_random_seed=suite.seed,
            torch_random_seed=suite.seed,
            bootstrap_iters=0,
            evaluation_tracker=tracker,
        )
        lm.cache_hook.dbdict.close()  # lm-eval leaves a thread open
        if tracker is not None:
            tracker.general_config_tracker.model_name_sanitized = f"{model.checkpoint.name}-{job.length}"
            for of in (found, *found["samples"].values()):  # what is ours in it is not lm-eval's to write
                _drop_objects(of)
            samples = found.pop("samples")
            tracker.save_results_aggregated(results=found, samples=samples)
            for name, each in samples.items():
                tracker.save_results_samples(task_name=name, samples=each)
            found["samples"] = samples
    samples = found["samples"][job.task]
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    samples = [sample for sample in samples if sample["filter"] == filters[0]]
    values = {
        name.partition(",")[0]: float(value)
        for name, value in found["results"][job.task].items()
        if isinstance(value, int | float) and name.endswith(f",{filters[0]}") and "_stderr" not in name
    }
    single = [name for name in values if all(isinstance(of.get(name), int | float) for of in samples)]
    metric = next((name for name in _METRICS if name in single), next(iter(single or values)))
    digest = hashlib.sha256(
        "".join(
            f"{of['prompt_hash']}{of['target_hash']}" for of in sorted(samples, key=lambda of: of["doc_id"])
        ).encode()
    )
    return TaskResult(
        **facts,
        seconds=0.0,
        samples=digest.hexdigest(),
        metric=metric,
        values=values,
        cut_prompts=lm.cut_prompts if own else 0,
        prompt_tokens=lm.prompt_tokens if own else 0,
        computed_tokens=lm.computed_tokens if own else 0,
        training=model.checkpoint.training,
        answers=[_answer(of, metric) for of in samples] if metric in single else [],
    )


def _answer(sample: dict[str, Any], metric: str) -> Answer:
    said = sample["filtered_resps"]
    if len(said) == 1:
        text = said[0] if isinstance(said[0], str) else json.dumps(said[0])
    else:  # likelihoods of choices
        text = str(max(range(len(said)), key=lambda i: said[i][0] if isinstance(said[i], list | tuple) else 0.0))
    return Answer(index=int(sample["doc_id"]), prediction=text, score=float(sample[metric]))


def _drop_objects(tree: Any) -> None:
    """Put text in the place of what JSON does not hold: a suite, a tokenizer."""
    for name, value in list(tree.items()) if isinstance(tree, dict) else ():
        if isinstance(value, Suite):
            tree[name] = value.model_dump(mode="json", exclude_defaults=True)
        elif name == "tokenizer":
            tree[name] = str(getattr(value, "name_or_path", value))
        elif isinstance(value, dict):
            _drop_objects(value)


def _answers_cache(model: EvaluatedModel, job: Job, suite: Suite) -> Path:
    """Return where lm-eval keeps the answers of one task, so that a task that was stopped goes on within."""
    facts = [model.settings.model_dump(), job.identity, environment.versions(_PACKAGES)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return expand(suite.cache) / "answers" / f"{job.task}-{job.length}-{digest}"


def _vllm(model: EvaluatedModel, suite: Suite, length: int) -> Any:
    from lm_eval.api.registry import get_model

    arguments = {
        "pretrained": model.folder,
        "dtype": model.settings.dtype,
        "max_model_len": length,
        "seed": suite.seed,
        "enable_prefix_caching": True,
        **suite.vllm,
    }
    try:
        return get_model("vllm")(**arguments)
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"backend vllm: {quoted_reason(error)}; mend vllm in the suite") from None


def _check_vllm_anchor(model: EvaluatedModel) -> None:
    if model.tokenizer("a").input_ids[:1] != model.settings.anchor:
        raise UserError("--anchor: with backend vllm the tokenizer itself must put it there; set backend: torch")


def _perplexity(
    loaded: "PreTrainedModel",
    model: EvaluatedModel,
    config: PerplexityConfig,
    facts: dict[str, Any],
    pulse: Callable[[], None],
) -> PerplexityResult:
    length = facts["length"]
    documents = long_documents(config, model.tokenizer, length)
    check_logits(loaded)
    losses, strided = [], []
    for ids in documents:
        losses.append(list(bucket_means(document_losses(loaded, ids), length)))
        if config.stride is not None:
            strided.append(strided_loss(loaded, ids, length // 2, config.stride))
        pulse()
    edges = buckets(length)
    return PerplexityResult(
        **facts,
        seconds=0.0,
        samples=digest_of(documents, config.stride),
        text=source_name(config.source) + may_know(model.checkpoint.training, config),
        buckets=[Bucket(first=a, end=b, losses=[of[i] for of in losses]) for i, (a, b) in enumerate(edges)],
        strided=sum(of[0] for of in strided) / sum(of[1] for of in strided) if strided else None,
    )


def may_know(training: Training | None, config: PerplexityConfig) -> str:
    """Return, in words, whether a run was trained on the source whose first documents are measured."""
    wanted = config.source.model_dump(mode="json", exclude_defaults=True)
    sources = training.data.get("sources", []) if training is not None else []
    return ", which the run was trained on" if any(wanted.items() <= dict(of).items() for of in sources) else ""


def _open(
    checkpoint: Checkpoint, suite: Suite, lengths: Sequence[int], anchor: bool, say: Callable[[str], None]
) -> EvaluatedModel:
    folder = resolve_source(checkpoint.source, suite.cache, say)
    config, tokenizer = open_config(folder), open_tokenizer(folder)
    check_tokenizer(tokenizer, checkpoint.source, suite)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and max(lengths) > most:
        raise UserError(
            f"--lengths {max(lengths)}: {quoted(checkpoint.source)} holds {most:,} positions; give no more, or extend "
            "the model first"
        )
    dtype = suite.dtype or ("float32" if config.dtype is None else str(config.dtype).removeprefix("torch."))
    settings = Settings(
        weights=weights_digest(Path(folder)),
        anchor=anchor_ids(tokenizer, PackConfig(sequence_length=2)) if anchor else [],
        dtype=dtype,
        engine={"backend": "vllm", **suite.vllm} if suite.backend == "vllm" else {},
    )
    return EvaluatedModel(checkpoint, tokenizer, settings, functools.partial(_load, folder, suite, dtype), folder)


def _load(folder: str, suite: Suite, dtype: str) -> "PreTrainedModel":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load_for_evaluation(folder, dtype=getattr(torch, dtype), device=device, device_map=suite.device_map)


def check_tokenizer(tokenizer: "PreTrainedTokenizerFast", source: str, suite: Suite) -> None:
    """Refuse a tokenizer by which a model would be measured wrong.

    Raises:
        UserError: it has no words, has no chat template where one is asked for, or puts a special token behind a
            prompt, so that the model would answer behind its end.
    """
    plain = tokenizer("The grass is green.", add_special_tokens=False).input_ids
    if not plain:  # what transformers makes of no file
        raise UserError(f"{quoted(source)}: holds no tokenizer; put the model's own beside its weights")
    whole = list(tokenizer("The grass is green.").input_ids)
    if whole[-1] != plain[-1]:
        last = tokenizer.convert_ids_to_tokens(whole[-1])
        raise UserError(
            f"{quoted(source)}: its tokenizer appends {last} to prompts; set add_eos_token to false in its "
            "tokenizer_config.json, or take it out of post_processor in tokenizer.json"
        )
    if suite.chat_template and not tokenizer.chat_template:
        raise UserError(f"--apply-chat-template: the tokenizer of {quoted(source)} has no chat template; leave it out")


def _measure_in_processes(
    models: Sequence[EvaluatedModel],
    work: Sequence[tuple[int, Job]],
    suite: Suite,
    out: Path,
    log: Path | None,
    processes: int,
    say: Callable[[str], None],
) -> None:
    """Share jobs among processes: each takes the next one when it is free, the longest first."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ordered = sorted(work, key=lambda of: (of[0], -of[1].length))
    left: Any = context.Queue()
    for place in [*range(len(ordered)), *[None] * processes]:
        left.put(place)
    given = [(model.checkpoint, model.settings, model.folder) for model in models]
    tasks = [(i, job.task, job.length) for i, job in ordered]
    children = [
        context.Process(target=_work, args=(given, tasks, suite, out, log, left, n, processes), daemon=True)
        for n in range(min(processes, len(ordered)))
    ]
    say(f"{len(ordered)} tasks in {len(children)} processes")
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise UserError("--processes: one of them failed, as it says above; what was finished is kept")


def _work(
    given: Sequence[tuple[Checkpoint, Settings, str]],
    work: Sequence[tuple[int, str, int]],
    suite: Suite,
    out: Path,
    log: Path | None,
    left: Any,
    number: int,
    processes: int,
) -> None:
    """Run jobs in a process of its own until none is left."""
    import sys

    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, environment.usable_cores() // processes))
    kept: dict[int, Any] = {}
    materials = Materials(suite)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        while (place := left.get()) is not None:
            i, task, length = work[place]
            checkpoint, settings, folder = given[i]
            if i not in kept:
                kept.clear()  # of several models one is held at a time
                kept[i] = _load(folder, suite, settings.dtype) if suite.backend == "torch" else None
            model = EvaluatedModel(
                checkpoint, open_tokenizer(folder), settings, functools.partial(kept.__getitem__, i), folder
            )
            job = _job(task, length, suite, model, materials)
            measure(model, [job], suite, out, log=log, say=say)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(2)


class _Progress:
    """Says every few seconds how far a task is."""

    def __init__(self, what: str, say: Callable[[str], None], pulse: Callable[[], None]) -> None:
        self._what, self._say, self._pulse = what, say, pulse
        self._began = self._said = time.monotonic()

    def note(self, done: int, total: int) -> None:
        """Take note of a batch, after which `done` are done."""
        now = time.monotonic()
        if done < total and now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            left = datetime.timedelta(seconds=round((now - self._began) / done * (total - done)))
            self._say(f"{self._what} {done}/{total} · {left} left")
        self._pulse()


def _format_result(result: Measurement) -> str:
    if isinstance(result, PerplexityResult):
        parts = (f"{format_perplexity(sum(of.losses) / len(of.losses))} below {of.end:,}" for of in result.buckets)
        return ", ".join(parts) + f", {len(result.buckets[0].losses)} documents"
    cut = f", {result.cut_prompts} prompts cut" if result.cut_prompts else ""
    if not result.answers:
        return f"{result.metric} {result.values[result.metric]:.3f}{cut}"
    mean, low, high = mean_interval(result.scores)
    return f"{result.metric} {100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}], n {len(result.scores)}{cut}"
