"""Runs side by side, paired by sample, and by seed where there are several: the tables of it.

An average is drawn again (bootstrap) by drawing the samples of each task again, the same ones for both runs of a
difference.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.evaluation.intervals import (
    are_equal,
    documents_interval,
    interval_of,
    mcnemar,
    mean_interval,
    paired_interval,
    seeds_interval,
    sign_flip,
    tell_perplexity,
)
from torchtrain.evaluation.measured import (
    ELEVEN,
    THIRTEEN,
    Average,
    Key,
    Measured,
    average_named,
    averages,
    check_alike,
    read_measured,
    tell_length,
)
from torchtrain.evaluation.published import ICL, Column, Publication, PublishedScore, tell_score
from torchtrain.evaluation.results import Found, PerplexityResult, TaskResult
from torchtrain.evaluation.suite import HELLASWAG, LONGBENCH, benchmark_of
from torchtrain.evaluation.tables import ScoreCell, ScoreTable


def tables_of_run(results: Iterable[Found], name: str = "score") -> list[ScoreTable]:
    """Return the tables of one run: tasks by length, groups, and perplexity."""
    run = Measured(name).add(results)
    rows = []
    for task in run.tasks():
        rows.append((task, [_cell(run, (task, length)) for length in run.lengths()]))
    for said, wanted in (("mean of the 13", THIRTEEN), ("mean of the paper's 11", ELEVEN)):
        rows.append((said, [_mean_cell(run, average_named(run, length, wanted)) for length in run.lengths()]))
    heads = ["task", *map(tell_length, run.lengths())]
    tables = [ScoreTable("RULER", heads, rows, _notes([run], "ruler"))] if run.lengths() else []
    return tables + _benchmark_tables([run]) + _perplexity_tables([run])


def compare(
    folders: Sequence[Path | str], last: int | None = None, published: Publication | None = None
) -> tuple[list[ScoreTable], dict[str, str], list[Measured]]:
    """Return the tables of runs side by side, what is said below them, and what they are of.

    Args:
        folders: runs that were evaluated, or folders of results; `NAME=RUN,RUN`: runs of several seeds as one.
        last: of each run, how many checkpoints at most, the last ones; default: all that were evaluated.
        published: a paper's tables, of which a row stands beside a run of the same model, data, variant and length.

    Raises:
        UserError: a folder holds no results or damaged ones; or runs were not measured alike.
    """
    runs = [read_measured(str(folder), last) for folder in folders]
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"RUN: two are called {quoted(twice)}, and a table could not tell them apart; rename a folder")
    for other in runs[1:]:
        check_alike(runs[0], other)
        if other.checkpoints != runs[0].checkpoints:
            raise UserError(
                f"{runs[0].name} has {runs[0].checkpoints} checkpoints, {other.name} {other.checkpoints}, and a mean "
                "over more of them is another; give --last"
            )
    first, tables = runs[0], []
    for said, wanted in averages(first):
        columns = [(length, average_named(first, length, wanted)) for length in first.lengths()]
        known = [(tell_length(length), of) for length, of in columns if not of.missing(first)]
        tables += _side_by_side(said, runs, known, _notes(runs, "ruler"))
        if wanted is THIRTEEN or wanted is ELEVEN:
            keys: list[Column] = [
                ("ruler_13" if wanted is THIRTEEN else "ruler_11", None, length)
                for length, of in columns
                if not of.missing(first)
            ]
            tables += _beside_published(said, runs, published, zip(known, keys, strict=True))
    for length in first.lengths():
        rows = [(task, _cells(runs, (task, length))) for task in first.tasks()]
        heads = ["task", *(run.name for run in runs)]
        tables.append(ScoreTable(f"Tasks at {length:,} tokens", heads, rows, _notes(runs, "ruler")))
        each = [((task, Average(task, [(task, length)])), ("ruler_tasks", length, task)) for task in first.ran(length)]
        tables += _beside_published(f"Tasks at {length:,} tokens", runs, published, each)
    tables += _benchmark_tables(runs, published)
    tables += _right_and_wrong(runs)
    tables += _perplexity_tables(runs)
    facts = {run.name: _tell(run) for run in runs}
    return tables, facts, runs


def _over_seeds(run: Measured, other: Measured, of: Callable[[Measured], float]) -> tuple[float, float] | None:
    """Return the interval of a difference over seeds; None where none pair, or where all differ alike: equal numbers
    say nothing of the next seed.
    """
    if len(run.seeds) < 2 or len(run.seeds) != len(other.seeds):
        return None
    a, b = list(map(of, run.seeds)), list(map(of, other.seeds))
    return None if are_equal(np.subtract(a, b)) else seeds_interval(a, b)


def _side_by_side(
    title: str, runs: list[Measured], columns: Sequence[tuple[str, Average]], notes: list[str]
) -> list[ScoreTable]:
    """Return a table of averages: a row a run, and below them the differences from the first, paired by sample."""
    if not columns:
        return []
    first, cells = runs[0], []
    for _, average in columns:
        of_runs = [_mean_cell(run, average) for run in runs]
        if not average.missing(first):
            of_runs = _best(of_runs, [average.scores(run) for run in runs], runs, average.mean)
        cells.append(of_runs)
    rows = [(run.name, [column[i] for column in cells]) for i, run in enumerate(runs)]
    for run in runs[1:]:
        differences = []
        for _, average in columns:
            if average.missing(first):
                differences.append(ScoreCell(""))
                continue
            mean, low, high = paired_interval(average.scores(run), average.scores(first))
            differences.append(ScoreCell(f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"))
        rows.append((f"{run.name} - {first.name}, paired", differences))
        over = [None if of.missing(first) else _over_seeds(run, first, of.mean) for _, of in columns]
        if any(over):
            told = ["" if of is None else f"[{100 * of[0]:+.1f}, {100 * of[1]:+.1f}]" for of in over]
            rows.append((f"{run.name} - {first.name}, over {len(run.seeds)} seeds", list(map(ScoreCell, told))))
    return [ScoreTable(title, ["", *(name for name, _ in columns)], rows, notes)]


def _beside_published(
    title: str,
    runs: list[Measured],
    published: Publication | None,
    columns: Iterable[tuple[tuple[str, Average], Column]],
) -> list[ScoreTable]:
    """Return a table of runs that the paper has numbers of, each with the paper's own below it; none where it has none.

    Args:
        title: of what.
        runs: measured alike.
        published: the paper's tables, if they are at hand.
        columns: of each its head and average, and where the paper has it.
    """
    if published is None:
        return []
    held, rows, unsaid = [*columns], [], []
    told = {run.name: _published_scores(run, published) for run in runs}
    held = [(of, key) for of, key in held if any(key in scores for scores in told.values())]
    for run in runs:
        scores = {key: told[run.name][key] for _, key in held if key in told[run.name]}
        if not scores:
            continue
        numbers = ", ".join(sorted({str(score.table) for score in scores.values()}))
        rows.append(
            (run.name, [_mean_cell(run, average) if key in scores else ScoreCell("") for (_, average), key in held])
        )
        theirs = [ScoreCell(tell_score(scores[key].score) if key in scores else "") for _, key in held]
        rows.append((f"{run.name}, published (table {numbers})", theirs))
        unsaid += [score.unsaid for score in scores.values()]
    if not rows:
        return []
    notes = [
        f"Published: arXiv {published.arxiv}v{published.version}, of the same model, data, variant and length, "
        "by transcriptions. It is in no mean and no interval.",
        *(f"The paper does not say {what}." for what in dict.fromkeys(unsaid)),
        *_notes(runs, benchmark_of(held[0][0][1].keys[0][0])),
    ]
    return [ScoreTable(f"{title}, beside what is published", ["", *(name for (name, _), _ in held)], rows, notes)]


def _published_scores(run: Measured, published: Publication) -> dict[Column, PublishedScore]:
    """Return what is published of a run: nothing unless all its checkpoints were trained alike and asked as published
    models were, with nothing before the prompts, RULER with vt as it was then and with RULER's kind of haystack.
    """
    results = [of for each in run.found.values() for of in each]
    trainings = {of.training.model_dump_json() if of.training else "" for of in results}
    if len(trainings) != 1 or any(of.settings.anchor for of in results):
        return {}
    found = published.scores_of(results[0].training, results[0].source, {of.step for of in results})
    haystacks = {of.identity.get("materials", {}).get("haystack") for of in results} - {None}
    other = any(text.startswith("demo ") or not text.endswith("sentences english") for text in haystacks)
    if other or "vt" in run.tasks():
        found = {key: score for key, score in found.items() if not key[0].startswith("ruler")}
    return found


def _benchmark_tables(runs: list[Measured], published: Publication | None = None) -> list[ScoreTable]:
    """Return LongBench by group, and the short benchmarks with LongBench's ICL, as the paper lays them out."""
    first, tables = runs[0], []
    asked = first.tasks("longbench")
    of_group = {group: [f"longbench_{name}" for name in names] for group, names in LONGBENCH.items()}
    of_group = {group: [task for task in tasks if task in asked] for group, tasks in of_group.items()}
    for length in first.lengths("longbench"):
        columns = [
            (group, Average(group, [(task, length) for task in tasks])) for group, tasks in of_group.items() if tasks
        ]
        held = "; ".join(
            f"{group}: {', '.join(task.removeprefix('longbench_') for task in tasks)}"
            for group, tasks in of_group.items()
            if tasks
        )
        notes = [f"Mean over the tasks of a group ({held}).", *_notes(runs, "longbench")]
        tables += _side_by_side(f"LongBench at {length:,} tokens", runs, columns, notes)
        whole = [
            (of, ("longbench", length, of[0]))
            for of in columns
            if len(of[1].keys) == len(LONGBENCH[of[0]]) and not of[1].missing(first)
        ]
        tables += _beside_published(f"LongBench at {length:,} tokens", runs, published, whole)
        if len(runs) == 1:
            rows = [(task, [_cell(runs[0], (task, length))]) for task in asked]
            tables.append(ScoreTable(f"LongBench's tasks at {length:,} tokens", ["task", "score"], rows, []))
    columns: list[tuple[str, Average]] = []
    keys: list[Column] = []  # where the paper has them; of a part of a benchmark it has nothing
    if of_group["ICL"]:
        length = first.lengths("longbench")[-1]
        columns.append(
            (f"LongBench ICL ({tell_length(length)})", Average("ICL", [(task, length) for task in of_group["ICL"]]))
        )
        keys.append(("short", length if len(of_group["ICL"]) == len(LONGBENCH["ICL"]) else None, ICL))
    notes = []
    if lengths := first.lengths(HELLASWAG):
        columns.append(("HellaSwag", Average(HELLASWAG, [(HELLASWAG, lengths[-1])])))
        keys.append(("short", None, "HellaSwag"))
        notes += [f"HellaSwag: by the likelihood over the length of the ending{_plain_accuracy(runs, lengths[-1])}."]
    if lengths := first.lengths("mmlu"):
        subjects = [(task, lengths[-1]) for task in first.tasks("mmlu")]
        columns.append((f"MMLU ({len(subjects)} of 57 subjects)", Average("MMLU", subjects, pooled=True)))
        keys.append(("short", None, "MMLU" if len(subjects) == 57 else ""))
        notes += ["MMLU: of all questions, whatever their subject."]
    if len(columns) > bool(of_group["ICL"]):
        every = [*notes, *_notes(runs, "mmlu"), *_notes(runs, HELLASWAG)]
        tables += _side_by_side("Short benchmarks", runs, columns, list(dict.fromkeys(every)))
        ran = [(of, key) for of, key in zip(columns, keys, strict=True) if not of[1].missing(first)]
        tables += _beside_published("Short benchmarks", runs, published, ran)
    return tables


def _plain_accuracy(runs: list[Measured], length: int) -> str:
    """Return what HellaSwag's endings score by the likelihood alone, in words."""
    told = []
    for run in runs:
        plain = [of.acc for result in run.found.get((HELLASWAG, length), []) for of in result.answers]
        known = [of for of in plain if of is not None]
        told += [f"{run.name} {100 * sum(known) / len(known):.1f}"] if known else []
    return f"; by the likelihood alone {', '.join(told)}" if told else ""


def _right_and_wrong(runs: list[Measured]) -> list[ScoreTable]:
    """Return how many samples one of two runs alone gets right, of tasks that have no other scores, and McNemar's p."""
    first, tables = runs[0], []
    if len(runs) < 2:
        return []
    lengths = sorted({length for _, length in first.found})
    for length in lengths:
        of_tasks = [
            Average(task, [(task, length)]) for task in [*first.tasks(), HELLASWAG] if (task, length) in first.found
        ]
        subjects = [(task, length) for task in first.tasks("mmlu") if (task, length) in first.found]
        of_tasks += [Average("mmlu", subjects, pooled=True)] if subjects else []
        rows = []
        for of_task in of_tasks:
            scores = [of_task.scores(run)[0] for run in runs]
            if not all(np.isin(of, (0.0, 1.0)).all() for of in scores):
                continue
            cells = []
            for run, of in zip(runs[1:], scores[1:], strict=True):
                alone, first_alone, p = mcnemar(of, scores[0])
                cells.append(ScoreCell(f"{run.name} {alone}, {first.name} {first_alone}, p {p:.2g}"))
            rows.append((of_task.name, cells))
        if rows:
            heads = ["task", *(f"{run.name} against {first.name}" for run in runs[1:])]
            note = "McNemar's exact test, two-sided, of each task alone: of many tasks, some p are small by chance."
            tables.append(ScoreTable(f"Right in one run alone, at {length:,} tokens", heads, rows, [note]))
    return tables


def _cells(runs: list[Measured], key: Key) -> list[ScoreCell]:
    cells = [_cell(run, key) for run in runs]
    if key not in runs[0].found:
        return cells
    return _best(cells, [[run.scores(key)] for run in runs], runs, lambda run: float(run.scores(key).mean()))


def _best(
    cells: list[ScoreCell], scores: Sequence[list[np.ndarray]], runs: list[Measured], mean: Callable[[Measured], float]
) -> list[ScoreCell]:
    """Make the best of a column bold where the interval from each other run leaves out zero: over samples and over
    seeds, where there are several.
    """
    best = max(range(len(scores)), key=lambda i: np.mean([of.mean() for of in scores[i]]))
    others = [i for i in range(len(scores)) if i != best]

    def is_above(i: int) -> bool:
        over = _over_seeds(runs[best], runs[i], mean)
        paired = over[0] > 0 if over is not None else not (runs[best].seeds or runs[i].seeds)
        return paired and _separates(scores[best], scores[i])

    if others and all(map(is_above, others)):
        cells[best] = ScoreCell(cells[best].text, bold=True)
    return cells


def _separates(best: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Whether the interval leaves out zero, and drawing signs agrees: of few samples the bootstrap knows too little."""
    return paired_interval(best, other)[1] > 0 and sign_flip(best, other) < 0.05


def _cell(run: Measured, key: Key) -> ScoreCell:
    if key not in run.found:
        return ScoreCell("not run")
    mean, low, high = mean_interval(list(run.scores(key)))
    return ScoreCell(f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]")


def _mean_cell(run: Measured, average: Average) -> ScoreCell:
    """Return an average, its interval, its spread over checkpoints."""
    if missing := average.missing(run):
        return ScoreCell(f"none: {missing} did not run")
    mean, low, high = interval_of(average.scores(run))
    spread = average.spread(run)
    over = "" if spread is None else f" ±{100 * spread:.1f}"
    return ScoreCell(f"{100 * mean:.1f}{over} [{100 * low:.1f}, {100 * high:.1f}]")


def _perplexity_tables(runs: list[Measured]) -> list[ScoreTable]:
    tables = []
    for length in sorted(runs[0].perplexity):
        first = runs[0].perplexity[length][0]
        head = ["", *(f"{of.first:,} to {of.end - 1:,}" for of in first.buckets)]
        strided = {run.name: [of.strided for of in run.perplexity[length] if of.strided is not None] for run in runs}
        head += [f"in windows of {max(length // 2, 2):,}"] * bool(strided[runs[0].name])
        rows = []
        for run in runs:
            each = np.mean([[of.losses for of in result.buckets] for result in run.perplexity[length]], axis=0)
            windows = [tell_perplexity(float(np.mean(strided[run.name])))] if strided[run.name] else []
            rows.append((run.name, [ScoreCell(told) for told in [*map(_tell_level, each), *windows]]))
        for run in runs[1:]:
            one, other = (
                np.mean([[of.losses for of in result.buckets] for result in of_run.perplexity[length]], axis=0)
                for of_run in (run, runs[0])
            )
            cells = [ScoreCell(_tell_difference(one[i] - other[i])) for i in range(len(first.buckets))]
            blank = [ScoreCell("")] * bool(strided[run.name])  # of windows there is one loss of all documents
            cells += blank
            rows.append((f"loss: {run.name} - {runs[0].name}, paired", cells))
            over = [
                _over_seeds(run, runs[0], lambda seed, i=i, n=length: _bucket_mean(seed, n, i))
                for i in range(len(first.buckets))
            ]
            if all(over):
                told = [ScoreCell(f"[{of[0]:+.3f}, {of[1]:+.3f}]") for of in over if of is not None]
                told += blank
                rows.append((f"loss: {run.name} - {runs[0].name}, over {len(run.seeds)} seeds", told))
        count = len(first.buckets[0].losses)
        notes = [f"Of {first.text}, {count} documents; tokens of a position alike, with all that stands before them."]
        if count > 1:
            said = "in brackets 95 per cent intervals over documents (Student's, of the mean loss or difference)"
            notes.append(f"n = {count} documents; {said}.")
        else:
            notes.append("n = 1 document, which has no interval.")
        tables.append(ScoreTable(f"Perplexity by position at {length:,} tokens", head, rows, notes))
    return tables


def _tell_level(losses: np.ndarray) -> str:
    """Return the perplexity of documents' losses, with its interval where there are several."""
    found = documents_interval(losses)
    if found is None:
        return tell_perplexity(float(losses.mean()))
    mean, low, high = map(tell_perplexity, found)
    return f"{mean} [{low}, {high}]"


def _tell_difference(losses: np.ndarray) -> str:
    """Return the mean of documents' differences of losses, with its interval where there are several."""
    found = documents_interval(losses)
    return f"{losses.mean():+.3f}" if found is None else f"{found[0]:+.3f} [{found[1]:+.3f}, {found[2]:+.3f}]"


def _bucket_mean(run: Measured, length: int, bucket: int) -> float:
    return float(np.mean([result.buckets[bucket].losses for result in run.perplexity[length]]))


def _notes(runs: list[Measured], benchmark: str) -> list[str]:
    first = runs[0]
    found = {key: results for key, results in first.found.items() if benchmark_of(key[0]) == benchmark}
    counts = sorted({len(results[0].answers) for results in found.values()})
    notes = []
    if counts:
        said = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        notes.append(f"n = {said} samples of each task and length; in brackets 95 per cent intervals (Wilson).")
    texts = {text for results in found.values() if (text := results[0].identity.get("materials", {}).get("haystack"))}
    notes += [f"Haystack: {text}." for text in sorted(texts)]
    missing = {
        f"{task}: {why}" for run in runs for (task, _), why in run.not_run.items() if benchmark_of(task) == benchmark
    }
    if missing:
        notes.append("Not run: " + "; ".join(sorted(missing)) + ".")
    return notes


def _tell(run: Measured) -> str:
    some: Mapping[object, Sequence[TaskResult | PerplexityResult]] = {**run.found, **run.perplexity}
    if not some:
        return "nothing ran"
    results = next(iter(some.values()))
    names = ", ".join(result.checkpoint if result.step is None else f"step {result.step:,}" for result in results)
    anchor = f", anchor {results[0].settings.anchor} before each prompt" if results[0].settings.anchor else ""
    return (
        f"{results[0].source}: {names}; {results[0].settings.dtype} on {results[0].versions.get('torch', '')}{anchor}"
    )
