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
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from anchorline.environment import end_with_parent
from anchorline.errors import UserError
from anchorline.files import read_json, replace_file
from benchmarks.experiment.documents import make_rows, with_bos, write_documents
from benchmarks.experiment.recall import Measurement, load, measure, noise_of, sink_of
from benchmarks.experiment.spec import BOS_EACH, Run, TrainingExperiment, round_model
from benchmarks.experiment.words import BOS, EOS, UNKNOWN, vocabulary
from torchtrain.config import Config


@dataclass
class Results:
    """The measurements so far. `experiment` is dumped; `bases` holds what was measured of each seed's base."""

    file: Path
    experiment: dict[str, Any]
    measured: dict[str, Measurement] = field(default_factory=dict)  # by the names of runs
    bases: dict[str, dict[str, Any]] = field(default_factory=dict)  # by seed

    def of(self, experiment: TrainingExperiment) -> dict[Run, Measurement]:
        """Return the measurements of an experiment's runs."""
        return {run: self.measured[run.name] for run in experiment.runs() if run.name in self.measured}

    def left(self, experiment: TrainingExperiment, seed: int) -> list[Run]:
        """Return the runs of a seed that are not measured; none, if its base did not pass."""
        if not self.bases.get(str(seed), {}).get("passed", True):
            return []
        return [run for run in experiment.runs_of(seed) if run.name not in self.measured]

    def forget(self, experiment: TrainingExperiment, seed: int) -> None:
        """Remove the measurements of a seed."""
        self.bases.pop(str(seed), None)
        for run in experiment.runs_of(seed):
            self.measured.pop(run.name, None)

    def save(self) -> None:
        """Write the file."""
        bases = [f'"{seed}": {json.dumps(one)}' for seed, one in sorted(self.bases.items(), key=lambda of: int(of[0]))]
        runs = [f'"{name}": {one.model_dump_json()}' for name, one in sorted(self.measured.items())]
        parts = ["{", f'"experiment": {json.dumps(self.experiment)},', '"bases": {', ",\n".join(bases), "},"]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.file, "\n".join([*parts, '"measured": {', ",\n".join(runs), "}}", ""]).encode())


def read_results(experiment: TrainingExperiment, file: Path) -> Results:
    """Read an experiment's file, or begin one where there is none. Raises UserError: it is of another experiment."""
    dumped = experiment.model_dump(mode="json")
    if not file.is_file():
        return Results(file, dumped)
    content = read_json(file, "--results")
    for name, value in experiment.same.items():
        if content["experiment"].get(name) != value:
            raise UserError(f"--results {file}: is of an experiment with another {name}; choose another file")
    measured = {name: Measurement.model_validate(one) for name, one in content["measured"].items()}
    return Results(file, dumped, measured, content["bases"])


@dataclass(frozen=True)
class Folder:
    """Where an experiment keeps its documents and bases, and the runs while they train."""

    path: Path

    def documents(self, stage: int | str) -> Path:
        """The documents of a stage of pretraining, by its number; of a seed's runs by `extend-` and the seed."""
        return self.path / f"documents-{stage}.jsonl"

    def base(self, seed: int) -> Path:
        """A pretrained model."""
        return self.path / "bases" / str(seed) / "model"


def run_experiment(experiment: TrainingExperiment, out: Path, results: Results, workers: int) -> None:
    """Pretrain and check the base of each seed, then train and measure every run of it that the results lack.

    Runs of a seed are compared, so they must begin from one base. A seed of which the results hold only some runs is
    begun again where the folder has no base of it.

    out: a folder; experiments with other settings have other folders in it.
    results: get each measurement as soon as its run is done.
    workers: processes, of one thread each.
    """
    folder = Folder(out.resolve() / hashlib.sha256(json.dumps(experiment.same).encode()).hexdigest()[:16])
    seeds = range(experiment.first_seed, experiment.first_seed + experiment.seeds)
    seeds = [seed for seed in seeds if results.left(experiment, seed)]
    if not seeds:
        return
    for seed in seeds:
        if not folder.base(seed).is_dir():
            results.forget(experiment, seed)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        try:
            stages = [n for n in range(len(experiment.pretrain)) if not folder.documents(n).is_file()]
            list(pool.map(_make_documents, [(experiment, folder, stage) for stage in stages]))
            for some in (seeds[first : first + workers] for first in range(0, len(seeds), workers)):
                absent = [seed for seed in some if str(seed) not in results.bases]
                made = pool.map(_make_base, [(experiment, folder, seed) for seed in absent])
                for seed, base in zip(absent, made, strict=True):
                    results.bases[str(seed)] = base
                    results.save()
                    print(f"base {seed}: {json.dumps(base)}", flush=True)
                begun = time.monotonic()
                left = [run for seed in some for run in results.left(experiment, seed)]
                at_work = {pool.submit(_take_run, experiment, folder, run): run for run in left}
                for done, one in enumerate(as_completed(at_work), start=1):
                    run, measured = at_work[one], one.result()
                    results.measured[run.name] = measured
                    results.save()
                    minutes = (time.monotonic() - begun) / done * (len(left) - done) / 60
                    nats = " ".join(f"{x:.4f}" for x in np.mean(measured.bos.nats, axis=1))
                    print(f"{run.name}: {nats} · {minutes:.0f} min left of seeds {some}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _make_documents(task: tuple[TrainingExperiment, Folder, int]) -> None:
    experiment, folder, number = task
    write_documents(experiment.task, experiment.pretrain[number], [number], folder.documents(number), None)


def _make_base(task: tuple[TrainingExperiment, Folder, int]) -> dict[str, Any]:
    experiment, folder, seed = task
    base, begun = folder.base(seed), time.monotonic()
    if not base.is_dir():
        source = base.parent / "beginning"
        write_beginning(experiment, seed, source)
        for n, stage in enumerate(experiment.pretrain):
            run = base.parent / f"run-{n}"
            config = stage.config(Run("exact", "full", seed), run, source, folder.documents(n), folder.path / "cache")
            _train(config, run, "exact")
            source = run / "model"
        source.rename(base)
    corpus = folder.documents(f"extend-{seed}")
    config = experiment.extend.config(Run("exact", "full", seed), base, base, corpus, folder.path / "cache")
    write_documents(experiment.task, experiment.extend, [len(experiment.pretrain), seed], corpus, config)
    tokens, gate = experiment.pretrain[-1].row_tokens, experiment.gate
    rows = make_rows(experiment, tokens, gate.distances, experiment.measure.rows)
    model = load(base, "exact")
    nats = float(np.mean(measure([base], "exact", rows).nats))
    noise, sink = noise_of(model, rows, experiment.noise), sink_of(model, rows)
    seconds = round(time.monotonic() - begun, 1)
    return {
        "nats": nats,
        "passed": nats <= gate.nats and sink >= gate.sink,
        "sink": sink,
        "noise": noise,
        "seconds": seconds,
    }


def write_beginning(experiment: TrainingExperiment, seed: int, folder: Path) -> None:
    """Write a model before any training, with the tokenizer of the documents' words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words, shape = vocabulary(experiment.task), experiment.model
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
        head_dim=shape.head_size,
        max_position_embeddings=experiment.extend.row_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": experiment.theta},
        bos_token_id=words.index(BOS),
        eos_token_id=words.index(EOS),
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def _take_run(experiment: TrainingExperiment, folder: Folder, run: Run) -> Measurement:
    place, begun, corpus = folder.path / "runs" / run.name, time.monotonic(), folder.documents(f"extend-{run.seed}")
    corpus = with_bos(corpus) if BOS_EACH in run.variant else corpus
    places = place, folder.base(run.seed), corpus, folder.path / "cache"
    events = _train(experiment.extend.config(run, *places, experiment.weights_of(run)), place, run.arithmetic)
    losses = [event["loss"] for event in events if "gradient_norm" in event]
    rows = make_rows(experiment, experiment.extend.row_tokens, experiment.measure.distances, experiment.measure.rows)
    models = [*sorted((place / "exports").iterdir()), place / "model"]
    tenths = [round(float(part.mean()), 6) for part in np.array_split(np.array(losses), min(10, len(losses)))]
    measured = Measurement(
        bos=measure(models, run.arithmetic, rows),
        no_bos=measure(models, run.arithmetic, rows.without_bos()),
        exact=measure(models, "exact", rows),
        sink=sink_of(load(place / "model", "exact"), rows),
        losses=tenths,
        contexts={start: round(of["loss"], 6) for start, of in events[-1].get("contexts", {}).items()},
        seconds=round(time.monotonic() - begun, 1),
    )
    shutil.rmtree(place)
    return measured


def _train(config: Config, folder: Path, arithmetic: str) -> Sequence[dict[str, Any]]:
    """Train from the beginning; return the events of the run."""
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from torchtrain.run.recipe import train
    from torchtrain.training.events import read_metrics

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    train(config, console=Console(file=StringIO()), on_model=lambda model: round_model(model, arithmetic))
    return list(read_metrics(folder / "metrics.jsonl"))
