"""`parity compare`: from dumps to a verdict: which name breaks first, what passed before it, and what it looks like."""

import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from anchorline.environment import processor, usable_cores
from anchorline.errors import UserError, did_you_mean, some
from parity_tests.comparing.dumps import Array, Dump, choose
from parity_tests.comparing.hints import MOST, explain, know
from parity_tests.comparing.judging import (
    FEW,
    NO_ROUNDING,
    SHOWN,
    Found,
    Rule,
    Sides,
    dtype_of_values,
    lay_out,
    measure_all,
)
from parity_tests.mistakes.words import explains, sentence, where
from parity_tests.report.measure import MASKED, join_problems, judge_exactly
from parity_tests.report.names import axis_names, bare, group_of, has_place, split, whole
from parity_tests.report.schema import CaseReport, Divergence, Environment, Report

FINER = ("float8_e5m2", "float8_e4m3", "bfloat16", "float16", "float32", "float64")
LIBRARIES = ("numpy", "safetensors", "ml_dtypes", "anchorline")
_FEWEST = 8  # numbers; in trials right arrays of 3 erred by 2.02 of their allowance
_OF_MAPS = "a map (--names) makes shapes alike: `python -m pydoc parity_tests.comparing.names` lists its steps"
HANDED_ON = 0.5  # of the ratio of an array: what errs more before it is handed on
ALLOWANCES = {
    "reference": "twice what the reference errs against the truth, and one rounding of the truth's size",
    "floor": "noise floor only, not a proof: the truth's own rounding through {operations} operations a layer",
    "difference": "none: two candidates without a truth",
}


def compare(
    candidate: Dump,
    truth: Dump | None,
    reference: Dump | None,
    against: Dump | None,
    rule: Rule,
    only: Sequence[str] = (),
    tell: Callable[[str, int, int], None] = lambda *_: None,
) -> Report:
    """Judge a dump.

    Args:
        candidate: what is judged.
        truth: the same computation in float64, or in a finer dtype than the candidate's.
        reference: the same computation with the candidate's roundings; None: the noise floor alone is allowed.
        against: instead of a truth, another candidate.
        rule: how arrays are judged; its kind follows from what is given.
        only: patterns of the names that are compared; all, where there is none.
        tell: called after each array with its name, its number and how many there are.

    Raises UserError: no name in common; a truth that is no finer than the candidate; or a reference that is another
        computation, or makes other roundings.
    """
    started, created = time.perf_counter(), datetime.now(UTC)
    right = truth or against
    assert right is not None, "the command asks for one of them"
    dumps = {"candidate": candidate, "truth": truth, "reference": reference, "against": against}
    settings = {role: dump.source for role, dump in dumps.items() if dump is not None}
    _refuse_own_reference(settings)
    if reference is not None:
        _refuse_other_inputs(right, reference)
    pairs, problems, apart = _pair(candidate, right, reference, only)
    if truth is not None:
        _refuse_coarse(pairs, rule.dtype)
    rule = replace(rule, padding_BT=_padding(right))
    found, not_judged = measure_all(pairs, rule, tell)
    problems += not_judged
    if not problems and not any(np.prod(f.measure.shape) for f in found):
        raise UserError(f"candidate {candidate.source}: no array holds a number: there is nothing to judge")
    if apart and not any(f.dtype for f in found):
        raise UserError(f"candidate: nothing that was computed is compared ({apart[0]}); mend the map")
    divergence, notes = None, []
    first = next((f for f in found if not f.measure.passed), None)
    _refuse_other_roundings(found, first is None)
    if first:
        with np.errstate(invalid="ignore"):  # of infinite numbers
            divergence = _diverges(first, found, pairs, rule, {**candidate.config, **right.config})
        notes = _notes(first, found, pairs, rule)
        if first.dtype and not (right.places or candidate.places):
            notes += _unordered(first, found)
    notes += _left_out(rule, found) + [_OF_MAPS] * any(" has shape " in problem for problem in not_judged)
    told = [note for dump in dumps.values() if dump for note in dump.notes[:SHOWN]]
    # One shape of report for all verbs: a dump is a case.
    command = shlex.join(["parity", *sys.argv[1:]])
    seconds = time.perf_counter() - started
    report = CaseReport(
        id=Path(candidate.source).stem,
        settings=settings,
        preset=ALLOWANCES[rule.kind].format(operations=rule.operations),
        command=command,
        seconds=seconds,
        problem=join_problems(problems),
        first_divergence=divergence,
        measures=[f.measure for f in found],
        notes=[*notes, *_twins(found, pairs, rule), *_hidden(found), *_finer(found, pairs, rule), *apart, *told],
    )
    here = Environment.here(LIBRARIES, processor(), usable_cores(), Path.cwd())
    title, when = f"{candidate.source} against {right.source}", created.isoformat(timespec="seconds")
    return Report(title=title, created=when, seconds=seconds, command=command, environment=here, cases=[report])


def _pair(
    candidate: Dump, truth: Dump, reference: Dump | None, only: Sequence[str]
) -> tuple[dict[str, Sides], list[str], list[str]]:
    """The arrays of all sides by name, in the truth's order; names that one side lacks; and in words those that one
    engine alone can have.
    """
    wanted = dict.fromkeys(name.rpartition(": ")[0] for name in choose(candidate.arrays, only))
    for dump in filter(None, (truth, reference)):
        steps = {name.rpartition(": ")[0] for name in dump.arrays}
        if gone := [step for step in wanted if step not in steps]:
            raise UserError(f"{dump.source} lacks {some(gone)}, which {candidate.source} has; record it, or use --only")
    labels, only = only, [pattern if pattern.startswith("!") else whole(pattern) for pattern in only]
    names = choose(truth.arrays, only)
    apart = _not_shared(candidate, truth, only)
    shared = [name for name in names if name in candidate.arrays and name not in apart]
    if not shared:
        mine, theirs = (f"{dump.source} has {some(list(dump.arrays))}" for dump in (candidate, truth))
        raise UserError(f"no name is in both dumps: {mine}; {theirs}; give a map with --names or --truth-names")
    problems = []
    for words, missing in (
        ("the candidate lacks", [name for name in names if name not in candidate.arrays]),
        ("the candidate alone has", [name for name in choose(candidate.arrays, only) if name not in truth.arrays]),
    ):
        if missing := [name for name in missing if name not in apart]:
            problems.append(f"{words} {some(missing)}")
    if reference is not None and (missing := [name for name in shared if name not in reference.arrays]):
        raise UserError(f"reference: lacks {some(missing)}, which the other sides have; record it, or use --only")
    pairs: dict[str, Sides] = {}
    for name in shared:
        mine, true = candidate.arrays[name], truth.arrays[name]
        other = reference.arrays[name] if reference else []
        if len(true) == 1:  # else ranks on both sides: each against its own
            shape = true[0].load().shape
            mine, other = _joined(mine, shape), _joined(other, shape) if other else []
        several = max(len(mine), len(true), len(other))
        alone = len(true) == 1  # replicas are compared with it, each
        for role, ranks in (("candidate", mine), ("truth", true), ("reference", other)):
            if len(ranks) != several and not (alone and len(ranks) == 1) and (ranks or reference):
                raise UserError(f"{role}: {name} comes from {len(ranks)} ranks, and elsewhere from {several}; give all")
        for rank in range(several):
            label = f"{name} [rank {rank}]" if several > 1 else name
            theirs = other[rank if len(other) > 1 else 0] if other else None
            if choose([label], labels) or choose([name], labels):
                pairs[label] = (mine[rank if len(mine) > 1 else 0], true[0 if alone else rank], theirs)
    if not pairs:
        raise UserError(f"--only {labels[0]}: fits no rank; mend it, or take it out")
    notes = [f"not compared: {len(apart)} names that the engines do not share ({some(apart)})"] if apart else []
    return pairs, problems, notes


def _not_shared(candidate: Dump, truth: Dump, only: Sequence[str]) -> list[str]:
    """Names that say nothing of the other engine, where the sides have other maps: those without a counterpart that
    one map lacks, and outputs of modules that both engines call alike and neither map knows. Raises UserError: a map
    of the user's own makes a name that the other side lacks.
    """
    for mine, other in ((candidate, truth), (truth, candidate)):
        for target in mine.targets if mine.called else ():
            theirs = [bare(name) for name in other.arrays]
            if choose(map(bare, choose(mine.arrays, only)), [target]) and not choose(theirs, [target]):
                near = did_you_mean(target, [re.sub(r"\d+", "*", n, count=1) if "*" in target else n for n in theirs])
                words = f"{mine.called}: {target}: {other.source} has no such name{near}; mend it, or take it out"
                raise UserError(words.replace("*", "{i}"))
    maps = {candidate.targets, truth.targets}
    found = []
    for name in choose({**truth.arrays, **candidate.arrays}, only) if len(maps) > 1 else ():
        own = bare(name)
        unknown = [bool(targets) and not choose([own], targets) for targets in maps]
        if name in candidate.arrays and name in truth.arrays:
            unknown = [all(unknown) and group_of(name) == "forward" and not own.startswith("inputs.")]
        found += [name] if any(unknown) else []
    return found


def _count(found: Sequence[Found]) -> int:
    """How many arrays there are; those of ranks are one."""
    return len({whole(f.name) for f in found})


def _joined(ranks: Sequence[Array], shape: tuple[int, ...]) -> list[Array]:
    """The ranks' arrays, or one: where all hold the same whole, or slices that fit together along one axis alone."""
    shapes = [array.load().shape for array in ranks]
    if len(ranks) == 1 or any(own == shape for own in shapes):
        same = {*shapes} == {shape} and all(_same(ranks[0], array) for array in ranks[1:])
        return list(ranks[:1] if same else ranks)
    fits = [
        a
        for a in range(len(shape))
        if len({own[:a] + own[a + 1 :] for own in (*shapes, shape)}) == 1 and sum(own[a] for own in shapes) == shape[a]
    ]
    if len(fits) != 1:
        return list(ranks)  # their shapes are a finding
    return [Array(ranks[0].dtype, lambda: np.concatenate([array.load() for array in ranks], fits[0]))]


def _same(one: Array, other: Array | None) -> bool:
    return other is not None and judge_exactly("", one.load(), other.load()).error == 0


def _refuse_own_reference(sources: Mapping[str, str]) -> None:
    for role in ("candidate", "truth"):
        paths = [Path(source) for name in (role, "reference") if (source := sources.get(name))]
        if len(paths) == 2 and paths[0].exists() and paths[0].resolve() == paths[1].resolve():
            raise UserError(f"reference: {paths[1]} is the {role}, too; give another run")


def _refuse_other_inputs(truth: Dump, reference: Dump) -> None:
    """What a reference errs says nothing, if it computed something else; also where inputs are not compared."""
    for name in (name for name in truth.arrays if bare(name).startswith("inputs.") and name in reference.arrays):
        for mine, true in zip(reference.arrays[name], truth.arrays[name], strict=False):
            if mine.dtype is None and true.dtype is None and not np.array_equal(mine.load(), true.load()):
                raise UserError(f"reference: {name} is not the truth's: record both on the same inputs")


def _refuse_other_roundings(found: Sequence[Found], passed: bool) -> None:
    """A coarser reference lets mistakes pass; by a finer one right code fails."""
    forward = [f for f in found if f.dtype and f.size and f.measure.group == "forward"]
    wrong = [f for f in forward if f.reference >= NO_ROUNDING]
    if wrong and 2 * len(wrong) >= len(forward):
        raise UserError(
            f"reference: it errs by {wrong[0].reference:.0%} of the truth's size in {wrong[0].name}: that is no "
            f"rounding but another computation (from {NO_ROUNDING:.0%} on, a limit that we set); record both alike"
        )
    rounded = [f for f in found if f.dtype and f.size and f.reference]  # exact numbers have any dtype
    sides = {f.coarser for f in rounded if np.prod(f.measure.shape) >= FEW}
    if sides == {1} and passed:
        raise UserError(
            "reference: all its arrays are coarser than the candidate's; record them alike, or give --dtype"
        )
    if sides == {-1} and not passed:
        raise UserError("reference: all its arrays are finer than the candidate's; record it in the candidate's dtype")


def _refuse_coarse(pairs: Mapping[str, Sides], dtype: str | None) -> None:
    kinds = [(FINER.index(dtype or c.dtype), FINER.index(t.dtype)) for c, t, _ in pairs.values() if c.dtype and t.dtype]
    if kinds and all(true <= mine for mine, true in kinds):
        mine, true = (FINER[max(kind)] for kind in zip(*kinds, strict=True))
        whose = f"--dtype {dtype}" if dtype else f"the candidate's, which are {mine}"
        raise UserError(
            f"--truth: its arrays are {true}, no finer than {whose}; record float64, or give it as --against"
        )


def _padding(truth: Dump) -> dict[str, np.ndarray]:
    """By step, which tokens the truth's inputs mark as padding; of inputs [B, T] that mark none, no token."""
    marked: dict[str, np.ndarray] = {}
    for name, held in truth.arrays.items():
        step, own, _ = split(name)
        if own in ("inputs.attention_mask", "inputs.document_ids", "inputs.input_ids") and len(held) == 1:
            x, known = held[0].load(), marked.get(step)
            if x.ndim == 2 and held[0].dtype is None and (known is None or known.shape == x.shape):
                is_padding = x == 0 if own.endswith("mask") else x < 0  # ids of padding are negative
                marked[step] = is_padding if known is None else known | is_padding
    # What marks every token marks something else, such as what is hidden: without a token nothing would be judged.
    return {step: padding & (not padding.all()) for step, padding in marked.items()}


def _left_out(rule: Rule, found: Sequence[Found]) -> list[str]:
    """What the verdict does not speak of."""
    count, of = (sum(int(many(x)) for x in rule.padding_BT.values()) for many in (np.count_nonzero, np.size))
    said = [f"{count} of {of} tokens, which the inputs mark as padding, are not judged"] * (count > 0)
    return said + ["nothing that was computed is compared"] * (not any(f.dtype for f in found))


def _unordered(first: Found, found: Sequence[Found]) -> list[str]:
    """Arrays that break, too, and may come before the first: their names do not tell their places."""
    other = [f for f in found if f is not first and not f.measure.passed and not has_place(f.name)]
    own = [f.name for f in other if f.measure.layer in (None, first.measure.layer) and _same_run(f.name, first.name)]
    said = f"the order is guessed: it may start elsewhere ({some(own)}); give --order, or `order` in the metadata"
    return [said] * bool(own)


def _hidden(found: Sequence[Found]) -> list[str]:
    """What a mean over N tokens hides: one token errs N times as much, and sqrt(N) times the tokens' mean square."""
    losses = [f.measure for f in found if f.dtype and f.measure.group == "loss"]
    alone = all(np.prod(loss.shape) == 1 for loss in losses)
    words = "{} is a mean over tokens: the loss of one token may err by their number times {:.2g} and it passes"
    better = "record the losses of the tokens (loss.tokens), where it is the root of their number"
    return [f"{words.format(x.name, x.allowance)}; {better}" for x in losses[:1] if alone and x.passed and x.error]


def _finer(found: Sequence[Found], pairs: Mapping[str, Sides], rule: Rule) -> list[str]:
    """Where the truth is no finer than the candidate, or the candidate's numbers are finer than --dtype."""
    if rule.kind == "difference":
        return []
    whose = f"--dtype {rule.dtype}" if rule.dtype else "the candidate"
    coarse = [f for f in found if f.dtype and FINER.index(pairs[f.name][1].dtype or "float64") <= FINER.index(f.dtype)]
    wide: list[Found] = []
    for f in found:  # few values may be a sum's; numbers of JSON have no dtype
        if rule.dtype and f.dtype and f.name != "logprobs" and np.prod(f.measure.shape) >= FEW:
            own = dtype_of_values((mine := pairs[f.name][0]).load(), mine.dtype or "float64")
            wide += [f] if FINER.index(own) > FINER.index(rule.dtype) else []
    said = {f"the truth has no finer dtype than {whose}": coarse, f"the candidate is finer than {whose}": wide}
    return [f"in {_count(f)} arrays ({f[0].name}, ...) {why}: small mistakes may pass" for why, f in said.items() if f]


def _twins(found: Sequence[Found], pairs: Mapping[str, Sides], rule: Rule) -> list[str]:
    """Two sides that hold the same numbers, and what the comparison shows then."""
    computed = [f for f in found if f.dtype and rule.kind != "difference"]
    said = f"hold the same numbers in all {_count(computed)} arrays: the"
    shows = f"{said} comparison shows no more than that they agree"
    alike = {f"truth and candidate {shows}": [f for f in computed if f.relative == 0]}
    if rule.kind == "reference":
        twins = [f for f in computed if f.relative == f.reference and _same(pairs[f.name][0], pairs[f.name][2])]
        alike |= {f"reference and candidate {shows}": twins}
        alike |= {f"truth and reference {said} reference shows no rounding": [f for f in computed if f.reference == 0]}
    return [words for words, same in alike.items() if computed and len(same) == len(computed)]


def _diverges(
    first: Found, found: Sequence[Found], pairs: Mapping[str, Sides], rule: Rule, config: Mapping[str, Any]
) -> Divergence:
    measure = first.measure
    if rule.kind == "difference":
        words = f"{where(measure)}: differs by {first.relative:.3g} of its size"
        return Divergence(name=first.name, ratio=measure.ratio, words=words)
    own = {bare(name): sides for name, sides in pairs.items() if _same_run(name, first.name)}
    known = know(own, config, lambda name, x: lay_out(name, x.shape, rule)[1](rule.judged(name, x)))
    name = bare(first.name)
    sides = (known.candidate[name], known.truth[name]) if name in known.truth else None
    before = [bare(f.name) for f in found[: found.index(first)] if _same_run(f.name, first.name)]
    names = axis_names(lay_out(name, tuple(measure.shape), rule)[2], sides[1].ndim if sides else 0)
    place, alone = f"{where(measure)} ({first.name})", measure.model_copy(update={"name": name})
    words = sentence(measure, place, sides, lambda: explain(alone, known, before, names), "token" in names[1:2])
    return Divergence(name=first.name, ratio=measure.ratio, words=words)


def _notes(first: Found, found: Sequence[Found], pairs: Mapping[str, Sides], rule: Rule) -> list[str]:
    """What passed before, whether the error starts there, where it is worst, and how much breaks behind it."""
    at, measure = found.index(first), first.measure
    before, behind = found[:at], found[at + 1 :]
    notes = []
    inner = [f for f in before if f.dtype and f.measure.group == measure.group and _same_run(f.name, first.name)]
    if rule.kind != "difference" and inner and first.dtype:
        last = max(inner[-SHOWN:], key=lambda f: f.measure.ratio)
        ratio = last.measure.ratio
        word = "it comes from before" if ratio > HANDED_ON * measure.ratio else "it starts here"
        notes.append(
            f"{word}: just before it arrays err by at most {ratio:.2g} of their allowance ({last.name}: relative error "
            f"{last.relative:.2g}; here {first.relative:.2g})"
        )
    if before:
        notes.append(f"passed before it: {_count(before)} arrays, {before[0].name} to {before[-1].name}")
    else:
        notes.append("it is the first array")
    if first.dtype and np.prod(measure.shape) < _FEWEST:
        notes.append(
            f"it has {np.prod(measure.shape)} numbers: too few to tell rounding from a mistake; take more tokens"
        )
    notes += [*_worst(first, pairs, rule), *_advise(first, pairs)]
    if behind:
        broken, of = _count([f for f in behind if not f.measure.passed]), _count(behind)
        notes.append(f"after it {broken} of {of} arrays {'break' if rule.kind != 'difference' else 'differ'}")
    alike = [f for f in behind if f.measure.tap == measure.tap and _same_run(f.name, first.name)]
    growth = [f.relative for f in alike if f.measure.layer is not None and f.relative > 0]
    factor = (growth[-1] / first.relative) ** (1 / len(growth)) if growth and first.relative > 0 else 0.0
    if factor > 1:
        notes.append(f"from layer to layer its relative error grows by a factor of {factor:.3g}")
    if rule.kind == "difference" and first.dtype:
        most = max((f for f in found if f.dtype), key=lambda f: f.relative)
        notes.append(f"the most: {most.name} differs by {most.relative:.3g} of its size")
    return notes


def _same_run(name: str, other: str) -> bool:
    """Whether arrays are of one step, and of one rank; what has no rank belongs to all, and goes with rank 0."""
    (step, _, rank), (own_step, _, own) = split(name), split(other)
    return step == own_step and rank in ("", own or "0]")


def _worst(first: Found, pairs: Mapping[str, Sides], rule: Rule) -> list[str]:
    """The element that errs most with both numbers, and its token, head and channel."""
    if not (index := tuple(first.measure.worst)):
        return []
    mine, true, _ = pairs[first.name]
    values = [x.load()[index] for x in (mine, true)]
    names = axis_names(lay_out(first.name, tuple(first.measure.shape), rule)[0], len(index))
    place = ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True))
    exact = first.dtype is None
    shown = [str(x) if exact else f"{float(x):.6g}" for x in values]
    return [f"worst at {place}: {shown[0]}, where {shown[1]} is right"]


def _advise(first: Found, pairs: Mapping[str, Sides]) -> list[str]:
    """What may be meant where integers or masks differ, or each rank from the whole."""
    if first.dtype is not None:
        ranks = [(mine.load(), true) for name, (mine, true, _) in pairs.items() if whole(name) == whole(first.name)]
        if len(ranks) == 1 or len({(id(true), x.shape) for x, true in ranks}) > 1 or ranks[0][0].size > MOST:
            return []
        total, true = np.sum([x.astype(np.float64) for x, _ in ranks], 0), ranks[0][1].load()
        ways = [way for way, by in (("sum", 1), ("mean", len(ranks))) if explains(first.measure, total / by, true)]
        return [f"the {way} of the ranks is right: if each holds a part of it, a map's step is `{way}`" for way in ways]
    mine, true = (side.load() for side in pairs[first.name][:2])
    additive = [x.dtype.kind == "f" and bool((x <= MASKED).any()) for x in (mine, true)]
    if additive[0] != additive[1]:
        return ["one mask is additive, 0 and a large negative number, the other True and False: write both alike"]
    if np.array_equal(mine == 0, true != 0) and all(np.isin(x, (0, 1)).all() for x in (mine, true)):
        return ["True is False in the other: one mask marks what is seen, the other what is hidden: write both alike"]
    one = re.sub(r"\d+", "*", bare(first.name), count=1)
    words = f"choices of experts may differ where logits tie: compare the logits, and leave these out: --only '!{one}'"
    return [] if first.measure.layer is None else [words]
