"""Run a study from its configuration to `results.json`. Each finished cell is kept, so a study can continue."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import jax

import jaxref
from anchorline.environment import git_state, processor, versions
from anchorline.errors import UserError
from jaxref.model import to_arrays
from ropestudy.cells import LIBRARIES, Bench
from ropestudy.experiments import make_questions
from ropestudy.models import INITIALISATIONS, Pretrained, load_pretrained
from ropestudy.schema import RESULTS, AnyRecord, ModelDescription, Results, TextDescription, read_results, write_results
from ropestudy.spec import StudyConfig
from ropestudy.text import read_pool

OnCell = Callable[[str, int, int], None]  # what was done, cells done, cells in all


def run_study(config: StudyConfig, out: Path, progress: OnCell = lambda *_: None, command: str = "") -> Results:
    """Run a study, or what is left of it. Write `results.json` into `out` whenever an experiment is finished.

    Finished cells are kept in `out/cells`, each named by a hash of what its numbers depend on. With other sources,
    another model or another device the cells are computed again. Raises UserError: before anything is computed: `out`
    holds another study, or the model or the text cannot be used.
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    _check_folder(config, out)
    pretrained = load_pretrained(config.model)
    for name in ("masks", "places"):
        if pretrained.bos is None and name in config.experiments:
            raise UserError(
                f"{name}: needs a BOS, and the tokenizer of {config.model.source!r} has none; set {name}: off"
            )
    sections = config.experiments.values()
    count = max(max(section.sequences, getattr(section, "documents", 1)) for section in sections)
    tokens = config.text.tokens or max(section.longest for section in sections)
    pool = read_pool(config.text, pretrained.tokenizer, count, tokens, config.seed)
    if (largest := max(int(ids.max()) for ids in pool.ids)) >= pretrained.config.vocab_size:
        raise UserError(
            f"model.source: its tokenizer.json gives token {largest}, beyond its vocabulary of "
            f"{pretrained.config.vocab_size}: they do not belong together"
        )

    bench, questions = Bench(config, pretrained, pool), make_questions(config)
    out.mkdir(parents=True, exist_ok=True)
    total, done, seconds = sum(len(one.cells) for some in questions.values() for one in some), 0, 0.0
    commit, dirty = git_state(Path(jaxref.__file__).parents[1])
    records: list[AnyRecord] = []
    results = None
    for asked in questions.values():
        for question in asked:
            answers = []
            for cell in question.cells:
                answers.append(bench.kept_or_run(cell, out / "cells"))
                done, seconds = done + 1, seconds + answers[-1].seconds
                what = f"{cell.experiment} {cell.model}, {cell.tokens} tokens, {cell.about}"
                progress(f"{what} ({answers[-1].seconds:.1f} s)", done, total)
            records += question.make_records(answers)
        results = Results(
            title=config.title,
            created=created,
            seconds=seconds,
            command=command,
            environment={
                "versions": versions(LIBRARIES),
                "hardware": processor(),
                "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
                "git_commit": commit,
                "git_dirty": dirty,
            },
            config=config.model_dump(mode="json"),
            model=_describe_model(config, pretrained, {record.model for record in records}),
            text=TextDescription(source=config.text.source, bos=pretrained.bos, documents=pool.names),
            records=list(records),
        )
        write_results(results, out)
    assert results is not None, "a study has an experiment"
    return results


def _check_folder(config: StudyConfig, out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file; give a folder")
    if (out / RESULTS).exists() and read_results(out).config != config.model_dump(mode="json"):
        raise UserError(f"--out: {out} holds another study (the config in its {RESULTS} differs); give another folder")


def _describe_model(config: StudyConfig, pretrained: Pretrained, used: set[str]) -> ModelDescription:
    return ModelDescription(
        source=config.model.source,
        config=pretrained.config_json,
        parameters=sum(int(array.size) for array in to_arrays(pretrained.decoder).values()),
        sha256=pretrained.sha256,
        initialisations={name: one.about for name, one in INITIALISATIONS.items() if name in used},
    )
