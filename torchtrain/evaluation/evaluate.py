"""Every task at every length of every checkpoint; what is finished is never computed again."""

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anchorline import environment
from anchorline.errors import UserError, quoted
from torchtrain.config import PackConfig
from torchtrain.data.corpus import source_name
from torchtrain.data.tokens import anchor_ids
from torchtrain.evaluation import choices, longbench
from torchtrain.evaluation.engines import Engine, OnBatch, Pair, TorchEngine, VllmEngine
from torchtrain.evaluation.generation import AnswerCost
from torchtrain.evaluation.intervals import mean_interval, tell_perplexity
from torchtrain.evaluation.materials import Materials, MissingMaterialError
from torchtrain.evaluation.perplexity import (
    bucket_means,
    buckets,
    check_logits,
    digest_of,
    document_losses,
    long_documents,
    strided_loss,
)
from torchtrain.evaluation.progress import AnswerProgress
from torchtrain.evaluation.prompt_tokens import check_tokenizer
from torchtrain.evaluation.results import (
    Answer,
    Bucket,
    Found,
    NotRun,
    PerplexityResult,
    Settings,
    TaskResult,
    Training,
    check_one_model,
    check_out,
    finished_or_none,
    finished_result,
    holds_scores,
    result_path,
    save_result,
    weights_digest,
)
from torchtrain.evaluation.ruler import prompt_of
from torchtrain.evaluation.samples import SampleSet, open_samples
from torchtrain.evaluation.scoring import score
from torchtrain.evaluation.suite import CHOICES, TASKS, PerplexityConfig, Suite, benchmark_of
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.modeling.placement import DeviceMap, check_can_spread, tell_devices
from torchtrain.modeling.source import open_config, open_tokenizer, resolve_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Ids to ids, or pairs of ids to log p: what a `Generator` does; a test puts a reader of prompts in its place.
Answers = Callable[[Sequence[Sequence[int]], int, OnBatch], list[list[int]]]
Likelihoods = Callable[[Sequence[Pair], OnBatch], list[float]]
_PACKAGES = ("anchorline", "torch", "transformers", "tokenizers", "lm_eval", "vllm")
# LongBench's scores; fuzzywuzzy gives other ratios where Levenshtein is installed.
_SCORING = ("jieba", "fuzzywuzzy", "rouge", "Levenshtein")


@dataclass(frozen=True)
class Checkpoint:
    """A model to evaluate: the name its results stand under, the step it was left at (None: not known), its source, and
    how it was trained (None: not known).
    """

    name: str
    step: int | None
    source: str
    training: Training | None = None


@dataclass(frozen=True)
class EvaluatedModel:
    """A model that is measured, and what decides the numbers besides the samples."""

    checkpoint: Checkpoint
    tokenizer: "PreTrainedTokenizerFast"
    engine: Engine
    weights: str  # digest
    dtype: str


def evaluate(
    checkpoints: Sequence[Checkpoint],
    suite: Suite,
    lengths: Sequence[int],
    out: Path,
    *,
    anchor: bool = False,
    say: Callable[[str], None],
    device: torch.device | None = None,
) -> list[Found]:
    """Measure, and leave a file of each result below `out`.

    Args:
        checkpoints: what to evaluate.
        suite: tasks, samples and materials.
        lengths: tokens, prompt and answer together.
        out: folder of the results; those that stand there are taken over.
        anchor: put the training's anchor (BOS, or EOS where there is none) before each prompt that does not begin so.
        say: takes lines of progress.
        device: where to; default: the GPU if there is one.

    Raises:
        UserError: a checkpoint without tokenizer, a length it does not hold, materials or results that are damaged.
    """
    check_suite(suite, lengths)
    check_out(out)
    materials = Materials(suite)
    opened = [_open(checkpoint, suite, lengths, say) for checkpoint in checkpoints]  # all checks before any weight
    for _, tokenizer in opened:
        check_samples(suite, lengths, tokenizer, materials)
    models = []
    for checkpoint, (folder, tokenizer) in zip(checkpoints, opened, strict=True):
        dtype = suite.dtype or _dtype(folder)
        engine: Engine = (
            VllmEngine(str(folder), suite, dtype, max(lengths), open_config(str(folder)), tokenizer)
            if suite.backend == "vllm"
            else TorchEngine(partial(_load, folder, dtype, device, suite.device_map, say), suite, tokenizer)
        )
        models.append(EvaluatedModel(checkpoint, tokenizer, engine, weights_digest(folder), dtype))
        _check_finished(models[-1], suite, lengths, out, materials, _anchor(tokenizer) if anchor else [])
    results: list[Found] = []
    for model in models:
        results += measure(model, suite, lengths, out, materials, anchor=anchor, say=say)
    return results


def _check_finished(
    evaluated: EvaluatedModel,
    suite: Suite,
    lengths: Sequence[int],
    out: Path,
    materials: Materials,
    anchor: list[int],
) -> None:
    """Check that what stands there already is of this model, these samples and settings.

    Raises:
        UserError: one result is not.
    """
    name, of_tasks = evaluated.checkpoint.name, None
    for length, task, samples in _jobs(name, suite, lengths, evaluated.tokenizer, materials):
        if isinstance(samples, SampleSet):
            settings = _settings(evaluated, task, samples, anchor)
            finished_result(result_path(out, name, task, length), settings)
            of_tasks = of_tasks or settings
    if suite.perplexity is not None:
        for length in lengths:
            documents = long_documents(suite.perplexity, evaluated.tokenizer, length)
            settings = _perplexity_settings(evaluated, suite.perplexity, documents)
            finished_result(result_path(out, name, "perplexity", length), settings)
    if of_tasks is not None:
        check_one_model(out, name, of_tasks)


def check_suite(suite: Suite, lengths: Sequence[int]) -> None:
    """Check what needs no model.

    Raises:
        UserError: a stride that does not fit, perplexity of an engine that does not give it, or no accelerate.
    """
    if suite.device_map is not None:
        check_can_spread(suite.device_map)
    if suite.perplexity is None:
        return
    stride = suite.perplexity.stride
    if stride is not None and stride >= min(lengths) // 2:
        raise UserError(f"perplexity.stride {stride}: windows are half of a length; give less than half of the least")
    if suite.backend == "vllm":
        raise UserError("perplexity: backend vllm does not give it; remove it (perplexity=null), or set backend: torch")


def check_samples(
    suite: Suite, lengths: Sequence[int], tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> None:
    """Make all samples that are not there yet, so that nothing is found wrong after a model was loaded.

    Raises:
        UserError: what cannot be measured, and not for want of a material.
    """
    for _, task, samples in _jobs("", suite, lengths, tokenizer, materials):
        if benchmark_of(task) == "longbench" and isinstance(samples, SampleSet):
            longbench.metric_of(task)  # a package of its scores may be missing
    if suite.perplexity is not None:
        for length in lengths:
            long_documents(suite.perplexity, tokenizer, length)


def measure(
    evaluated: EvaluatedModel,
    suite: Suite,
    lengths: Sequence[int],
    out: Path,
    materials: Materials,
    *,
    anchor: bool = False,
    replace: bool = False,
    say: Callable[[str], None],
    pulse: Callable[[], None] = lambda: None,
) -> list[Found]:
    """Measure one model; results of it that stand there already are taken over.

    Args:
        evaluated: the model.
        suite, lengths, out, anchor, say: as for `evaluate`.
        materials: of the suite.
        replace: write over results of other weights or settings, which are refused otherwise.
        pulse: called between two batches of prompts, and between two documents.
    """
    results: list[Found] = []
    checkpoint, tokenizer, engine = evaluated.checkpoint, evaluated.tokenizer, evaluated.engine
    anchor_tokens = _anchor(tokenizer) if anchor else []
    find = finished_or_none if replace else finished_result
    for length, task, samples in _jobs(checkpoint.name, suite, lengths, tokenizer, materials):
        path = result_path(out, checkpoint.name, task, length)
        what = f"{checkpoint.name} {task} {length:,}"
        if isinstance(samples, NotRun):
            if not holds_scores(path):  # those of a time when the material was there stay
                save_result(path, samples)
            say(f"{what}: not run, {samples.not_run}")
            results.append(samples)
            continue
        settings = _settings(evaluated, task, samples, anchor_tokens)
        if (found := find(path, settings)) is not None:
            assert isinstance(found, TaskResult)
            say(f"{what}: finished before, {_tell(found)}")
            results.append(found)
            continue
        engine.open()  # which takes no part in what a sample takes
        started = time.perf_counter()
        tell = AnswerProgress(what, say, pulse)
        if benchmark_of(task) in CHOICES:
            answers, work = run_choices(samples, task, tokenizer, anchor_tokens, engine.log_likelihoods, tell)
        else:
            answers, work = run_task(samples, task, tokenizer, anchor_tokens, partial(engine.answers, task), tell)
        result = TaskResult(
            task=task,
            length=length,
            checkpoint=checkpoint.name,
            step=checkpoint.step,
            source=checkpoint.source,
            settings=settings,
            identity=samples.identity,
            attention=engine.attention,
            device=engine.device,
            shares_prefixes=engine.shares_prefixes,
            prompt_tokens=work.prompt_tokens,
            computed_tokens=work.computed_tokens,
            batch_tokens=suite.batch_tokens,
            seconds=round(time.perf_counter() - started, 3),
            versions=environment.versions(_PACKAGES) | settings.scoring,
            created=_now(),
            training=checkpoint.training,
            answers=answers,
        )
        save_result(path, result)
        say(f"{what}: {_tell(result)}, {result.seconds / len(answers):.2f} s a sample")
        results.append(result)
    for length in lengths:
        if (wanted := suite.perplexity) is None:
            break
        assert isinstance(engine, TorchEngine), "checked before"
        documents = long_documents(wanted, tokenizer, length)
        path = result_path(out, checkpoint.name, "perplexity", length)
        settings = _perplexity_settings(evaluated, wanted, documents)
        if (known := find(path, settings)) is None:
            tell = AnswerProgress(f"{checkpoint.name} perplexity {length:,}", say, pulse)
            known = measure_perplexity(engine.model, checkpoint, wanted, documents, settings, tell)
            save_result(path, known)
        assert isinstance(known, PerplexityResult)
        say(f"{checkpoint.name} perplexity {length:,}: {_tell_perplexity(known)}")
        results.append(known)
    return results


def measure_perplexity(
    model: "PreTrainedModel",
    checkpoint: Checkpoint,
    config: PerplexityConfig,
    documents: Sequence[Sequence[int]],
    settings: Settings,
    progress: AnswerProgress | None = None,
) -> PerplexityResult:
    """Measure losses by position on documents of one length, and in windows of half of it where a stride is set.

    Raises:
        UserError: the model scales or caps its logits.
    """
    started, length = time.perf_counter(), len(documents[0])
    check_logits(model)
    progress = progress or AnswerProgress()
    progress.total = len(documents)
    means, sums = [], []
    for done, ids in enumerate(documents, start=1):
        means.append(list(bucket_means(document_losses(model, ids), length)))
        if config.stride is not None:
            sums.append(strided_loss(model, ids, max(length // 2, 2), config.stride))
        progress.note(done, AnswerCost(len(ids), len(ids), 0))
    strided = sum(total for total, _ in sums) / sum(tokens for _, tokens in sums) if sums else None
    return PerplexityResult(
        length=length,
        checkpoint=checkpoint.name,
        step=checkpoint.step,
        source=checkpoint.source,
        settings=settings,
        text=source_name(config.source) + _may_know(checkpoint.training, config),
        identity=config.model_dump(mode="json", exclude_none=True),
        device=tell_devices(model),
        buckets=[
            Bucket(first=first, end=end, losses=[of[i] for of in means])
            for i, (first, end) in enumerate(buckets(length))
        ],
        strided=strided,
        seconds=round(time.perf_counter() - started, 3),
        versions=environment.versions(_PACKAGES),
        created=_now(),
    )


def run_task(
    samples: SampleSet,
    task: str,
    tokenizer: "PreTrainedTokenizerFast",
    anchor: Sequence[int],
    answer: Answers,
    progress: AnswerProgress | None = None,
) -> tuple[list[Answer], AnswerCost]:
    """Ask a model all samples of a task, and score what it says.

    Args:
        samples: of the task.
        task: one of `TASKS`, or of LongBench's.
        tokenizer: of the model.
        anchor: ids put before each prompt that does not begin with them.
        answer: the model.
        progress: is told of each batch.

    Returns:
        The answers in the order of the samples, and what was computed.
    """
    if (ruler := TASKS.get(task)) is not None:
        room, metric = ruler
        texts = [prompt_of(sample) for sample in samples.samples]
        scores = [partial(score, answers=sample["outputs"], metric=metric) for sample in samples.samples]
    else:
        room = longbench.room_of(task)
        texts = [sample["prompt"] for sample in samples.samples]
        scores = [partial(longbench.score_answer, task, sample=sample) for sample in samples.samples]
    prompts = [list(tokenizer(text, verbose=False).input_ids) for text in texts]
    anchored = [_with_anchor(ids, anchor) for ids in prompts]
    longest = max(map(len, anchored)) + room
    assert longest <= samples.samples[0]["max_length"], "samples are made with room for the answer and an anchor"
    progress = progress or AnswerProgress()
    progress.total = len(prompts)
    said = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in answer(anchored, room, progress.note)]
    answers = [
        Answer(index=sample["index"], prediction=text, score=score_of(text))
        for sample, text, score_of in zip(samples.samples, said, scores, strict=True)
    ]
    return answers, progress.cost


def run_choices(
    samples: SampleSet,
    task: str,
    tokenizer: "PreTrainedTokenizerFast",
    anchor: Sequence[int],
    likelihoods: Likelihoods,
    progress: AnswerProgress | None = None,
) -> tuple[list[Answer], AnswerCost]:
    """Ask a model which of a sample's choices is the likeliest.

    Args:
        samples, task, tokenizer, anchor, progress: as for `run_task`.
        likelihoods: the model.

    Returns:
        As `run_task`.
    """
    pairs: list[Pair] = []
    for sample in samples.samples:
        pairs += [
            (_with_anchor(context, anchor), choice) for context, choice in choices.encode_pairs(sample, tokenizer)
        ]
    progress = progress or AnswerProgress()
    progress.total = len(pairs)
    each = iter(likelihoods(pairs, progress.note))
    answers = []
    for sample in samples.samples:
        of = [next(each) for _ in sample["choices"]]
        points, plain = choices.score_choices(task, sample, of)
        likeliest = max(range(len(of)), key=lambda i: of[i])
        answers.append(
            Answer(index=sample["index"], prediction=str(likeliest), score=points, acc=plain, log_likelihoods=of)
        )
    return answers, progress.cost


def _with_anchor(ids: list[int], anchor: Sequence[int]) -> list[int]:
    return ids if ids[: len(anchor)] == list(anchor) else [*anchor, *ids]


def _open(
    checkpoint: Checkpoint, suite: Suite, lengths: Sequence[int], say: Callable[[str], None]
) -> tuple[Path, "PreTrainedTokenizerFast"]:
    folder = resolve_source(checkpoint.source, suite.cache, say)
    config = open_config(folder)
    tokenizer = open_tokenizer(folder)
    check_tokenizer(tokenizer, checkpoint.source)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and max(lengths) > most:
        raise UserError(
            f"--lengths {max(lengths)}: {quoted(checkpoint.source)} holds {most:,} positions; give no more, or extend "
            "the model first"
        )
    return Path(folder), tokenizer


def _jobs(
    name: str, suite: Suite, lengths: Sequence[int], tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> Iterator[tuple[int, str, SampleSet | NotRun]]:
    for length in lengths:
        for task in suite.tasks:
            if benchmark_of(task) in CHOICES and length != max(lengths):
                continue  # a length is only what a prompt must not exceed
            try:
                yield length, task, open_samples(task, length, suite.samples, tokenizer, materials)
            except MissingMaterialError as error:
                yield length, task, NotRun(task=task, length=length, checkpoint=name, not_run=str(error))


def _load(
    folder: Path, dtype: str, device: torch.device | None, device_map: DeviceMap | None, say: Callable[[str], None]
) -> "PreTrainedModel":
    say(f"loading {folder}")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_for_evaluation(str(folder), dtype=getattr(torch, dtype), device=device, device_map=device_map)
    if device_map is not None:
        say(f"layers lie on {tell_devices(loaded)}")
    return loaded


def _settings(evaluated: EvaluatedModel, task: str, samples: SampleSet, anchor: list[int]) -> Settings:
    return Settings(
        weights=evaluated.weights,
        samples=samples.sha256,
        anchor=anchor,
        dtype=evaluated.dtype,
        engine=evaluated.engine.arguments,
        scoring=environment.versions(_SCORING) if benchmark_of(task) == "longbench" else {},
    )


def _perplexity_settings(
    evaluated: EvaluatedModel, config: PerplexityConfig, documents: Sequence[Sequence[int]]
) -> Settings:
    digest = digest_of(documents, config.stride)
    return Settings(weights=evaluated.weights, samples=digest, anchor=[], dtype=evaluated.dtype)


def _may_know(training: Training | None, config: PerplexityConfig) -> str:
    """Return, in words, whether a run was trained on the source whose first documents are measured."""
    wanted = config.source.model_dump(mode="json", exclude_defaults=True)
    sources = training.data.get("sources", []) if training is not None else []
    return ", which the run was trained on" if any(wanted.items() <= dict(of).items() for of in sources) else ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _anchor(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Return the one token that a training's rows open with by default; samples leave room for one."""
    return anchor_ids(tokenizer, PackConfig(sequence_length=2))


def _dtype(folder: Path) -> str:
    dtype = open_config(str(folder)).dtype
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


def _tell(result: TaskResult) -> str:
    mean, low, high = mean_interval(result.scores)
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}], n {len(result.scores)}"


def _tell_perplexity(result: PerplexityResult) -> str:
    parts = (f"{tell_perplexity(sum(of.losses) / len(of.losses))} below {of.end:,}" for of in result.buckets)
    return ", ".join(parts) + f", {len(result.buckets[0].losses)} documents"
