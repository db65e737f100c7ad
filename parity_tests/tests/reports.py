"""Reports made by hand, for the page and for `parity diff`."""

from typing import Any

from parity_tests.report.schema import CaseReport, Divergence, Environment, Measure, Profile, Report

TOKENS, LAYERS, FAULTY, SINCE = 1024, 4, 2, 512
TAPS = ("q", "k", "q_rope", "k_rope", "attn", "mlp", "residual")
WORDS = "layer 2, k after RoPE: 41 times the allowance; positions are off by +1 from token 512 on"


def measure(tap: str, ratio: float, **fields: Any) -> Measure:
    """A measure of the forward pass, unless `fields` say otherwise."""
    layer, group = fields.get("layer"), fields.get("group", "forward")
    name = f"{'' if group == 'forward' else group + '.'}{tap if layer is None else f'layers.{layer}.{tap}'}"
    standard = {
        "name": name,
        "tap": tap,
        "group": group,
        "layer": layer,
        "shape": [2, TOKENS, 64],
        "worst": [1, 517, 3],
    }
    return Measure(**standard | {"error": ratio * 2e-3, "allowance": 2e-3} | fields)


def profile(ratio: float, since: int = 0) -> Profile:
    """16 runs of tokens: from `since` on the error is `ratio` times its allowance, before that half of it."""
    starts = list(range(0, TOKENS, TOKENS // 16))
    return Profile(
        starts=starts, error=[1e-3 * (ratio if start >= since else 0.5) for start in starts], allowance=[1e-3] * 16
    )


def forward(faulty: bool = False) -> list[Measure]:
    """Every tap of some layers; faulty ones from k after RoPE in layer 2 on, from token 512 on."""
    measures = [measure("input_ids", 0), measure("embed", 0)]
    for order in range(LAYERS * len(TAPS)):
        layer, number = divmod(order, len(TAPS))
        behind = order - FAULTY * len(TAPS) - TAPS.index("k_rope")
        broken = faulty and behind >= 0
        ratio = 41 / (1 + 0.35 * behind) if broken else 0.4 + 0.02 * ((3 * layer + 5 * number) % 12)
        seen = profile(1.4 * ratio, SINCE) if broken else profile(ratio)
        measures.append(measure(TAPS[number], ratio, layer=layer, profile=seen))
    return [*measures, measure("final_norm", 1.9 if faulty else 0.51), measure("logits", 1.4 if faulty else 0.47)]


def training() -> list[Measure]:
    """Loss, gradients, a step and a trajectory, all well."""
    measures = [measure("shift_labels", 0, group="loss"), measure("loss", 0.21, group="loss", shape=[1], worst=[0])]
    for group in ("gradients", "step"):
        names = ("mlp.up_proj.weight", "self_attn.q_proj.weight+bias")
        measures += [measure(name, 0.25 * layer, group=group, layer=layer) for layer in range(LAYERS) for name in names]
    return measures + [measure(str(i), 0.3 + 0.02 * i, group="trajectory") for i in range(20)]


def case(identity: str = "a", **fields: Any) -> CaseReport:
    """A case that passes, unless `fields` say otherwise."""
    standard: dict[str, Any] = {
        **dict(id=identity, settings={"model": "llama", "engine": "sdpa", "dtype": "bfloat16"}, tokens=TOKENS),
        **dict(preset="flash_bf16", seconds=3.21, command="parity run model=llama tokens=1024 seed=0"),
    }
    standard["settings"] |= {name: fields.pop(name) for name in ("model", "rope", "engine", "dtype") if name in fields}
    return CaseReport(**standard | {"measures": forward() + training()} | fields)


def broken_case(identity: str = "broken") -> CaseReport:
    """A case whose keys are wrong from layer 2 on."""
    first = Divergence(name="layers.2.k_rope", ratio=41, words=WORDS)
    return case(identity, rope="yarn", measures=forward(faulty=True) + training(), first_divergence=first)


def judged_case(name: str, *ratios: float, **changes: Any) -> CaseReport:
    """A case with these ratios of the queries of its layers."""
    measures = [measure("q", ratio, layer=i) for i, ratio in enumerate(ratios)]
    first = next(
        (Divergence(name=m.name, ratio=m.ratio, words=f"{m.name} breaks") for m in measures if not m.passed), None
    )
    return case(name, measures=measures, first_divergence=first, **changes)


def report(*cases: CaseReport, torch: str = "2.13.0", **fields: Any) -> Report:
    """A report of these cases."""
    environment = Environment(
        versions={"python": "3.11.2", "torch": torch},
        hardware="An ordinary processor at 2.00GHz, 2 cores",
        threads=1,
        git_commit="0123456789abcdef0123456789abcdef01234567",
        git_dirty=True,
    )
    standard: dict[str, Any] = {"title": "CI", "created": "2026-11-20T12:34:56+00:00", "seconds": 123.4}
    standard |= {"command": "parity run configs/parity/ci.yaml --out runs/parity", "environment": environment}
    return Report(**standard | {"cases": list(cases)} | fields)
