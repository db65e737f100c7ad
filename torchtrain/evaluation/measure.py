"""One model's run: the jobs that are left to measure, lm-eval as the runner, and a file for each result."""

import datetime
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from anchorline import environment
from anchorline.errors import UserError, quoted
from anchorline.files import expand, read_json, replace_file
from torchtrain.data.corpus import source_name
from torchtrain.evaluation import results as kept
from torchtrain.evaluation.intervals import format_perplexity, mean_interval
from torchtrain.evaluation.perplexity import (
    digest_of,
    document_losses,
    find_key_tokens,
    long_documents,
    measure_perplexity,
    resolve_judge,
)
from torchtrain.evaluation.results import Answer, NotRun, TaskResult
from torchtrain.evaluation.suite import IN_2024, PerplexityConfig, Suite, benchmark_of, longbench_e_part, room_of
from torchtrain.evaluation.tasks.index import Job, build_job, leaves
from torchtrain.evaluation.tasks.materials import CannotRunError, Materials, quiet_library
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.modeling.placement import format_devices, input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_PACKAGES = ("anchorline", "torch", "transformers", "tokenizers", "lm_eval")
_METRICS = ("score", "acc_norm", "acc", "exact_match", "em", "f1")  # the first that a task has is its score
Say = Callable[[str], None]  # takes a line of progress


@dataclass(frozen=True)
class Checkpoint:
    """A model to evaluate: the name of its results, its step, its source, and its training (None: not known)."""

    name: str
    step: int | None
    source: str
    training: kept.Training | None = None


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint that is ready to measure. `load` returns the model of transformers."""

    checkpoint: Checkpoint
    tokenizer: "PreTrainedTokenizerFast"
    settings: kept.Settings
    load: Callable[[], "PreTrainedModel"]
    folder: str = ""


def tasks_of(suite: Suite, lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Return every task with its lengths; one of short prompts has the greatest alone. Raises UserError: unknown."""
    names = dict.fromkeys(leaf for name in suite.tasks for leaf in leaves(name, suite.include_path))
    tasks = [
        (task, length)
        for length in lengths
        for task in names
        if benchmark_of(task) in ("ruler", "longbench") or length == max(lengths)
    ]
    return tasks + [("perplexity", length) for length in lengths if suite.perplexity is not None]


def make_job(task: str, length: int, materials: Materials, model: EvaluatedModel) -> Job:
    """Return a task with its samples. Raises as `build_job`."""
    config = materials.suite.perplexity
    if task != "perplexity" or config is None:
        return build_job(task, length, materials, model.tokenizer, model.folder)
    identity = {
        "documents": digest_of(long_documents(config, model.tokenizer, length)),
        "text": source_name(config.source),
        **config.model_dump(mode="json", exclude_defaults=True),
    }
    if (keys := config.key_tokens) is not None:
        if keys.context >= length - 1:
            raise UserError(
                f"perplexity.key_tokens.context {keys.context:,}: leaves nothing of {length:,} tokens; lower it"
            )
        if keys.judge is not None:
            folder = resolve_judge(keys.judge, materials.suite.cache, model.tokenizer)
            identity["judge"] = kept.weights_digest(Path(folder))
    return Job(task, length, identity)


def list_jobs(
    model: EvaluatedModel,
    tasks: Sequence[tuple[str, int]],
    materials: Materials,
    out: Path | None,
    say: Say,
    replace_old: bool = False,
    cannot: dict[tuple[str, int], str] | None = None,
) -> list[Job]:
    """Return the jobs that are left to measure of a model. Report the tasks that cannot run, and those that are done.

    tasks: as `tasks_of` returns them. say: takes one line at a time.
    out: folder of the results; None: nothing is read or written there.
    replace_old: measure again the results of other weights, settings or samples, which are refused otherwise.
    cannot: why a task cannot run at a length; what is found out is added, and neither tried nor said again.
    Raises UserError: a task cannot be measured, for another reason than a missing material or too little room.
    """
    name, jobs = model.checkpoint.name, []
    cannot = {} if cannot is None else cannot
    for task, length in tasks:
        line = f"{name} {task} {length:,}"
        path = None if out is None else kept.result_path(out, name, task, length)
        read = kept.read_result(path) if path is not None and path.is_file() else None
        done = None if isinstance(read, NotRun) else read
        job = None
        if (task, length) not in cannot:
            try:
                job = make_job(task, length, materials, model)
            except CannotRunError as error:
                say(f"{line}: not run: {error}")
                cannot[task, length] = str(error)
        if job is None:
            if out is not None and done is None:
                kept.save_result(out, NotRun(task=task, length=length, checkpoint=name, not_run=cannot[task, length]))
            continue
        other = "" if done is None else kept.different_setting(done, model.settings)
        other = "samples" if done is not None and done.identity != job.identity else other
        if other and not replace_old:
            raise UserError(
                f"--out: {quoted(path)} was measured with other {other}; choose another --out, or remove it"
            )
        if done is None or other:
            jobs.append(job)
        else:
            say(f"{line}: finished before, {_format_result(done)}")
    return jobs


def measure(
    model: EvaluatedModel,
    jobs: Iterable[Job],
    suite: Suite,
    out: Path,
    *,
    log: Path | None = None,
    say: Say,
    pulse: Callable[[], None] = lambda: None,
) -> None:
    """Measure jobs of one model, and write a file for each result. out, log: as for `evaluate`. say: takes a line.
    pulse: called between two batches of prompts, and between two documents.
    """
    jobs = iter(jobs)
    if (first := next(jobs, None)) is None:
        return
    checkpoint = model.checkpoint
    from torchtrain.evaluation.model import SharedPrefixLM

    loaded = model.load()
    with quiet_library():
        lm = SharedPrefixLM(  # pyright: ignore[reportAbstractUsage]
            loaded, model.tokenizer, suite.batch_tokens, first.length, model.settings.anchor, pulse
        )
    for job in itertools.chain([first], jobs):
        pulse()
        started = time.perf_counter()
        if job.built is not None:
            fields = _run(lm, model, job, suite, log)
        else:
            assert suite.perplexity is not None
            judged = _ask_judge(job, loaded, model.tokenizer, suite.perplexity, suite.cache, pulse)
            fields = measure_perplexity(loaded, model.tokenizer, suite.perplexity, job.length, pulse, judged)
        result = TaskResult(
            task=job.task,
            length=job.length,
            checkpoint=checkpoint.name,
            step=checkpoint.step,
            source=checkpoint.source,
            training=checkpoint.training,
            settings=model.settings,
            identity=job.identity,
            device=format_devices(loaded),
            seconds=round(time.perf_counter() - started, 3),
            versions=environment.versions(_PACKAGES),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **fields,
        )
        kept.save_result(out, result)
        say(f"{checkpoint.name} {job.task} {job.length:,}: {_format_result(result)}, {result.seconds:.1f} s")


def _ask_judge(
    job: Job,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    config: PerplexityConfig,
    cache: str,
    pulse: Callable[[], None],
) -> list[list[int]] | None:
    """Return the key tokens of each document by the judge of a config; the cache keeps them for other models. Return
    None if it names none.
    """
    if config.key_tokens is None or config.key_tokens.judge is None:
        return None
    file = expand(cache) / "key_tokens" / f"{_digest(str(model.dtype), job.identity)}.json"
    if not file.is_file():
        folder = resolve_judge(config.key_tokens.judge, cache, tokenizer)
        judge, found = load_for_evaluation(folder, dtype=model.dtype, device=input_device(model)), []
        for ids in long_documents(config, tokenizer, job.length):
            found.append(find_key_tokens(partial(document_losses, judge), ids, config.key_tokens))
            pulse()
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps({"key_tokens": found}).encode())
    return read_json(file)["key_tokens"]


def _digest(*depends_on: Any) -> str:
    """The name of a kept answer that depends on these, and on the versions of packages."""
    text = json.dumps([*depends_on, environment.versions(_PACKAGES)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _run(lm: Any, model: EvaluatedModel, job: Job, suite: Suite, log: Path | None) -> dict[str, Any]:
    """Run one task by lm-eval; return the fields of its result."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    more = room_of(job.task) if job.task in IN_2024 else 0  # fwe_2024_10 leaves no room for its answer
    lm.set_length(job.length + more, benchmark_of(job.task) == "longbench")
    # With a cache of its answers, a task that was stopped continues within.
    digest = _digest(model.settings.model_dump(), job.identity)
    tracker = None if log is None else EvaluationTracker(output_path=str(log))
    run: Any = simple_evaluate
    with quiet_library(), patch("lm_eval.evaluator.get_git_commit_hash"):  # git complains outside of a clone
        found = run(
            model=lm,
            tasks=[job.built],
            limit=suite.samples,
            num_fewshot=job.identity.get("fewshot"),
            use_cache=str(expand(suite.cache) / "answers" / f"{job.task}-{job.length}-{digest}"),
            apply_chat_template=suite.chat_template,
            random_seed=suite.seed,
            numpy_random_seed=suite.seed,
            torch_random_seed=suite.seed,
            bootstrap_iters=0,
            evaluation_tracker=tracker,
            task_manager=TaskManager(include_defaults=False),  # lm-eval makes one of all its tasks otherwise
        )
        lm.cache_hook.dbdict.close()  # lm-eval leaves a thread open
        samples = found["samples"][job.task]
        if tracker is not None:
            tracker.general_config_tracker.model_name_sanitized = f"{model.checkpoint.name}-{job.length}"
            tracker.save_results_aggregated(results={**found, "samples": {}}, samples=found["samples"])
            tracker.save_results_samples(task_name=job.task, samples=samples)
    chosen = samples[0]["filter"]
    samples = sorted((of for of in samples if of["filter"] == chosen), key=lambda of: of["doc_id"])
    values = {
        name.partition(",")[0]: float(value)
        for name, value in found["results"][job.task].items()
        if isinstance(value, int | float) and name.endswith(f",{chosen}") and "_stderr" not in name
    }
    of_samples = [name for name in values if all(isinstance(of.get(name), int | float) for of in samples)]
    metric = next((name for name in _METRICS if name in of_samples), next(iter(of_samples or values)))
    hashes = "".join(f"{of['prompt_hash']}{of['target_hash']}" for of in samples)
    return {
        "samples": hashlib.sha256(hashes.encode()).hexdigest(),
        "metric": metric,
        "values": values,
        **{name: getattr(lm, name) for name in ("cut_prompts", "prompt_tokens", "computed_tokens")},
        "answers": [_answer(of, metric, job.task) for of in samples] if metric in of_samples else [],
    }


def _answer(sample: dict[str, Any], metric: str, task: str) -> Answer:
    responses = sample["filtered_resps"]
    if len(responses) == 1:
        text = responses[0] if isinstance(responses[0], str) else json.dumps(responses[0])
    else:  # likelihoods of choices
        scores = [of[0] if isinstance(of, list | tuple) else 0.0 for of in responses]
        text = str(scores.index(max(scores)))
    part = longbench_e_part(task, sample["doc"])
    return Answer(index=int(sample["doc_id"]), prediction=text, score=float(sample[metric]), part=part)


def _format_result(result: TaskResult) -> str:
    if result.task == "perplexity":
        means = {part: float(np.mean(result.scores(part))) for part, _ in result.answered}
        return ", ".join(f"{format_perplexity(loss)} at {part}" for part, loss in means.items())
    cut = f", {result.cut_prompts} prompts cut" if result.cut_prompts else ""
    if not result.answers:
        return f"{result.metric} {result.values[result.metric]:.3f}{cut}"
    mean, low, high = mean_interval(result.scores())
    return f"{result.metric} {100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}], n {len(result.answers)}{cut}"
