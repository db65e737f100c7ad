"""Reports made by hand, for the page and for `parity diff`."""

from typing import Any

from parity_tests.report.schema import CaseReport, Divergence, Environment, Measure, Profile, Report

TOKENS = 1024
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


def case(identity: str = "a", **fields: Any) -> CaseReport:
    """A case that passes, unless `fields` say otherwise."""
    standard: dict[str, Any] = {
        **dict(id=identity, settings={"model": "llama", "engine": "sdpa", "dtype": "bfloat16"}, tokens=TOKENS),
        **dict(preset="flash_bf16", seconds=3.21, command="parity run model=llama tokens=1024 seed=0"),
    }
    standard["settings"] |= {name: fields.pop(name) for name in ("model", "rope", "engine", "dtype") if name in fields}
    measures = [measure("embed", 0), measure("k_rope", 0.4, layer=2), measure("loss", 0.21, group="loss")]
    return CaseReport(**standard | {"measures": measures} | fields)


def broken_case(identity: str = "broken") -> CaseReport:
    """A case whose keys are wrong in layer 2, from token 512 on."""
    first = Divergence(name="layers.2.k_rope", ratio=41, words=WORDS)
    seen = Profile(starts=[0, 512], error=[5e-4, 4.1e-2], allowance=[1e-3, 1e-3])
    measures = [measure("embed", 0), measure("k_rope", 41, layer=2, profile=seen)]
    return case(identity, rope="yarn", measures=measures, first_divergence=first)


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
