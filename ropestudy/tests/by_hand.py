"""Results of a study that are made by hand: whatever numbers a test wants."""

from typing import Any

from ropestudy.report.claims import Claim
from ropestudy.report.claims_cause import cause_claims
from ropestudy.report.claims_context import context_claims
from ropestudy.report.claims_paper import paper_claims
from ropestudy.schema import (
    ByFrequency,
    ByLength,
    Columns,
    Difference,
    EmulationCheck,
    LengthPoint,
    MaskPair,
    ModelDescription,
    Outcome,
    OutputDivergence,
    OwnError,
    OwnErrorPoint,
    PairDifference,
    PairGroup,
    PerToken,
    Results,
    Score,
    ShiftPairs,
    SignedBias,
    Stat,
    StudyEnvironment,
    TextDescription,
)

BF16, FLASH = "hf_eager_bf16", "flash_bf16"
TOKENS = 32


def stat(value: float, spread: float = 0.05) -> Stat:
    """Two sequences around a value."""
    return Stat(mean=value, std=spread * value * 2**0.5, values=[value * (1 - spread), value * (1 + spread)])


def diff(row: float, **fields: float) -> Difference:
    """A difference that moves `row` per query; every other measure in proportion, unless given."""
    values = {
        "d": 100 * row,
        "d_unweighted": 1000 * row,
        "first_share": 0.2,
        "first_share_unweighted": 0.3,
        "first_mass": 0.4,
    }
    values |= {"first_mass_unweighted": 0.6, "first_per_mass": row / 2, "rest_per_mass": row, "d_logit_first": row}
    values |= {"d_logit_rest": 2 * row, "logit_rms": row, "row": row} | fields
    layers = [values["d"] / 2] * 2
    return Difference(
        **{name: stat(value) for name, value in values.items()}, by_layer=layers, by_head=[[x] for x in layers]
    )


def about(condition: str = BF16, **fields: Any) -> dict[str, Any]:
    return {"model": "pretrained", "condition": condition, "tokens": TOKENS, "sequences": 2} | fields


def pairs(row: float, condition: str = BF16, mode: str = "local", **fields: Any) -> ShiftPairs:
    shifts = [(0, 1), (0, 2), (0, 16), (1, 2), (2, 16), (8, 16), (16, 17), (16, 100)]
    return ShiftPairs(
        **about(condition, **fields),
        mode=mode,
        pairs=[PairDifference(d1=a, d2=b, difference=diff(row)) for a, b in shifts],
    )


def tokens(first: float, share: float = 0.2) -> PerToken:
    """The first column against all others at 1, and its share of D."""
    columns = Columns(
        d=[first, *[1.0] * (TOKENS - 1)], d_std=[0.1] * TOKENS, unweighted=[first, *[1.0] * (TOKENS - 1)],
        mass=[1.0] * TOKENS, d_logit=[1.0] * TOKENS, row=[1.0] * TOKENS,
    )  # fmt: skip
    return PerToken(**about(), mode="local", d1=0, d2=16, difference=diff(0.01, first_share=share), columns=columns)


def lengths(first: float, rest: float, condition: str = BF16) -> ByLength:
    """D_logit at three lengths with a power of the length each."""
    points = [
        LengthPoint(
            tokens=T, sequences=2, shift=diff(0.01 * T**0.1, d_logit_first=T**first, d_logit_rest=T**rest),
            error=diff(0.01), columns={j: T**rest for j in (0, 1, T // 2, T - 1)}, columns_d={0: 1.0},
        )
        for T in (8, 16, 32)
    ]  # fmt: skip
    return ByLength(**about(condition), mode="local", d1=0, d2=16, points=points)


def kl(value: float) -> OutputDivergence:
    return OutputDivergence(kl=stat(value), argmax_differs=stat(0.01))


def score(group: str, shift: float, error: float = 0.01, condition: str = BF16, **fields: Any) -> Score:
    standard = {
        "base": None, "site": None, "text": "first", "mask": "full", "about": "in words", "d1": 0, "d2": 16,
        "shift": {"local": diff(shift), "propagated": diff(2 * shift)},
        "error": {"local": diff(error), "propagated": diff(2 * error)}, "kl_shift": kl(1e-3), "kl_error": kl(1e-3),
    }  # fmt: skip
    known = {name: fields.pop(name) for name in ("model", "tokens", "sequences") if name in fields}
    return Score(**about(condition, **known), group=group, **standard | fields)


def mask_pair(row: float, condition: str) -> MaskPair:
    return MaskPair(
        **about(condition),
        mode="local",
        a="intra",
        b="intra_reset",
        documents=[16, 16],
        difference=diff(row),
        kl=kl(1e-3),
    )


def own_error(others: float, last: float, condition: str = BF16) -> OwnError:
    """Distances from float64: 1e-2 at shift 0, times `others` at small ones, times `last` at the largest."""
    rows = {0: 1e-2, 16: others * 1e-2, 131000: last * 1e-2}
    points = [OwnErrorPoint(shift=d, error=diff(row), from_zero=diff(row) if d else None) for d, row in rows.items()]
    return OwnError(**about(condition), mode="local", points=points)


def frequency(slow: float, fast: float) -> ByFrequency:
    groups = [
        PairGroup(first=i, last=i, wavelengths=wavelengths, shift=diff(row), error=diff(row))
        for i, (wavelengths, row) in enumerate([((6.0, 9.0), fast), ((100.0, 900.0), slow)])
    ]
    return ByFrequency(**about(), mode="local", d1=0, d2=16, groups=groups)


def emulation(ratio: float) -> EmulationCheck:
    return EmulationCheck(
        **about(attention_from="torch eager"), dtype="bfloat16", layers=[0, 1], error=[1e-4, 1e-4],
        reference=[1e-4, 1e-4], ratio=[0.5, ratio], between=[1e-5, 0.0], identical=[0.9, 1.0],
        shift_ratio=ratio, shift_ratio_first=ratio, d_ratio=ratio, d_oracle=stat(1.0), d_torch=stat(1.0), d1=0, d2=16,
    )  # fmt: skip


def packed(mask: str, row: float) -> Score:
    return score("mask", row, row, mask=mask, base=BF16, kl_error=kl(row))


def study(*records: Any, **fields: Any) -> Results:
    standard = {
        "title": "By hand",
        "created": "2026-11-21T12:00:00+00:00",
        "seconds": 12.5,
        "command": "jaxref study configs/study/tiny.yaml",
        "environment": StudyEnvironment(
            versions={"jax": "0"}, hardware="a machine", device="cpu", git_commit="abc", git_dirty=True
        ),
        "config": {"shift_pairs": {"d2": 16, "grid": [0, 1, 2]}},
        "model": ModelDescription(
            source="smollm2", config={"num_hidden_layers": 2}, weights="bfloat16", parameters=1000, sha256="0" * 64,
            pair_wavelengths=[6.0, 900.0], initialisations={"kaiming": "a = 0"},
        ),
        "text": TextDescription(source="demo", bos=1, documents=["a speech"]),
        "records": list(records),
    }  # fmt: skip
    return Results(**standard | fields)


def whole() -> Results:
    """A record of every kind."""
    return study(
        *(pairs(0.01, mode=mode) for mode in ("local", "propagated")),
        pairs(1e-7, "fp32"),
        pairs(0.003, model="kaiming"),
        tokens(9.0),
        lengths(0.5, 0.1),
        score("baseline", 0.0, 0.0, "exact"),
        score("baseline", 0.01, base=BF16),
        score("baseline", 0.01, condition=FLASH, base=FLASH),
        score("on_alone", 0.008, condition="on k_rotated", base="exact", site="k_rotated"),
        score("on_alone", 0.0, condition="on probs", base="exact", site="probs"),
        score("off_alone", 0.004, condition=f"{BF16} - table", base=BF16, site="table"),
        score("off_alone", 1e-9, condition=f"{BF16} - table, rope_sum", base=BF16, site="table, rope_sum"),
        score("remedy", 0.001, condition=f"{BF16}: split q and k", base=BF16),
        score("remedy", 0.03, condition=f"{BF16}: fp32 tables", base=BF16),
        score("control", 0.01, condition="q, k rounded after RoPE", base="exact"),
        score("control", 0.0, condition="q, k rounded before RoPE", base="exact"),
        score("control", 0.02, condition=f"{BF16}: random phases 0", base=BF16, d2=0),
        score("control", 0.03, model="kaiming"),
        score("first_token", 0.01, base=BF16),
        score("first_token", 0.005, base=BF16, text="none"),
        score("first_token", 0.02, base=BF16, text="none", condition=f"{BF16} + sink"),
        packed("full", 0.01),
        packed("intra", 0.01),
        packed("intra_reset", 0.005),
        packed("anchor", 0.005),
        mask_pair(0.005, BF16),
        mask_pair(1e-15, "exact"),
        own_error(1.2, 5.0),
        frequency(0.01, 0.002),
        emulation(0.9),
    )


def outcome(condition: str, kl_: float, group: str = "setup", **fields: Any) -> Outcome:
    """Three texts that end at position 8,192 unless other ones are given."""

    def three(value: float) -> Stat:
        return Stat(mean=value, std=0.0, values=[value * x for x in (0.5, 1.0, 1.5)])

    right, lost = fields.pop("right", 0.8), fields.pop("lost", 0.0)
    copied = Stat(mean=right, std=0.0, values=[right - 0.1, right, right + 0.1])
    outputs = OutputDivergence(
        kl=three(kl_), argmax_differs=three(0.01), nll_p=three(3.0), nll_q=three(3.0 + kl_),
        right_p=copied, right_q=Stat(mean=0.0, std=0.0, values=[x - lost for x in copied.values]),
    )  # fmt: skip
    standard = {"task": "text", "about": "in words", "start": 8192 - TOKENS, "gap": 0, "outputs": outputs}
    return Outcome(**about(condition), group=group, **standard | fields)


def bias(common: float, **fields: Any) -> SignedBias:
    """Signed errors of which so much is common."""
    gram = [[1.0, common, common], [common, 1.0, common], [common, common, 1.0]]
    standard = {
        "mask": "full",
        "start": 0,
        "gap": 8000,
        "first": gram,
        "others": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    }
    return SignedBias(**about(BF16), columns=[3], first_abs=stat(0.01), first_mass=stat(0.4), **standard | fields)


def outputs_alone() -> Results:
    """Setups, doses and signed errors."""
    return study(
        outcome(BF16, 1e-3), outcome(FLASH, 1e-3), outcome("paper_bf16", 5e-4), outcome("fa3_fp8", 2e-2),
        outcome("fa3_fp8_before", 1e-2), outcome(f"{BF16}_tf32", 1.0), outcome(f"{BF16}_inv_freq", 1.3e-3),
        outcome("flash_bf16_fp32_qk", 9e-4), outcome(BF16, 7.0, start=0), outcome("fa3_fp8", 9.0, start=0),
        *(
            outcome(f"all of RoPE, {bits} bits", 2.0**-bits, "dose", site="all of RoPE", mantissa_bits=bits,
                    task="copy", gap=8000, start=0, lost=lost)
            for bits, lost in ((3, 0.25), (7, 0.01))
        ),
        outcome("all of RoPE, 7 bits", 2.0, "dose", site="all of RoPE", mantissa_bits=7, task="copy", gap=99_999,
                right=0.1),
        outcome("on table", 1e-4, "site", site="table"),
        bias(0.9),
    )  # fmt: skip


def claims(results: Results) -> dict[str, Claim]:
    return {claim.key: claim for claim in (*paper_claims(results), *cause_claims(results), *context_claims(results))}
