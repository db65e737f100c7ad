"""Beyond the paper: which cast is to blame, what it costs, and what helps.

Legend: KL of the output distributions, in nats.
"""

from ropestudy.report.claims import Claim, Comparison, Margins, above, below, moved, ratio
from ropestudy.report.claims_paper import FP32_ROUNDOFF, positions_of, where
from ropestudy.report.effects import Effect, known, mean_of, quotient_of
from ropestudy.report.figures_sites import AGAIN
from ropestudy.report.select import baseline, is_half, number, of_kind, scores, times
from ropestudy.schema import ByFrequency, EmulationCheck, Results, Score

TOGETHER = ", "  # between the sites of a score that are left out together
HARM = "bf16 inverse frequencies"  # tried beside the remedies, and none
HALF_LEFT = 0.5  # "to blame", "works": without it, or with it, less than half is left


def cause_claims(results: Results) -> list[Claim]:
    """All of them, also those that this study did not measure."""
    return [
        rounds_after(results),
        one_cast(results),
        all_of_rope(results),
        as_neutral(results),
        few_frequencies(results),
        cost(results),
        remedies_shift(results),
        remedies_error(results),
        emulated(results),
        same_numbers(results),
    ]


def rounds_after(results: Results) -> Claim:
    """The control of before against after."""
    cases = []
    rows = scores(results, "control")
    befores = {positions_of(r): r for r in rows if r.condition == "q, k rounded before RoPE"}
    for after in (r for r in rows if r.condition == "q, k rounded after RoPE"):
        before = befores.get(positions_of(after))
        for mode in after.shift if before else ():
            assert before is not None
            errors = ratio(moved(before.error[mode]), moved(after.error[mode]))
            parts = (
                Margins(errors, HALF_LEFT, 1 / HALF_LEFT),
                Margins(mean_of(before.shift[mode].row.values), high=FP32_ROUNDOFF),
                Margins(mean_of(after.shift[mode].row.values), low=FP32_ROUNDOFF),
            )
            cases.append(Comparison({"mode": mode, "positions": positions_of(after)}, parts))
    return Claim(
        "after",
        (
            "Rounding q and k after the rotation breaks it; the same rounding before it leaves RoPE relative, and "
            "errs as much"
        ),
        "control",
        "q and k rounded before the rotation: two shifts agree to 2^-24 per query; rounded after: they do not; and "
        "their distances from float64 are within a factor of two of each other. The number says that agreement of "
        "shifts is not accuracy.",
        "error against float64, before over after",
        "controls",
        cases,
    )


def one_cast(results: Results) -> Claim:
    """Leaving one site out."""
    cases = _left_out(results, [r for r in scores(results, "off_alone") if TOGETHER not in (r.site or "")])
    return Claim(
        "one-cast",
        "One cast is to blame: without it, less than half of the shift error is left",
        "own finding",
        ("A preset with one site not rounded moves less than half of what the whole preset moves between the shifts."),
        "fraction left of the whole preset's shift error",
        "off-alone",
        cases,
        note=_ranking(results),
    )


def all_of_rope(results: Results) -> Claim:
    """Leaving out the sites that round the same numbers in a row, up to all of RoPE's."""
    return Claim(
        "all-of-rope",
        (
            "Casts that round one number after the other are to blame together: without them, less than half of the "
            "shift error is left"
        ),
        "own finding",
        "A preset with all of the named sites not rounded moves less than half of what the whole preset moves between "
        "the shifts.",
        "fraction left of the whole preset's shift error",
        "off-alone",
        _left_out(results, [r for r in scores(results, "off_alone") if TOGETHER in (r.site or "")]),
    )


def _left_out(results: Results, rows: list[Score]) -> list[Comparison]:
    cases = []
    for r in rows:
        whole = baseline(results, r)
        if whole:
            cases += [
                below(
                    {"preset": r.base or "", "mode": mode, "site": r.site or "", "positions": positions_of(r)},
                    ratio(moved(r.shift[mode]), moved(whole.shift[mode])),
                    HALF_LEFT,
                )
                for mode in r.shift
            ]
    return cases


def _ranking(results: Results) -> str:
    """Which site tops the list, rounded alone and left out."""
    alone = sorted(scores(results, "on_alone"), key=lambda r: r.shift["local"].row.mean, reverse=True)
    said = []
    for r in alone[:3]:
        said.append(f"{r.condition.removeprefix('on ')} {number(r.shift['local'].row.mean)}")
    parts = [f"Rounded alone, local, the largest shift errors are {', '.join(said)}."] if said else []
    off = [r for r in scores(results, "off_alone") if TOGETHER not in (r.site or "")]
    for base in dict.fromkeys(r.base for r in off):
        own = [r for r in off if r.base == base]
        whole = baseline(results, own[0])
        if whole and whole.shift["local"].row.mean > 0:
            best = min(own, key=lambda r: r.shift["local"].row.mean)
            left = times(best.shift["local"].row.mean, whole.shift["local"].row.mean)
            parts.append(f"Left out of {base}, {best.site} leaves least: {left:.2f} of it.")
    return " ".join([*parts, AGAIN] if off else parts)


def as_neutral(results: Results) -> Claim:
    """Random phases against shifts."""
    cases = []
    for r in scores(results, "control"):
        if "random phases" not in r.condition or not is_half(r.base or ""):
            continue
        whole = baseline(results, r)
        if whole:
            cases += [
                Comparison(
                    where(r, mode=mode, positions=positions_of(r)),
                    (Margins(ratio(moved(r.shift[mode]), moved(whole.shift[mode])), HALF_LEFT, 1 / HALF_LEFT),),
                )
                for mode in r.shift
            ]
    return Claim(
        "phases",
        "A shift is nothing special: constant random phases per rotary pair, as neutral as it is, move as much",
        "control",
        "Random phases move between half and twice what the shift moves. (Phases turn every pair; "
        "a shift of a few tokens hardly turns the slow ones.)",
        "moved by the phases over moved by the shift",
        "controls",
        cases,
    )


def few_frequencies(results: Results) -> Claim:
    """Pairs grouped by frequency."""
    cases, note = [], ""
    for r in of_kind(results, ByFrequency):
        if len(r.groups) < 2:
            continue
        most = max(r.groups, key=lambda g: g.shift.row.mean)
        sums = [sum(row) for row in zip(*(g.shift.row.values for g in r.groups), strict=True)]
        cases.append(above(where(r, mode=r.mode), quotient_of(most.shift.row.values, sums), HALF_LEFT))
        ends = " to ".join(number(wavelength) for wavelength in most.wavelengths)
        note = (
            f"The most is in pairs {most.first} to {most.last} of 0 to {r.groups[-1].last}, wavelengths {ends} tokens."
        )
    return Claim(
        "frequency",
        "One group of rotary pairs carries it",
        "own finding",
        "Of all groups of pairs, each rounded alone, the largest moves more than half of their sum between the shifts.",
        "the largest group's part of the sum",
        "frequency",
        cases,
        note,
    )


def cost(results: Results) -> Claim:
    """What the outputs make of it."""
    cases = []
    rows = [s for s in scores(results, "baseline") if s.base is not None]
    for r in {(s.condition, positions_of(s)): s for s in rows}.values():
        quotient = ratio(r.kl_shift.kl, r.kl_error.kl)
        cases.append(below(where(r, positions=positions_of(r)), quotient, 2))
    return Claim(
        "cost",
        "What a shift does to the outputs is less than twice what rounding does to them anyway: two independent errors "
        "would give twice",
        "own finding",
        (
            "KL between the outputs at two shifts is less than twice that of one shift from float64: two independent "
            "errors would give twice."
        ),
        "KL between shifts over KL from float64",
        "off-alone",
        cases,
    )


def _remedy_cases(results: Results, which: str) -> list[Comparison]:
    cases = []
    for r in scores(results, "remedy"):
        whole = baseline(results, r)
        if whole is None or r.condition.endswith(HARM):
            continue
        factors = {"preset": r.base or "", "remedy": r.condition.removeprefix(f"{r.base}: ")}
        factors |= {"positions": positions_of(r)}
        for mode in r.shift:
            a, b = (r.shift[mode], whole.shift[mode]) if which == "shift" else (r.error[mode], whole.error[mode])
            cases.append(below(factors | {"mode": mode}, ratio(moved(a), moved(b)), HALF_LEFT))
    return cases


def remedies_shift(results: Results) -> Claim:
    """Every remedy against the shift error."""
    return Claim(
        "remedies-shift",
        "The remedies restore invariance to shifts: less than half of the shift error is left",
        "own finding",
        "Less than half of the preset's shift error is left.",
        "fraction left",
        "remedies",
        _remedy_cases(results, "shift"),
    )


def remedies_error(results: Results) -> Claim:
    """Every remedy against the error."""
    return Claim(
        "remedies-error",
        "The remedies make the model more accurate: less than half of the distance from float64 is left",
        "own finding",
        "Less than half of the preset's distance from float64 is left.",
        "fraction left",
        "remedies",
        _remedy_cases(results, "error"),
    )


def emulated(results: Results) -> Claim:
    """The oracle beside torch."""
    cases = [
        _allowed({"torch": r.attention_from, "dtype": r.dtype, "layer": str(layer)}, quotient)
        for r in of_kind(results, EmulationCheck)
        for layer, quotient in zip(r.layers, r.ratio, strict=True)
    ]
    return Claim(
        "emulation",
        "The emulation is right: torch's own attention is as close to float64 as the oracle's roundings say",
        "own check",
        "Error over allowance by the repository's one rule is at most 1, layer by layer.",
        "error over allowance",
        "emulation",
        cases,
    )


def _allowed(factors: dict[str, str], quotient: float) -> Comparison:
    """Of all sequences together: a number without an interval."""
    effect: Effect = known(quotient)
    return Comparison(factors, (Margins(effect, high=1),))


def same_numbers(results: Results) -> Claim:
    """What the study is made of, from both."""
    cases = []
    for r in of_kind(results, EmulationCheck):
        for what, quotient in (
            ("the attention's difference", r.shift_ratio),
            ("the same in the first layer", r.shift_ratio_first),
            ("D by column", r.d_ratio),
        ):
            cases.append(_allowed({"torch": r.attention_from, "dtype": r.dtype, "of": what}, quotient))
    return Claim(
        "same-numbers",
        "The study's numbers come out the same from torch's own attention as from the oracle's",
        "own check",
        "What moves between the two shifts in torch is, by the repository's one rule, what the same roundings move in "
        "a float64 carrier: error over allowance is at most 1, and the allowance is what the oracle's own float32 "
        "carrier moves of it.",
        "error over allowance",
        "emulation",
        cases,
    )
