"""Train and measure all runs of an experiment, seed after seed, in worker processes.

Every run is a run of `torchtrain train`. Only its measurement is kept, in one JSON file with a line for each run.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from anchorline.environment import end_with_parent
from anchorline.errors import UserError
from anchorline.files import read_json, replace_file
from benchmarks.experiment.facts import BOS, EOS, UNKNOWN, make_rows, vocabulary, write_documents
from benchmarks.experiment.recall import Measurement, measure
from benchmarks.experiment.spec import Run, TrainingExperiment
from torchtrain.config import Config


@dataclass
class Results:
    """The measurements so far. `experiment` is dumped; `gate` holds the recall of each base."""

    file: Path
    experiment: dict[str, Any]
    measured: dict[str, Measurement]  # by the names of runs
    gate: dict[str, Any] | None = None

    def of(self, experiment: TrainingExperiment) -> dict[Run, Measurement]:
        """Return the measurements of an experiment's runs."""
        return {run: self.measured[run.name] for run in experiment.runs() if run.name in self.measured}

    def forget_unfinished_seeds(self, experiment: TrainingExperiment) -> None:
        """Remove the measurements of each seed that lacks some of the experiment's runs."""
        unfinished = {run.seed for run in experiment.runs() if run.name not in self.measured}
        for run in experiment.runs():
            if run.seed in unfinished:
                self.measured.pop(run.name, None)

    def save(self) -> None:
        """Write the file."""
        about = [
            f'"{name}": {json.dumps(held)},' for name, held in (("experiment", self.experiment), ("gate", self.gate))
        ]
        lines = [f'"{name}": {one.model_dump_json()}' for name, one in sorted(self.measured.items())]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.file, "\n".join(["{", *about, '"measured": {', ",\n".join(lines), "}}", ""]).encode())


def read_results(experiment: TrainingExperiment, file: Path) -> Results:
    """Read an experiment's file, or begin one where there is none.

    Raises:
        UserError: it is of another experiment.
    """
    dumped = experiment.model_dump(mode="json")
    if not file.is_file():
        return Results(file, dumped, {})
    content = read_json(file, "--results")
    for name, value in experiment.same.items():
        if content["experiment"][name] != value:
            raise UserError(f"--results {file}: is of an experiment with another {name}; choose another file")
    measured = {name: Measurement.model_validate(one) for name, one in content["measured"].items()}
    return Results(file, dumped, measured, content.get("gate"))


@dataclass(frozen=True)
class Folder:
    """Where an experiment keeps its documents and bases, and the runs while they train."""

    path: Path

    def documents(self, stage: int) -> Path:
        """The documents of a stage, by its number in `stages`."""
        return self.path / f"documents-{stage}.jsonl"

    def base(self, number: int) -> Path:
        """A pretrained model."""
        return self.path / "bases" / str(number) / "model"


def run_experiment(experiment: TrainingExperiment, out: Path, results: Results, workers: int) -> None:
    """Pretrain the bases, check them, then train and measure every run that the results lack.

    Runs of a seed are compared, so they must begin from one base. Where the folder has no bases, a seed of which the
    results hold only some runs is begun again.

    Args:
        experiment: what is run.
        out: a folder; experiments with other settings have other folders in it.
        results: get each measurement as soon as its run is done.
        workers: processes, of one thread each.

    Raises:
        SystemExit: a base does not recall.
    """
    folder = Folder(out.resolve() / hashlib.sha256(json.dumps(experiment.same).encode()).hexdigest()[:16])
    absent = [n for n in range(experiment.bases) if not folder.base(n).is_dir()]
    if absent:
        results.forget_unfinished_seeds(experiment)
    left = [run for run in experiment.runs() if run.name not in results.measured]
    if not left:
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        try:
            stages = [n for n in range(len(experiment.stages)) if not folder.documents(n).is_file()]
            list(pool.map(_make_documents, [(experiment, folder, stage) for stage in stages]))
            list(pool.map(_make_base, [(experiment, folder, n) for n in absent]))
            if absent or results.gate is None:
                results.gate = _measure_gate(experiment, folder)
                results.save()
            check_gate(experiment, results.gate)
            begun, at_work = time.monotonic(), {pool.submit(_take_run, experiment, folder, run): run for run in left}
            for done, one in enumerate(as_completed(at_work), start=1):
                run, measured = at_work[one], one.result()
                results.measured[run.name] = measured
                results.save()
                hours = (time.monotonic() - begun) / done * (len(left) - done) / 3600
                recalled = " ".join(f"{x:.3f}" for x in np.mean(measured.recall, axis=0))
                print(f"{run.name}: recall {recalled} · {done} of {len(left)} · about {hours:.1f} h left", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _make_documents(task: tuple[TrainingExperiment, Folder, int]) -> None:
    experiment, folder, number = task
    write_documents(experiment.facts, experiment.stages[number], number, folder.documents(number))


def _make_base(task: tuple[TrainingExperiment, Folder, int]) -> None:
    experiment, folder, number = task
    source = folder.base(number).parent / "beginning"
    write_beginning(experiment, number, source)
    for n, stage in enumerate(experiment.pretrain):
        run = folder.base(number).parent / f"run-{n}"
        config = stage.config(Run("exact", "full", number), run, source, folder.documents(n), folder.path / "cache")
        _train(config, run)
        source = run / "model"
    source.rename(folder.base(number))


def write_beginning(experiment: TrainingExperiment, seed: int, folder: Path) -> None:
    """Write a model before any training, with the tokenizer of the documents' words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words, shape = vocabulary(experiment.facts), experiment.model
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=experiment.pretrain[-1].row_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=words.index(BOS),
        eos_token_id=words.index(EOS),
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def _measure_gate(experiment: TrainingExperiment, folder: Folder) -> dict[str, Any]:
    shape, tokens = experiment.measure, experiment.pretrain[-1].row_tokens
    rows = make_rows(experiment.facts, tokens, experiment.gate.distances, 2 * shape.rows, shape.queries)
    recalls, _ = measure([folder.base(n) for n in range(experiment.bases)], "exact", rows)
    return {"bases": [{"recall": recall} for recall in recalls]}


def check_gate(experiment: TrainingExperiment, measured: dict[str, Any]) -> None:
    """Print the recall of each base, and end where one is too low."""
    for number, base in enumerate(measured["bases"]):
        recall = np.mean(base["recall"])
        print(f"base {number}: recall {recall:.3f}", flush=True)
        if recall < experiment.gate.recall:
            raise SystemExit(f"the gate asks for a recall of {experiment.gate.recall}: pretrain longer, or more layers")


def _take_run(experiment: TrainingExperiment, folder: Folder, run: Run) -> Measurement:
    place, begun = folder.path / "runs" / run.name, time.monotonic()
    base = folder.base(run.seed % experiment.bases)
    stage, shape = experiment.extend, experiment.measure
    config = stage.config(run, place, base, folder.documents(len(experiment.pretrain)), folder.path / "cache")
    losses = _train(config, place)
    rows = make_rows(experiment.facts, stage.row_tokens, shape.distances, shape.rows, shape.queries)
    recalled, nats = measure([*sorted((place / "exports").iterdir()), place / "model"], run.arithmetic, rows)
    tenths = [float(part.mean()) for part in np.array_split(np.array(losses), min(10, len(losses)))]
    shutil.rmtree(place)
    return Measurement(recall=recalled, nats=nats, losses=tenths, seconds=time.monotonic() - begun)


def _train(config: Config, folder: Path) -> Sequence[float]:
    """Train from the beginning; return the loss of every step."""
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from torchtrain.run.recipe import train
    from torchtrain.training.events import read_metrics

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    train(config, console=Console(file=StringIO()))
    return [event["loss"] for event in read_metrics(folder / "metrics.jsonl") if "gradient_norm" in event]
