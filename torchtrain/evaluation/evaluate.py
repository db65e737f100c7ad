"""Measure every task at every length of every checkpoint by lm-eval's runner. Finished results are kept."""

import datetime
import hashlib
import importlib.util
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anchorline import environment
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import expand
from torchtrain.config import PackConfig
from torchtrain.data.dataset import anchor_ids
from torchtrain.evaluation import results as kept
from torchtrain.evaluation.intervals import format_perplexity, mean_interval
from torchtrain.evaluation.perplexity import digest_of, long_documents, measure_perplexity
from torchtrain.evaluation.results import Answer, Measurement, NotRun, PerplexityResult, Result, TaskResult
from torchtrain.evaluation.suite import IN_2024, LONGBENCH_E_PARTS, Suite, benchmark_of, room_of
from torchtrain.evaluation.tasks.index import Job, build_job, leaves, quiet_library
from torchtrain.evaluation.tasks.materials import CannotRunError, Materials
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.modeling.placement import check_can_spread, format_devices
from torchtrain.modeling.source import open_config, open_tokenizer, resolve_source
from torchtrain.products import describe_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_PACKAGES = ("anchorline", "torch", "transformers", "tokenizers", "lm_eval", "vllm")
_METRICS = ("score", "acc_norm", "acc", "exact_match", "em", "f1")  # the first that a task has is its score
Say = Callable[[str], None]  # takes a line of progress


@dataclass(frozen=True)
class Checkpoint:
    """A model to evaluate: the name of its results, its step (None: not known), its source, and how it was trained
    (None: not known).
    """

    name: str
    step: int | None
    source: str
    training: kept.Training | None = None


@dataclass(frozen=True)
class EvaluatedModel:
    """A model that is measured. `load` returns the model of transformers; vLLM loads `folder` itself."""

    checkpoint: Checkpoint
    tokenizer: "PreTrainedTokenizerFast"
    settings: kept.Settings
    load: Callable[[], "PreTrainedModel"]
    folder: str = ""


def evaluate(
    checkpoints: Sequence[Checkpoint],
    suite: Suite,
    lengths: Sequence[int],
    out: Path,
    *,
    anchor: bool = False,
    processes: int = 1,
    log: Path | None = None,
    say: Say,
) -> list[Result]:
    """Measure checkpoints, and write a file for each result below `out`.

    Args:
        checkpoints: what to evaluate.
        suite: tasks, samples and materials.
        lengths: tokens, prompt and answer together.
        out: folder of the results; finished ones are kept.
        anchor: put the training's anchor (BOS, or EOS where there is none) before each prompt that does not begin so.
        processes: how many share the tasks, each with its own model, and its own GPU where there are some.
        log: folder for lm-eval's own logs of the same results; None: none are written.
        say: takes lines of progress.

    Raises:
        UserError: a checkpoint without tokenizer, a length it does not hold, materials or results that are damaged.
    """
    check_suite(suite, lengths)
    kept.make_folder(out)
    models = [_open(checkpoint, suite, lengths, anchor, say) for checkpoint in checkpoints]
    jobs = [plan(model, suite, lengths, out, say) for model in models]  # all checks come before any weight
    if processes > 1:
        _measure_in_processes(models, jobs, suite, out, log, processes)
    else:
        for model, own in zip(models, jobs, strict=True):
            measure(model, own, suite, out, log=log, say=say)
    paths = [kept.result_path(out, of.checkpoint.name, *each) for of in models for each in _tasks_of(suite, lengths)]
    return [kept.read_result(path) for path in paths if path.is_file()]


def check_suite(suite: Suite, lengths: Sequence[int]) -> None:
    """Check what needs no model.

    Raises:
        UserError: an unknown task, perplexity by vLLM, or a package that is missing.
    """
    for package in ("lm_eval", *(("vllm",) if suite.backend == "vllm" else ())):
        if importlib.util.find_spec(package) is None:
            extra = "'anchorline[eval]'" if package == "lm_eval" else "vllm, or set backend: torch"
            raise UserError(f"the package {package} is not installed: pip install {extra}")
    if suite.device_map is not None:
        check_can_spread(suite.device_map)
    names = {name for name, _ in _tasks_of(suite, lengths)}
    for old, new in IN_2024.items():
        if {old, new} <= names:
            raise UserError(f"tasks: {new} and {old} are one task at two times; keep one")
    if suite.perplexity is not None and suite.backend == "vllm":
        raise UserError("perplexity: backend vllm does not give it; remove it (perplexity=null), or set backend: torch")


def _tasks_of(suite: Suite, lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Return every task with every length it is measured at. Tasks of short prompts have the greatest alone."""
    names = dict.fromkeys(leaf for name in suite.tasks for leaf in leaves(name, suite.include_path))
    tasks = [
        (task, length)
        for length in lengths
        for task in names
        if benchmark_of(task) in ("ruler", "longbench") or length == max(lengths)
    ]
    return tasks + [("perplexity", length) for length in lengths if suite.perplexity is not None]


def plan(
    model: EvaluatedModel, suite: Suite, lengths: Sequence[int], out: Path | None, say: Say, replace_old: bool = False
) -> list[Job]:
    """Return what is to be measured of a model, with its samples. Say what cannot run, and what is finished.

    Args:
        model, suite, lengths, say: as for `evaluate`.
        out: folder of the results; None: nothing is read or written there.
        replace_old: measure again what is of other weights, settings or samples, which is refused otherwise.

    Raises:
        UserError: what cannot be measured, for another reason than a missing material or too little room.
    """
    name, jobs, materials = model.checkpoint.name, [], Materials(suite)
    for task, length in _tasks_of(suite, lengths):
        line = f"{name} {task} {length:,}"
        path = None if out is None else kept.result_path(out, name, task, length)
        read = kept.read_result(path) if path is not None and path.is_file() else None
        done = None if isinstance(read, NotRun) else read
        try:
            job = _job(task, length, materials, model)
        except CannotRunError as error:
            say(f"{line}: not run: {error}")
            if out is not None and done is None:
                kept.save_result(out, NotRun(task=task, length=length, checkpoint=name, not_run=str(error)))
            continue
        what = "" if done is None else kept.different_setting(done, model.settings)
        what = "samples" if done is not None and done.identity != job.identity else what
        if what and not replace_old:
            raise UserError(f"--out: {quoted(path)} was measured with other {what}; choose another --out, or remove it")
        if done is None or what:
            jobs.append(job)
        else:
            say(f"{line}: finished before, {_format_result(done)}")
    return jobs


def _job(task: str, length: int, materials: Materials, model: EvaluatedModel) -> Job:
    config = materials.suite.perplexity
    if task != "perplexity" or config is None:
        return build_job(task, length, materials, model.tokenizer, model.folder)
    digest = digest_of(long_documents(config, model.tokenizer, length))
    return Job(task, length, {"documents": digest, **config.model_dump(mode="json", exclude_defaults=True)})


def measure(
    model: EvaluatedModel,
    jobs: Sequence[Job],
    suite: Suite,
    out: Path,
    *,
    log: Path | None = None,
    say: Say,
    pulse: Callable[[], None] = lambda: None,
) -> None:
    """Measure jobs of one model, and write a file for each result.

    Args:
        model, jobs, suite, out, log, say: as for `evaluate`.
        pulse: called between two batches of prompts, and between two documents.
    """
    if not jobs:
        return
    loaded = model.load() if suite.backend == "torch" else None
    if loaded is None:
        lm = _vllm(model, suite, max(job.length for job in jobs))
    else:
        from torchtrain.evaluation.model import SharedPrefixLM

        with quiet_library():
            lm = SharedPrefixLM(  # pyright: ignore[reportAbstractUsage]
                loaded, model.tokenizer, suite.batch_tokens, jobs[0].length, model.settings.anchor, pulse
            )
    for job in jobs:
        pulse()
        started = time.perf_counter()
        facts = {
            "task": job.task,
            "length": job.length,
            "checkpoint": model.checkpoint.name,
            "step": model.checkpoint.step,
            "source": model.checkpoint.source,
            "settings": model.settings,
            "identity": job.identity,
            "device": "vllm" if loaded is None else format_devices(loaded),
            "versions": environment.versions(_PACKAGES),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
        }
        if job.built is not None:
            result: Measurement = _run(lm, model, job, suite, facts, log)
        else:
            assert loaded is not None
            assert suite.perplexity is not None
            result = measure_perplexity(
                loaded, model.tokenizer, suite.perplexity, model.checkpoint.training, facts, pulse
            )
        result = result.model_copy(update={"seconds": round(time.perf_counter() - started, 3)})
        kept.save_result(out, result)
        say(f"{model.checkpoint.name} {job.task} {job.length:,}: {_format_result(result)}, {result.seconds:.1f} s")


def _run(lm: Any, model: EvaluatedModel, job: Job, suite: Suite, facts: dict[str, Any], log: Path | None) -> TaskResult:
    """Run one task by lm-eval."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    own = suite.backend == "torch"
    if own:
        more = room_of(job.task) if job.task in IN_2024 else 0  # fwe_2024_10 leaves no room for its answer
        lm.set_length(job.length + more, benchmark_of(job.task) == "longbench")
    tracker = None if log is None else EvaluationTracker(output_path=str(log))
    run: Any = simple_evaluate
    with quiet_library():
        found = run(
            model=lm,
            tasks=[job.built],
            limit=suite.samples,
            num_fewshot=job.identity.get("fewshot"),
            use_cache=str(_answers_cache(model, job, suite)),
            apply_chat_template=suite.chat_template,
            random_seed=suite.seed,
            numpy_random_seed=suite.seed,
            torch_random_seed=suite.seed,
            bootstrap_iters=0,
            evaluation_tracker=tracker,
            task_manager=TaskManager(include_defaults=False),  # lm-eval makes one of all its tasks otherwise
        )
        lm.cache_hook.dbdict.close()  # lm-eval leaves a thread open
        if tracker is not None:
            tracker.general_config_tracker.model_name_sanitized = f"{model.checkpoint.name}-{job.length}"
            tracker.save_results_aggregated(results={**found, "samples": {}}, samples=found["samples"])
            tracker.save_results_samples(task_name=job.task, samples=found["samples"][job.task])
    samples = found["samples"][job.task]
    chosen = samples[0]["filter"]
    samples = sorted((of for of in samples if of["filter"] == chosen), key=lambda of: of["doc_id"])
    values = {
        name.partition(",")[0]: float(value)
        for name, value in found["results"][job.task].items()
        if isinstance(value, int | float) and name.endswith(f",{chosen}") and "_stderr" not in name
    }
    of_samples = [name for name in values if all(isinstance(of.get(name), int | float) for of in samples)]
    metric = next((name for name in _METRICS if name in of_samples), next(iter(of_samples or values)))
    digest = hashlib.sha256("".join(f"{of['prompt_hash']}{of['target_hash']}" for of in samples).encode())
    return TaskResult(
        **facts,
        samples=digest.hexdigest(),
        metric=metric,
        values=values,
        cut_prompts=lm.cut_prompts if own else 0,
        prompt_tokens=lm.prompt_tokens if own else 0,
        computed_tokens=lm.computed_tokens if own else 0,
        training=model.checkpoint.training,
        answers=[_answer(of, metric, job.task) for of in samples] if metric in of_samples else [],
    )


def _answer(sample: dict[str, Any], metric: str, task: str) -> Answer:
    said = sample["filtered_resps"]
    if len(said) == 1:
        text = said[0] if isinstance(said[0], str) else json.dumps(said[0])
    else:  # likelihoods of choices
        text = str(max(range(len(said)), key=lambda i: said[i][0] if isinstance(said[i], list | tuple) else 0.0))
    part = ""
    if benchmark_of(task) == "longbench" and task.endswith("_e"):
        words = sample["doc"]["length"]
        part = next(name for name, end in LONGBENCH_E_PARTS.items() if end is None or words < end)
    return Answer(index=int(sample["doc_id"]), prediction=text, score=float(sample[metric]), part=part)


def _answers_cache(model: EvaluatedModel, job: Job, suite: Suite) -> Path:
    """Return where lm-eval keeps the answers of one task, so that a task that was stopped continues within."""
    facts = [model.settings.model_dump(), job.identity, environment.versions(_PACKAGES)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return expand(suite.cache) / "answers" / f"{job.task}-{job.length}-{digest}"


def _vllm(model: EvaluatedModel, suite: Suite, length: int) -> Any:
    from lm_eval.api.registry import get_model

    given = {"pretrained": model.folder, "dtype": model.settings.dtype, "max_model_len": length, "seed": suite.seed}
    try:
        return get_model("vllm")(**given, **{"enable_prefix_caching": True, **suite.vllm})
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"backend vllm: {quoted_reason(error)}; mend vllm in the suite") from None


def _open(checkpoint: Checkpoint, suite: Suite, lengths: Sequence[int], anchor: bool, say: Say) -> EvaluatedModel:
    folder = resolve_source(checkpoint.source, suite.cache, say)
    config, tokenizer = open_config(folder), open_tokenizer(folder)
    check_tokenizer(tokenizer, checkpoint.source, suite)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and max(lengths) > most:
        raise UserError(
            f"--lengths {max(lengths)}: {quoted(checkpoint.source)} holds {most:,} positions; give no more, or extend "
            "the model first"
        )
    ids = anchor_ids(tokenizer, PackConfig(sequence_length=2)) if anchor else []
    if suite.backend == "vllm" and ids and tokenizer("a").input_ids[:1] != ids:
        raise UserError("--anchor: with backend vllm the tokenizer itself must put it there; set backend: torch")
    dtype = suite.dtype or ("float32" if config.dtype is None else str(config.dtype).removeprefix("torch."))
    engine = {"backend": "vllm", **suite.vllm} if suite.backend == "vllm" else {}
    settings = kept.Settings(weights=kept.weights_digest(Path(folder)), anchor=ids, dtype=dtype, engine=engine)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if suite.backend == "torch" and (products := describe_products(getattr(torch, dtype), device)):
        say(f"products  {products}")
    load = partial(load_for_evaluation, folder, dtype=getattr(torch, dtype), device=device, device_map=suite.device_map)
    return EvaluatedModel(checkpoint, tokenizer, settings, load, folder)


def check_tokenizer(tokenizer: "PreTrainedTokenizerFast", source: str, suite: Suite) -> None:
    """Refuse a tokenizer by which a model would be measured wrong.

    Raises:
        UserError: it has no words, has no chat template where one is asked for, or appends a special token to a prompt,
            so that the model would answer after its end.
    """
    plain = tokenizer("The grass is green.", add_special_tokens=False).input_ids
    if not plain:  # transformers makes such a one where there is no file
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
    jobs: Sequence[Sequence[Job]],
    suite: Suite,
    out: Path,
    log: Path | None,
    processes: int,
) -> None:
    """Deal jobs to processes, the longest first. (lm-eval would deal samples: other batches, which round otherwise.)"""
    dealt = [[(job.task, job.length) for job in sorted(own, key=lambda job: -job.length)] for own in jobs]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        shares = [[own[i::processes] for own in dealt] for i in range(processes)]
        asked = [
            pool.submit(_measure_share, i, processes, models, share, suite, out, log) for i, share in enumerate(shares)
        ]
        try:
            for of in asked:
                of.result()
        except BrokenProcessPool:
            raise UserError(
                "--processes: one of them was killed, perhaps for want of memory; what was finished is kept: call it "
                "again, with fewer"
            ) from None


def _measure_share(
    number: int,
    processes: int,
    models: Sequence[EvaluatedModel],
    share: Sequence[Sequence[tuple[str, int]]],
    suite: Suite,
    out: Path,
    log: Path | None,
) -> None:
    """Measure one process's share, on its own GPU, or with its part of the cores."""
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, environment.usable_cores() // processes))
    materials = Materials(suite)
    for model, own in zip(models, share, strict=True):
        jobs = [_job(task, length, materials, model) for task, length in own]
        measure(model, jobs, suite, out, log=log, say=partial(print, file=sys.stderr, flush=True))


def _format_result(result: Measurement) -> str:
    if isinstance(result, PerplexityResult):
        parts = (f"{format_perplexity(sum(of.losses) / len(of.losses))} below {of.end:,}" for of in result.buckets)
        return ", ".join(parts) + f", {len(result.buckets[0].losses)} documents"
    cut = f", {result.cut_prompts} prompts cut" if result.cut_prompts else ""
    if not result.answers:
        return f"{result.metric} {result.values[result.metric]:.3f}{cut}"
    mean, low, high = mean_interval(result.scores())
    return f"{result.metric} {100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}], n {len(result.answers)}{cut}"
