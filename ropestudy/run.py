"""A study from its configuration to `results.json`: cells one after the other, each kept as soon as it is finished."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import jax

import jaxref
from anchorline.environment import git_state, processor, versions
from anchorline.errors import UserError
from anchorline.files import MOST_JSON, read_file, replace_file
from jaxref.weights import to_arrays
from ropestudy.cells import LIBRARIES, Bench
from ropestudy.experiments import make_questions
from ropestudy.models import INITIALISATIONS, Pretrained, load_pretrained
from ropestudy.schema import ModelDescription, Results, StudyEnvironment, TextDescription, write_results
from ropestudy.spec import StudyConfig, longest
from ropestudy.text import read_pool

CONFIG, CELLS, RESULTS = "config.json", "cells", "results.json"

OnCell = Callable[[str, int, int], None]  # what was done, cells done, cells in all


def run_study(config: StudyConfig, out: Path, progress: OnCell | None = None, command: str = "") -> Results:
    """Run a study, or what is left of it, and write `results.json` into `out`, after each
    experiment with all that is finished.

    Finished cells are kept in `out/cells`, each named by a hash of what its numbers depend on. An interrupted run
    continues after the last of them. A run with other sources, another model or another device computes them again.

    Raises UserError, one line, before anything is computed: see `claim`, `models.load_pretrained` and `text.read_pool`.
    """
    created = datetime.now(UTC)
    claim(config, out)
    pretrained = load_pretrained(config.model)
    _check_bos(config, pretrained)
    sections = config.experiments.values()
    count = max(max(section.sequences, getattr(section, "documents", 1)) for section in sections)
    tokens = config.text.tokens or max(map(longest, sections))
    pool = read_pool(config.text, pretrained.tokenizer, count, tokens, config.seed)
    _check_vocabulary(pretrained, max(int(ids.max()) for ids in pool.ids))

    bench = Bench(config, pretrained, pool)
    found: Results | None = None
    planned = make_questions(config)
    counts = {name: (0, sum(len(task.cells) for task in tasks)) for name, tasks in planned.items()}
    total, done, seconds, records = sum(whole for _, whole in counts.values()), 0, 0.0, []
    write_config(config, out)  # last: a mistake found on the way must not mark the folder
    for name, tasks in planned.items():
        for task in tasks:
            results = []
            for cell in task.cells:
                results.append(bench.kept_or_run(cell, out / CELLS))
                done, seconds = done + 1, seconds + results[-1].seconds
                if progress:
                    names = ", ".join(cell.conditions)
                    what = f"{cell.experiment} {cell.model}, {cell.tokens} tokens, sequence {cell.number}: {names}"
                    progress(f"{what} ({results[-1].seconds:.1f} s)", done, total)
            records += task.make_records(results)
        counts[name] = (counts[name][1], counts[name][1])
        # After each experiment: what was found so far can be read while the rest is computed.
        found = Results(
            title=config.title,
            created=created.isoformat(timespec="seconds"),
            seconds=seconds,
            command=command,
            environment=environment(),
            config=config.model_dump(mode="json"),
            model=describe(config, pretrained, {record.model for record in records}),
            text=TextDescription(source=config.text.source, bos=pretrained.bos, documents=pool.names),
            cells=dict(counts),
            records=list(records),
        )
        write_results(found, out / RESULTS)
    assert found is not None, "a study has an experiment"
    return found


def claim(config: StudyConfig, out: Path) -> None:
    """Check that `out` is new, empty, or this very study's. Raises UserError, one line, otherwise."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file; give a folder")
    if not out.exists() or not any(out.iterdir()):
        return
    file = out / CONFIG
    if not file.is_file():
        raise UserError(f"--out: {out} is not empty, and not a study's folder; give another")
    if read_file(file, MOST_JSON) != _dump(config):
        raise UserError(f"--out: {out} holds another study (its {CONFIG} differs); give another folder, or remove it")


def write_config(config: StudyConfig, out: Path) -> None:
    """Mark the folder as this study's."""
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / CONFIG, _dump(config))


def environment() -> StudyEnvironment:
    """Return where this process runs."""
    commit, dirty = git_state(Path(jaxref.__file__).parents[1])
    return StudyEnvironment(
        versions=versions(LIBRARIES),
        hardware=processor(),
        device=f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
        git_commit=commit,
        git_dirty=dirty,
    )


def describe(config: StudyConfig, pretrained: Pretrained, used: set[str]) -> ModelDescription:
    """Return the model in words and numbers. used: names of the models that records are of."""
    return ModelDescription(
        source=config.model.source,
        config=pretrained.config_json,
        weights=config.model.weights,
        parameters=sum(int(array.size) for array in to_arrays(pretrained.decoder).values()),
        sha256=pretrained.sha256,
        initialisations={name: words for name, words in INITIALISATIONS.items() if name in used},
    )


def _check_bos(config: StudyConfig, pretrained: Pretrained) -> None:
    if pretrained.bos is None and (config.masks is not None or config.text.bos == "first"):
        what = "masks: it" if config.masks is not None else "text.bos: 'first'"
        raise UserError(
            f"{what} needs a BOS, and the tokenizer of {config.model.source!r} has none; choose another model"
        )


def _check_vocabulary(pretrained: Pretrained, largest: int) -> None:
    if largest >= pretrained.config.vocab_size:
        raise UserError(
            f"model.source: its tokenizer.json gives token {largest}, beyond its vocabulary of "
            f"{pretrained.config.vocab_size}: they do not belong together"
        )


def _dump(config: StudyConfig) -> bytes:
    return (json.dumps(config.model_dump(mode="json"), indent=1) + "\n").encode()
