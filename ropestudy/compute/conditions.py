"""A condition is what a model is computed under: a preset of roundings, or one with a change.

`CONDITIONS` holds those that a configuration may name. The functions make the lists that experiments go through.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from anchorline.errors import UserError
from jaxref.rounding import PRESETS, SITES, Rounding, preset
from ropestudy.compute.methods import AS_THE_ORACLE, Method


@dataclass(frozen=True)
class Condition:
    """What a model is computed under. Hashable; its name is unique among the conditions of a study."""

    name: str
    rounding: Rounding
    method: Method = AS_THE_ORACLE
    about: str = ""
    base: str | None = None  # the preset it starts from
    site: str | None = None  # the site that it switches
    mantissa_bits: int | None = None  # of a dose


# Sites that round the same number again: a sum, the rotated vector that it is, its copies; and so on. (`scaled` is `qk`
# times a power of two where head_dim is a power of four, and rounds nothing new then.)
IN_A_ROW = (
    ("rope_sum", "q_rotated", "k_rotated", "kv_heads"),
    ("table", "rope_product", "rope_sum", "q_rotated", "k_rotated", "kv_heads"),  # all that follows the angle
    ("qk", "scaled"),
    ("pv", "attn_out"),
)

TF32_SITES = ("position", "inv_freq", "table")

EXACT = Condition("exact", preset("exact"), about="float64, nothing rounded")


def _list_conditions() -> Iterator[Condition]:
    for name, rounding in PRESETS.items():
        yield Condition(name, rounding, about=f"the preset {name}")
    in_float64 = Method(angles="float64")
    yield Condition(
        "fp32_angles64", preset("fp32"), in_float64, "float32, but angles, cos and sin in float64", base="fp32"
    )
    for name in ("hf_eager_bf16", "flash_bf16"):
        rounding = preset(name).replace(inv_freq="bf16")
        about = "inverse frequencies rounded to bf16 as well, as model.to(bfloat16) does"
        yield Condition(f"{name}_inv_freq", rounding, about=about, base=name)
    for name in ("hf_eager_bf16", "flash_bf16", "paper_bf16"):
        yield Condition(f"{name}_angles64", preset(name), in_float64, f"{name}, angles in float64", name)
        rounding = preset(name).replace(position="tf32", inv_freq="tf32")
        about = "positions and inverse frequencies rounded to TF32 before they are multiplied, as where TF32 is on"
        yield Condition(f"{name}_tf32", rounding, about=about, base=name)
    # The paper's rotation and nothing rounded after it: what kernels that take float32 q and k would give.
    unrounded = preset("paper_bf16").replace(q_rotated="fp32", k_rotated="fp32", kv_heads=None)
    yield Condition(
        "flash_bf16_fp32_qk", unrounded, about="flash_bf16 with rotation, q and k in float32", base="flash_bf16"
    )
    # q, k and v arrive in fp8 with a scale a head, P is rounded to fp8 times 2^8, sums are float32 (arXiv 2407.08608).
    before_rope = preset("paper_bf16").replace(kv_heads=None, probs="e4m3_probs")
    after_rope = preset("flash_bf16").replace(kv_heads=None, probs="e4m3_probs")
    about = "FlashAttention-3 in fp8: q, k, v in e4m3 with a scale per head, q and k rounded"
    after = Method(per_head="e4m3_sat", per_head_when="after")
    yield Condition("fa3_fp8", after_rope, after, f"{about} after RoPE", "flash_bf16")
    yield Condition(
        "fa3_fp8_before",
        before_rope,
        Method(per_head="e4m3_sat", per_head_when="before"),
        f"{about} before RoPE, which is then applied in float32 and rounded to bf16",
        "flash_bf16",
    )
    # Tensor cores add fp8 products with fewer bits than float32's 24: 14 on Hopper (arXiv 2412.19437, section 3.5.2).
    for bits in (14, 22):
        sums = f"running sums of QK^T and P V cut to {bits} significant bits every 32 terms"
        rounding = after_rope.replace(accumulator=bits)
        yield Condition(f"fa3_fp8_acc{bits}", rounding, after, f"{about} after RoPE; {sums}", "fa3_fp8")


CONDITIONS = {one.name: one for one in _list_conditions()}


def condition(name: str) -> Condition:
    """Return a condition of `CONDITIONS`. Raises UserError for a name that is not there."""
    if name not in CONDITIONS:
        raise UserError(f"{name!r} is not a condition; choose from {', '.join(CONDITIONS)}")
    return CONDITIONS[name]


def on_alone() -> list[Condition]:
    """Return every site of `Rounding` rounded to bf16 and nothing else, in a float64 carrier.

    Sites that transformers keeps in float32 are also there with that format; positions, frequencies and tables in TF32
    too, which is what a product of them becomes where TF32 is switched on.
    """
    kept, alone = preset("hf_eager_bf16"), []
    for site in SITES:
        tf32 = ("tf32",) if site in TF32_SITES else ()
        for form in dict.fromkeys(("bf16", getattr(kept, site), *tf32)):
            name = f"on {site}" + (f" {form}" if form != "bf16" else "")
            rounding = EXACT.rounding.replace(**{site: form})
            alone.append(Condition(name, rounding, about=f"{site} alone in {form}", base="exact", site=site))
    return alone


def off_alone(base: str) -> list[Condition]:
    """Return a preset with one of its sites not rounded, for every site that it rounds.

    Where the preset rounds to fp32, a float32 carrier would round all the same: there the carrier is float64.
    """
    rounding = preset(base)
    conditions = []
    for site in SITES:
        form = getattr(rounding, site)
        if form is None:
            continue
        without = rounding.without(site)
        if form == "fp32":
            without = without.replace(carrier="float64")
        about = f"{base} without rounding {site}" + (" (in a float64 carrier)" if form == "fp32" else "")
        conditions.append(Condition(f"{base} - {site}", without, about=about, base=base, site=site))
    return conditions


def off_together(base: str) -> list[Condition]:
    """Return a preset without sites that round the same number in a row: left out one at a time, the others undo it."""
    rounding = preset(base)
    conditions = []
    for sites in IN_A_ROW:
        rounded = [site for site in sites if getattr(rounding, site) is not None]
        if len(rounded) > 1:
            name = ", ".join(rounded)
            about = f"{base} without rounding {name}"
            conditions.append(
                Condition(f"{base} - {name}", rounding.without(*rounded), about=about, base=base, site=name)
            )
    return conditions


def remedies(base: str) -> list[Condition]:
    """Return a preset with each of the changes that people make against its rounding."""
    rounding = preset(base)
    half = rounding.q_rotated
    rotation = rounding.replace(table="fp32", rope_product="fp32", rope_sum="fp32")

    def change(name: str, rounding: Rounding, about: str, **method: object) -> Condition:
        return Condition(f"{base}: {name}", rounding, Method(**method), about, base)  # type: ignore[arg-type]

    changes = [
        change("fp32 tables", rounding.replace(table="fp32"), "cos and sin stay in float32"),
        change("fp32 rotation", rotation, "tables, products and sums in float32; q and k rounded once"),
        change("float64 angles", rounding, "angles, cos and sin in float64, then rounded as ever", angles="float64"),
        change("fp32 rotation, float64 angles", rotation, "both of the above", angles="float64"),
        change(
            "split q and k",
            rotation.replace(kv_heads=None),
            "fp32 rotation, and q, k as hi + lo of two half precision terms",
            split=half,
        ),
        change(
            "fp32 q and k",
            rotation.replace(q_rotated="fp32", k_rotated="fp32", kv_heads=None),
            "q and k never rounded again",
        ),
        change(
            "fp32 logits",
            rounding.replace(qk=rounding.qk and "fp32", scaled=rounding.scaled and "fp32"),
            "QK^T and the scaled logits in float32",
        ),
        change("bf16 inverse frequencies", rounding.replace(inv_freq="bf16"), "what .to(bfloat16) does: no remedy"),
    ]
    # A change that changes nothing is no remedy: FlashAttention keeps its logits in float32 anyway.
    return [one for one in changes if (one.rounding, one.method) != (rounding, AS_THE_ORACLE)]


DOSES = ("table", "q and k", "q and k before RoPE", "all of RoPE")


def dose(site: str, mantissa_bits: int) -> Condition:
    """Return a condition that rounds a site of `DOSES` to so many mantissa bits, with the exponents of float32.

    Angles are float64, and everything else is float32. `all of RoPE` is the tables, products, sums, q and k.
    """
    form, name = f"e8m{mantissa_bits}", f"{site}, {mantissa_bits} bits"
    sites = {
        "table": ("table",),
        "q and k": ("q_rotated", "k_rotated"),
        "q and k before RoPE": (),
        "all of RoPE": ("table", "rope_product", "rope_sum", "q_rotated", "k_rotated"),
    }[site]
    before = form if site == "q and k before RoPE" else None
    rounding, method = preset("fp32").replace(**dict.fromkeys(sites, form)), Method(angles="float64", before=before)
    return Condition(name, rounding, method, f"{name} of mantissa", "fp32", site, mantissa_bits)


def before_and_after(base: str) -> list[Condition]:
    """Return two conditions that round only q and k: before the rotation, and after it."""
    half = preset(base).q_rotated
    exact = EXACT.rounding
    return [
        Condition("q, k rounded before RoPE", exact, Method(before=half), "else float64", "exact"),
        Condition(
            "q, k rounded after RoPE", exact.replace(q_rotated=half, k_rotated=half), about="else float64", base="exact"
        ),
    ]
