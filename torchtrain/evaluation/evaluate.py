"""Evaluate checkpoints: check everything first, then measure, in one process or several. Finished results are kept."""

import importlib.util
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anchorline import environment
from anchorline.errors import UserError, quoted
from torchtrain.config import PackConfig
from torchtrain.data.dataset import anchor_ids
from torchtrain.errors import TasksUnfinished
from torchtrain.evaluation import results as kept
from torchtrain.evaluation.measure import Checkpoint, EvaluatedModel, Say, list_jobs, make_job, measure, tasks_of
from torchtrain.evaluation.suite import IN_2024, Suite
from torchtrain.evaluation.tasks.index import Job
from torchtrain.evaluation.tasks.materials import Materials
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.modeling.placement import check_can_spread
from torchtrain.modeling.prompts import name_anchor, read_noted_anchor, take_anchor
from torchtrain.modeling.source import open_config, open_tokenizer, resolve_source
from torchtrain.products import describe_products

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    from transformers import PreTrainedTokenizerFast


_FEW = 20  # samples of each task, for a first look on a CPU


def evaluate(
    checkpoints: Sequence[Checkpoint],
    suite: Suite,
    lengths: Sequence[int],
    out: Path,
    *,
    anchor: bool | None = None,
    processes: int = 1,
    log: Path | None = None,
    say: Say,
) -> list[kept.Result]:
    """Measure checkpoints, and write a file for each result below `out`.

    lengths: tokens, prompt and answer together.
    out: folder of the results; finished ones are kept.
    anchor: put the anchor of the run, or of the model card, before each prompt that does not begin so; of a model
        without either, BOS, or EOS where there is none. None: where the model was trained under one.
    processes: how many share the tasks, each with its own model, and its own GPU where there are some.
    log: folder for lm-eval's own logs of the same results; None: none are written.
    Raises UserError: a checkpoint without tokenizer, a length it does not hold, materials or results that are damaged.
    Raises TasksUnfinished: a process was killed.
    """
    tasks, materials = check_suite(suite, lengths), Materials(suite)
    context = _start_imports() if processes > 1 else None
    models = [_open(checkpoint, suite, lengths, anchor, say) for checkpoint in checkpoints]
    with kept.writing_to_out():
        out.mkdir(parents=True, exist_ok=True)
    jobs = [list_jobs(model, tasks, materials, out, say) for model in models]  # all checks come before any weight
    jobs = [sorted(own, key=lambda job: -job.length) for own in jobs]  # memory that does not suffice shows at once
    if any(jobs) and suite.samples > _FEW and not torch.cuda.is_available():
        say(f"pace      {suite.samples} samples of each task take long without a GPU; a first look: --samples {_FEW}")
    if context is not None:
        # A free process takes the next job. lm-eval would deal samples, so that batches would differ and round
        # otherwise.
        left = [[(job.task, job.length) for job in own] for own in jobs]
        share = partial(_measure_share, processes, models, left, suite, out, log)
        taken = [context.Value("i", 0) for _ in models]
        with ProcessPoolExecutor(processes, context, _begin_share, (taken,)) as pool:
            try:
                list(pool.map(share, range(processes)))
            except BrokenProcessPool:
                raise TasksUnfinished(
                    "--processes: one of them was killed, perhaps because memory ran out; finished results are kept: "
                    "call it again, with fewer"
                ) from None
    else:
        for model, own in zip(models, jobs, strict=True):
            measure(model, own, suite, out, log=log, say=say)
    paths = [kept.result_path(out, of.checkpoint.name, *task) for of in models for task in tasks]
    return [kept.read_result(path) for path in paths if path.is_file()]


def _start_imports() -> BaseContext:
    """Return how processes start. Where they can be forked, one process imports for all of them from now on."""
    forks = "forkserver" in multiprocessing.get_all_start_methods() and not torch.cuda.is_available()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["torchtrain.evaluation.model", __name__])
        forkserver.ensure_running()
    return context


_taken: "list[Synchronized[int]]" = []  # in a process of several: how many jobs of each model were taken by any of them


def _begin_share(taken: "list[Synchronized[int]]") -> None:
    environment.end_with_parent()
    _taken[:] = taken


def _measure_share(
    processes: int,
    models: Sequence[EvaluatedModel],
    left: Sequence[Sequence[tuple[str, int]]],
    suite: Suite,
    out: Path,
    log: Path | None,
    number: int,
) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, environment.usable_cores() // processes))
    materials = Materials(suite)

    def take(of: int) -> Iterator[Job]:
        while True:
            with _taken[of].get_lock():
                place = _taken[of].value
                _taken[of].value += 1
            if place >= len(left[of]):
                return
            yield make_job(*left[of][place], materials, models[of])

    for of, model in enumerate(models):
        measure(model, take(of), suite, out, log=log, say=partial(print, file=sys.stderr, flush=True))


def check_suite(suite: Suite, lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Check what needs no model, and return `tasks_of`. Raises UserError: an unknown task, or a missing package."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("the package lm_eval is not installed: pip install 'anchorline[eval]'")
    if suite.device_map is not None:
        check_can_spread(suite.device_map)
    tasks = tasks_of(suite, lengths)
    names = {name for name, _ in tasks}
    for old, new in IN_2024.items():
        if {old, new} <= names:
            raise UserError(f"tasks: {new} and {old} are one task at two times; keep one")
    return tasks


def _open(
    checkpoint: Checkpoint, suite: Suite, lengths: Sequence[int], anchor: bool | None, say: Say
) -> EvaluatedModel:
    folder = resolve_source(checkpoint.source, suite.cache, say)
    config, tokenizer = open_config(folder), open_tokenizer(folder)
    check_tokenizer(tokenizer, checkpoint.source, suite.chat_template)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and max(lengths) > most:
        raise UserError(
            f"--lengths {max(lengths)}: {quoted(checkpoint.source)} holds {most:,} positions; give no more, or extend "
            "the model first"
        )
    noted, training = read_noted_anchor(folder), checkpoint.training
    pack = PackConfig(sequence_length=2, variant="full")
    if training is not None:
        pack = PackConfig(sequence_length=2, anchor=training.anchor, variant=training.variant)
    elif noted is not None:
        pack = PackConfig(sequence_length=2, anchor=noted.ids)
    trained = pack.base_variant.has_anchor
    ids = anchor_ids(tokenizer, pack) if trained or anchor else []
    if noted is not None:  # it is put before prompts here, and texts keep the tokens that they had before the training
        take_anchor(tokenizer, noted)
    if trained:
        where = "do not begin" if anchor is False else "begin"
        say(f"anchor    prompts {where} with {name_anchor(tokenizer, ids)}, as every row of the training did")
    ids = [] if anchor is False else ids
    name = suite.dtype or ("float32" if config.dtype is None else str(config.dtype).removeprefix("torch."))
    settings = kept.Settings(weights=kept.weights_digest(Path(folder)), anchor=ids, dtype=name)
    dtype, device = getattr(torch, name), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if products := describe_products(dtype, device):
        say(f"products  {products}")
    load = partial(load_for_evaluation, folder, dtype=dtype, device=device, device_map=suite.device_map)
    return EvaluatedModel(checkpoint, tokenizer, settings, load, folder)


def check_tokenizer(tokenizer: "PreTrainedTokenizerFast", source: str, chat_template: bool) -> None:
    """Refuse a tokenizer that would falsify the measurement of its model. Raises UserError: it has no words, lacks a
    chat template where one is needed, or appends a special token to a prompt, so that the model would answer after its
    end.
    """
    plain = tokenizer("The grass is green.", add_special_tokens=False).input_ids
    if not plain:  # transformers makes such a tokenizer if there is no file
        raise UserError(f"{quoted(source)}: holds no tokenizer; put the model's own next to its weights")
    last = tokenizer("The grass is green.").input_ids[-1]
    if last != plain[-1]:
        raise UserError(
            f"{quoted(source)}: its tokenizer appends {tokenizer.convert_ids_to_tokens(last)} to prompts; set "
            "add_eos_token to false in its tokenizer_config.json, or take it out of post_processor in tokenizer.json"
        )
    if chat_template and not tokenizer.chat_template:
        raise UserError(f"--apply-chat-template: the tokenizer of {quoted(source)} has no chat template; leave it out")
