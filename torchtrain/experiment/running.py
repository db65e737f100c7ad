"""All runs of an experiment, seed after seed, by worker processes that take one run after another.

Every run is a run of `torchtrain train` (`torchtrain.run.recipe.train`). What is kept of it is its measurement; its
folder goes when that is written.
"""

import json
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
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import read_json, replace_file
from torchtrain.config import Config
from torchtrain.errors import TasksUnfinished
from torchtrain.experiment.facts import BOS, EOS, UNKNOWN, make_rows, vocabulary, write_documents
from torchtrain.experiment.measuring import Measurement, bos_masses, measure
from torchtrain.experiment.spec import Run, TrainingExperiment, other_setting
from torchtrain.run.lock import hold


@dataclass(frozen=True)
class Folder:
    """An experiment's folder."""

    path: Path

    @property
    def experiment(self) -> Path:
        """What is run, every default written out."""
        return self.path / "experiment.yaml"

    @property
    def gate(self) -> Path:
        """What the bases do."""
        return self.path / "gate.json"

    def documents(self, stage: int) -> Path:
        """What a stage trains on, by its number in `stages`."""
        return self.path / f"documents-{stage}.jsonl"

    def base(self, number: int) -> Path:
        """A pretrained model; number -1 is the one before any training."""
        return self.path / "bases" / str(number) / "model"

    def run(self, run: Run) -> Path:
        """The folder of a run, while it trains."""
        return self.path / "runs" / run.name

    def measurement(self, run: Run) -> Path:
        """What was measured of a run."""
        return self.path / "measured" / f"{run.name}.json"

    def measured(self, experiment: TrainingExperiment) -> dict[Run, Measurement]:
        """Return all that is measured so far."""
        there = [run for run in experiment.runs() if self.measurement(run).is_file()]
        return {run: Measurement.model_validate(read_json(self.measurement(run))) for run in there}


def run_experiment(
    experiment: TrainingExperiment,
    folder: Folder,
    workers: int,
    seeds: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Pretrain the bases, check the gate, then train and measure every run that is not measured yet.

    Args:
        experiment: what.
        folder: its own, new or one of the same experiment; cells and seeds may have changed.
        workers: processes, of one thread each.
        seeds: the first so many; default: all.
        say: takes a line about each run.

    Raises:
        UserError: the folder is of another experiment, or another process is at work in it.
        TasksUnfinished: the gate failed, or some runs did.
    """
    check_folder(experiment, folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    with hold(folder.path / "lock"):
        replace_file(folder.experiment, settings.dump(experiment.model_dump(mode="json")).encode())
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            try:
                bases = range(experiment.bases)
                stages = [n for n in range(len(experiment.stages)) if not folder.documents(n).is_file()]
                list(pool.map(_make_documents, [(experiment, folder, stage) for stage in stages]))
                left = [(experiment, folder, n) for n in bases if not folder.base(n).is_dir()]
                list(pool.map(_make_base, left))
                _check_gate(experiment, folder, say)
                _take_runs(experiment, folder, seeds, pool, say)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def check_folder(experiment: TrainingExperiment, folder: Folder) -> None:
    """Refuse a folder that is of something else.

    Raises:
        UserError: it holds another experiment, or other files.
    """
    if folder.experiment.is_file():
        found = settings.load(TrainingExperiment, folder.experiment, example="").model_dump(mode="json")
        if other := other_setting(experiment, found):
            raise UserError(f"--out {quoted(folder.path)}: holds an experiment with another {other}; choose another")
    elif folder.path.is_dir() and any(folder.path.iterdir()):
        raise UserError(f"--out {quoted(folder.path)}: holds something else; choose a new folder")


def share(experiment: TrainingExperiment, folder: Folder, file: Path) -> None:
    """Bring a file of measurements and a folder to the same: each gets what only the other holds.

    A seed that lacks some cells in the file is not taken from it: each machine pretrains its own bases,
    and what is compared must begin from one base.

    Args:
        experiment: what.
        folder: its own, new or one of the same experiment.
        file: made if it is not there.

    Raises:
        UserError: the folder or the file is of another experiment, or the file is damaged.
    """
    check_folder(experiment, folder)
    content = read_json(file, "--results") if file.is_file() else {"experiment": experiment.model_dump(mode="json")}
    if other := other_setting(experiment, content.get("experiment", {})):
        raise UserError(f"--results {quoted(file)}: is of an experiment with another {other}; choose another file")
    try:
        kept = {name: Measurement.model_validate(one) for name, one in content.get("measured", {}).items()}
    except ValueError as error:
        raise UserError(f"--results {quoted(file)}: is damaged ({quoted_reason(error)})") from None
    folder.path.mkdir(parents=True, exist_ok=True)
    replace_file(folder.experiment, settings.dump(experiment.model_dump(mode="json")).encode())
    runs = list(experiment.runs())
    partial = {run.seed for run in runs if run.name not in kept}
    for run in runs:
        if run.seed not in partial and not folder.measurement(run).is_file():
            folder.measurement(run).parent.mkdir(exist_ok=True)
            replace_file(folder.measurement(run), kept[run.name].model_dump_json().encode())
    kept |= {run.name: found for run, found in folder.measured(experiment).items()}
    if folder.gate.is_file():
        content["gate"] = read_json(folder.gate)
    content["experiment"] = experiment.model_dump(mode="json")  # cells and seeds may have become more
    about = [f'"{name}": {json.dumps(content[name])},' for name in ("experiment", "gate") if name in content]
    lines = [f'"{name}": {one.model_dump_json()}' for name, one in sorted(kept.items())]
    replace_file(file, "\n".join(["{", *about, '"measured": {', ",\n".join(lines), "}}", ""]).encode())


def _take_runs(
    experiment: TrainingExperiment,
    folder: Folder,
    seeds: int | None,
    pool: ProcessPoolExecutor,
    say: Callable[[str], None],
) -> None:
    left = [run for run in experiment.runs(seeds) if not folder.measurement(run).is_file()]
    begun, failed = time.monotonic(), []
    at_work = {pool.submit(_take_run, experiment, folder, run): run for run in left}
    for done, one in enumerate(as_completed(at_work), start=1):
        run = at_work[one]
        try:
            line = one.result()
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


def _check_gate(experiment: TrainingExperiment, folder: Folder, say: Callable[[str], None]) -> None:
    """Measure the bases once, and refuse one that does not recall.

    Raises:
        TasksUnfinished: it does not.
    """
    gate, shape = experiment.gate, experiment.measure
    if not folder.gate.is_file():
        rows = make_rows(
            experiment.facts, experiment.pretrain[-1].row_tokens, gate.distances, 2 * shape.rows, shape.queries
        )
        bases = [folder.base(n) for n in range(experiment.bases)]
        found = [
            {"recall": recalled, "bos_mass": bos_masses(base, rows)}
            for base, recalled in zip(bases, measure(bases, "exact", rows)[0], strict=True)
        ]
        replace_file(folder.gate, json.dumps({"bases": found}, indent=1).encode())
    for number, base in enumerate(read_json(folder.gate)["bases"]):
        recalled, mass = float(np.mean(base["recall"])), max(max(heads) for heads in base["bos_mass"])
        said = f"base {number}: recall {recalled:.3f}, attention on BOS {mass:.3f} in the head that gives it most"
        say(said)
        if recalled < gate.recall or mass < gate.bos_mass:
            raise TasksUnfinished(
                f"{said}; the gate asks for {gate.recall} and {gate.bos_mass}: pretrain longer, or more layers"
            )


def _take_run(experiment: TrainingExperiment, folder: Folder, run: Run) -> str:
    place, begun = folder.run(run), time.monotonic()
    base = folder.base(run.seed % experiment.bases)
    stage, shape = experiment.extend, experiment.measure
    config = stage.config(run, place, base, folder.documents(len(experiment.pretrain)), folder.path / "cache")
    losses = _train(config, place)
    rows = make_rows(experiment.facts, stage.row_tokens, shape.distances, shape.rows, shape.queries)
    models = [*sorted((place / "exports").iterdir()), place / "model"]
    recalled, nats = measure(models, run.arithmetic, rows)
    tenths = [float(part.mean()) for part in np.array_split(np.array(losses), min(10, len(losses)))]
    found = Measurement(recall=recalled, nats=nats, losses=tenths, seconds=time.monotonic() - begun)
    folder.measurement(run).parent.mkdir(exist_ok=True)
    replace_file(folder.measurement(run), found.model_dump_json().encode())
    shutil.rmtree(place)
    shown = " ".join(f"{x:.3f}" for x in np.mean(recalled, axis=0))
    return f"{run.name}: recall {shown}, {found.seconds:.0f} s"


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
