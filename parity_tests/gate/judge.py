"""One case: both sides, the verdict on every array, the first divergence in words.

Legend: B batch · T tokens of a row.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from anchorline.errors import UserError
from anchorline.tolerance import likely_error_of_mean
from jaxref.mask import PADDING
from parity_tests.gate.candidate import candidate_side, why_not_here
from parity_tests.gate.case import GateCase, resolve
from parity_tests.gate.own_eager import own_eager_sides, reference_name
from parity_tests.gate.spec import CaseSpec
from parity_tests.gate.truth import Oracle, OracleArrays, preset_of
from parity_tests.gate.words import describe
from parity_tests.oracle import Arrays, first_step
from parity_tests.report.measure import join_problems, where_not_finite
from parity_tests.report.measure import measure as measure_of
from parity_tests.report.names import group_of, sort_key
from parity_tests.report.schema import CaseReport, Divergence, Measure


def run_case(spec: CaseSpec, oracle: Oracle) -> CaseReport:
    """Run both sides and judge. Whatever goes wrong with the candidate is in the report, in words.

    Raises UserError, one line: a model that does not exist or that the oracle does not know.
    """
    started = time.perf_counter()
    if reason := why_not_here(spec):
        return report_of(spec, skipped=reason)
    case = resolve(spec)
    arrays = None if case.unknown_family else oracle.side(case)
    try:
        candidate, arrays = own_eager_sides(case) if arrays is None else (candidate_side(case), arrays)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        report = report_of(spec, problem=f"the candidate raises {text}")
    else:
        report = judge_case(case, candidate, arrays)
    update: dict[str, Any] = {"seconds": time.perf_counter() - started}
    update |= {"preset": reference_name(case)} if case.unknown_family else {}
    return report.model_copy(update=update)


def report_of(spec: CaseSpec, **found: Any) -> CaseReport:
    """The report of a case; without what was found, of one before anything was measured."""
    said: dict[str, Any] = {"id": spec.id, "settings": spec.given, "tokens": spec.tokens, "command": spec.command}
    return CaseReport(**said | {"preset": preset_of(spec), "seconds": 0.0} | found)


def judge_case(case: GateCase, candidate: Arrays, oracle: OracleArrays) -> CaseReport:
    """Judge every array of the candidate, in the order in which the computation makes them.

    case: what was run; its stages say what must be there.
    candidate: from `candidate_side`, perhaps with a bug in it.
    oracle: from `Oracle.side`.

    `seconds` of the report is what judging took.
    """
    started = time.perf_counter()
    oracle = replace(oracle, truth=_with_biases(oracle.truth), reference=_with_biases(oracle.reference))
    pairs = _pairs(case, candidate, oracle)
    candidate = candidate | _with_biases(candidate)
    measures: list[Measure] = []
    problems: list[str] = []
    words: Divergence | None = None
    compared = {name for name in _with_biases(candidate) if not name.startswith("step.")}
    for name, truth, reference, dtype in pairs:
        compared.discard(name)
        if name not in candidate:
            problems.append(f"{name} is missing")
            continue
        array = candidate[name]
        if array.shape != truth.shape:
            problems.append(f"{name} has shape {list(array.shape)}; the oracle's is {list(truth.shape)}")
            continue
        broken = where_not_finite(array, truth)
        if broken and words is None:  # the first cause alone
            problems.append(f"{name} is {broken}")
        likely = oracle.likely.get(name, 0.0)
        if (tokens := f"{name}.tokens") in oracle.truth:  # the mean of these
            held_out = ".".join([*name.split(".")[:3], "tokens"])  # of all domains: one may have a single token
            values = [side[held_out if held_out in side else tokens] for side in (oracle.truth, oracle.reference)]
            labelled = values[0] != 0
            count = int(np.count_nonzero(oracle.truth[tokens]))
            likely = likely_error_of_mean(values[0][labelled], values[1][labelled], count)
        judged: Any = array, truth, reference
        if group_of(name) == "forward" and reference is not None:
            copies_BT = _copied_padding(truth, oracle.exact["inputs.document_ids"])
            judged = tuple(np.where(copies_BT.reshape(*copies_BT.shape, *[1] * (x.ndim - 2)), 0, x) for x in judged)
        rotated = case.decoder_config.rope.head_dim if name.endswith("_rope") else 0
        measure = measure_of(name, *judged, dtype, likely, rotated)
        measures.append(measure)
        if words is None and not measure.passed:
            text = describe(case, measure, truth, candidate, oracle)
            words = Divergence(name=name, ratio=measure.ratio, words=text)
    unknown = sorted(name for name in compared if group_of(name) in case.spec.stages)
    problems += [f"the candidate returns {name}, which the oracle does not have" for name in unknown]
    return report_of(
        case.spec,
        seconds=time.perf_counter() - started,
        problem=join_problems(problems),
        first_divergence=words,
        measures=measures,
    )


def _with_biases(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Each bias's gradient as one more column of its weight's.

    Alone, that of k's bias is what remains of a sum that cancels, because softmax does not see a shift of all logits:
    its rounding errors are nearly one number, repeated, and two such numbers may well differ by more than twice.
    """
    joined: Arrays = {}
    for name, array in arrays.items():
        stem, _, kind = name.rpartition(".")
        bias = arrays.get(f"{stem}.bias") if name.startswith("gradients.") else None
        if bias is None:
            joined[name] = array
        elif kind == "weight" and len(bias) == len(array):
            joined[f"{name}+bias"] = np.concatenate([array, bias[:, None]], axis=1)
    return joined


def _copied_padding(truth: np.ndarray, document_ids_BT: np.ndarray) -> np.ndarray:
    """Which tokens of padding repeat the numbers of their row's first padding: bool [B, T].

    All of these have one and the same error. If every copy counted, chance would decide: in float32 SmolLM2 has a
    channel with 24,888 in 58 tokens of padding, which broke the rule. So the copies are set to 0 on both sides. Where
    the truth is 0, as in the heads' output, each token is judged.
    """
    padding_BT, inner = document_ids_BT == PADDING, tuple(range(2, truth.ndim))
    rows, first_B = np.arange(len(truth)), padding_BT.argmax(1)
    own = truth[rows, first_B][:, None]
    copies_BT = padding_BT & (truth == own).all(inner) & (own != 0).any(inner)
    copies_BT[rows, first_B] = False
    return copies_BT


def _pairs(
    case: GateCase, candidate: Arrays, oracle: OracleArrays
) -> Iterator[tuple[str, np.ndarray, np.ndarray | None, str]]:
    """Name, truth, reference (None: exact) and dtype of all that is judged, in order."""
    for stage in case.spec.stages:
        exact = [(name, truth, None, "exact") for name, truth in oracle.exact.items() if group_of(name) == stage]
        yield from (of for of in exact if not of[0].endswith(".counts"))
        names = [name for name in oracle.truth if group_of(name) == stage]
        for name in sorted(names, key=sort_key) if stage == "gradients" else names:
            # transformers' attention gives no lse; a run, no losses of single held-out tokens.
            if not name.endswith(".lse") and not (name.startswith("run.held_out") and name.endswith(".tokens")):
                # Learning rates and masters do not have the model's dtype.
                wide = name.endswith(".rates") or name.startswith("run.masters.")
                wide |= name == "rope_table" and case.spec.rotation == "float32"
                dtype = "float32" if wide else case.spec.dtype
                yield name, oracle.truth[name], oracle.reference[name], dtype
        yield from (of for of in exact if of[0].endswith(".counts"))
        if stage == "step":
            yield from _step_pairs(candidate, case)


def _step_pairs(candidate: Arrays, case: GateCase) -> Iterator[tuple[str, np.ndarray, np.ndarray | None, str]]:
    """The oracle's AdamW on the candidate's gradients and weights: float32 masters, rounded exactly on every rank."""
    prefix = "step.before."
    names = [name.removeprefix(prefix) for name in candidate if name.startswith(prefix)]
    before = {name: candidate[prefix + name] for name in names}
    gradients = {name: candidate[f"gradients.{name}"] for name in names}
    truth, reference = (first_step(case.step, before, gradients, dtype) for dtype in ("float64", "float32"))
    for name in names:
        yield f"step.{name}", truth[name], reference[name], "float32"
    after = np.concatenate([candidate[f"step.{name}"].ravel() for name in names])
    stored = ml_dtypes.bfloat16 if case.spec.dtype == "bfloat16" else case.spec.dtype
    yield "step.stored", np.tile(after.astype(stored).astype(np.float32), case.spec.ranks), None, "exact"
