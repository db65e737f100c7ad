"""Train and measure all runs of an experiment, seed after seed, in worker processes.

Every run is a run of `torchtrain train`. Only its measurement is kept.
"""

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np

from anchorline import settings
from anchorline.errors import UserError, quoted
from anchorline.files import replace_file
from torchtrain.config import Config
from torchtrain.errors import TasksUnfinished
from torchtrain.experiment.facts import BOS, EOS, UNKNOWN, make_rows, vocabulary, write_documents
from torchtrain.experiment.measurements import Gate, Measurements
from torchtrain.experiment.recall import Measurement, measure
from torchtrain.experiment.spec import Run, TrainingExperiment, other_setting
from torchtrain.run.lock import hold


@dataclass(frozen=True)
class Folder:
    """An experiment's folder: documents, bases, and the runs while they train."""

    path: Path

    def documents(self, stage: int) -> Path:
        """The documents of a stage, by its number in `stages`."""
        return self.path / f"documents-{stage}.jsonl"

    def base(self, number: int) -> Path:
        """A pretrained model."""
        return self.path / "bases" / str(number) / "model"

    def claim(self, experiment: TrainingExperiment) -> None:
        """Make the folder, and write into it what experiment it is of.

        Raises:
            UserError: it holds another experiment, or other files.
        """
        file, said = self.path / "experiment.yaml", f"--out {quoted(self.path)}"
        if file.is_file():
            there = settings.load(TrainingExperiment, file, example="").model_dump(mode="json")
            if other := other_setting(experiment, there):
                raise UserError(f"{said}: holds an experiment with another {other}; choose another")
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise UserError(f"{said}: holds something else; choose a new folder")
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(file, settings.dump(experiment.model_dump(mode="json")).encode())


def run_experiment(
    experiment: TrainingExperiment, folder: Folder, results: Measurements, workers: int, say: Callable[[str], None]
) -> None:
    """Pretrain the bases, check them, then train and measure every run that the results lack.

    Runs of a seed are compared, so they must begin from one base. Where the folder has no bases, a seed of which the
    results hold only some runs is begun again.

    Args:
        experiment: what is run.
        folder: new, or that of the same experiment; cells and seeds may have changed.
        results: get each measurement as soon as its run is done.
        workers: processes, of one thread each.
        say: takes a line about each run.

    Raises:
        UserError: the folder is of another experiment, or another process is at work in it.
        TasksUnfinished: a base does not recall, or some runs failed.
    """
    folder.claim(experiment)
    with hold(folder.path / "lock"):
        absent = [n for n in range(experiment.bases) if not folder.base(n).is_dir()]
        if absent:
            results.forget_unfinished_seeds(experiment)
        left = [run for run in experiment.runs() if run.name not in results.measured]
        if not left:
            return
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            try:
                stages = [n for n in range(len(experiment.stages)) if not folder.documents(n).is_file()]
                list(pool.map(_make_documents, [(experiment, folder, stage) for stage in stages]))
                list(pool.map(_make_base, [(experiment, folder, n) for n in absent]))
                if absent or results.gate is None:
                    results.gate = _measure_gate(experiment, folder)
                    results.save()
                check_gate(experiment, results.gate, say)
                _take_runs(experiment, folder, results, left, pool, say)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _take_runs(
    experiment: TrainingExperiment,
    folder: Folder,
    results: Measurements,
    left: Sequence[Run],
    pool: ProcessPoolExecutor,
    say: Callable[[str], None],
) -> None:
    begun, failed = time.monotonic(), []
    at_work = {pool.submit(_take_run, experiment, folder, run): run for run in left}
    for done, one in enumerate(as_completed(at_work), start=1):
        run = at_work[one]
        try:
            measured = one.result()
            recalled = " ".join(f"{x:.3f}" for x in np.mean(measured.recall, axis=0))
            line = f"{run.name}: recall {recalled}, {measured.seconds:.0f} s"
            results.measured[run.name] = measured
            results.save()
        except UserError as error:
            failed.append(line := f"{run.name}: {error}")
        hours = (time.monotonic() - begun) / done * (len(left) - done) / 3600
        say(f"{line} · {done} of {len(left)} · about {hours:.1f} h left")
    if failed:
        raise TasksUnfinished(f"{len(failed)} runs failed, the first: {failed[0]}; the same command tries them again")


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
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
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


def _measure_gate(experiment: TrainingExperiment, folder: Folder) -> Gate:
    shape, tokens = experiment.measure, experiment.pretrain[-1].row_tokens
    rows = make_rows(experiment.facts, tokens, experiment.gate.distances, 2 * shape.rows, shape.queries)
    recalls, _ = measure([folder.base(n) for n in range(experiment.bases)], "exact", rows)
    return {"bases": [{"recall": recall} for recall in recalls]}


def check_gate(experiment: TrainingExperiment, measured: Gate, say: Callable[[str], None]) -> None:
    """Refuse a base that does not recall.

    Raises:
        TasksUnfinished: it does not.
    """
    for number, base in enumerate(measured["bases"]):
        line = f"base {number}: recall {np.mean(base['recall']):.3f}"
        say(line)
        if np.mean(base["recall"]) < experiment.gate.recall:
            raise TasksUnfinished(
                f"{line}; the gate asks for {experiment.gate.recall}: pretrain longer, or more layers"
            )


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
