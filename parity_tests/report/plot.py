"""Draw error against allowance, along the sequence and over the layers, and say in words where it exceeds it."""

import math
from base64 import b64encode
from collections.abc import Sequence

from parity_tests.report.schema import Measure, Profile

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 200, 46, 22, 30


def plot(profile: Profile, tokens: int) -> str:
    """Return a drawing along the sequence as the address of an image.

    profile: at least two runs.
    tokens: of a row, where the last run ends; 0: not known, and as long as the others.
    """
    edges = [*profile.starts, tokens or profile.starts[-1] + profile.starts[1]]
    return _draw(edges, profile.error, profile.allowance, _over(profile), "token")


def plot_layers(measures: Sequence[Measure]) -> str:
    """Return a drawing of one array of every layer as the address of an image."""
    edges = [*range(len(measures) + 1)]
    over = [i for i, measure in enumerate(measures) if not measure.passed]
    return _draw(edges, [m.error for m in measures], [m.allowance for m in measures], over, "layer")


def where_over(profile: Profile) -> str:
    """`above its allowance from token 512 on`: which runs, in words."""
    over, runs = _over(profile), len(profile.starts)
    if not over:
        return "within its allowance in every run"
    if len(over) == runs:
        return "above its allowance everywhere"
    first = profile.starts[over[0]]
    if over == list(range(over[0], runs)):
        return f"above its allowance from token {first:,} on"
    return f"above its allowance in {len(over)} of {runs} runs, the first from token {first:,}"


def _over(profile: Profile) -> list[int]:
    """The runs that break the rule by themselves."""
    pairs = zip(profile.error, profile.allowance, strict=True)
    return [i for i, (error, allowance) in enumerate(pairs) if not error <= allowance < math.inf]


def _draw(edges: list[int], error: list[float], allowance: list[float], over: list[int], axis: str) -> str:
    """Two step lines on a logarithmic scale, as SVG; grey is read on white and on black paper alike."""
    shown = [value for value in (*error, *allowance) if 0 < value < math.inf] or [1.0]
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)) + 1e-9)

    def x(edge: float) -> float:
        return _LEFT + (edge - edges[0]) / (edges[-1] - edges[0]) * (_WIDTH - _LEFT - 8)

    def y(value: float) -> float:
        return _TOP + (high - math.log10(value)) / max(1, high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def line(values: list[float], style: str) -> str:
        parts = [
            f"M{x(start):.1f} {y(value):.1f}H{x(stop):.1f}"
            for value, start, stop in zip(values, edges, edges[1:], strict=False)
            if 0 < value < math.inf
        ]
        return f'<path d="{" ".join(parts)}" fill="none" stroke-width="1.6" {style}/>'

    bottom = _HEIGHT - _BOTTOM
    marks = "".join(
        f'<rect x="{x(edges[i]):.1f}" y="{_TOP}" width="{x(edges[i + 1]) - x(edges[i]):.1f}" height="{bottom - _TOP}" '
        'fill="red" fill-opacity=".15"/>'
        for i in over
    )
    step = max(1, (high - low) // 4)
    marks += "".join(f'<text x="2" y="{y(10.0**n) + 4:.1f}">1e{n}</text>' for n in range(low, high + 1, step))
    for edge, anchor in ((edges[0], "start"), (edges[-1], "end")):
        marks += f'<text x="{x(edge):.1f}" y="{bottom + 13}" text-anchor="{anchor}">{edge:,}</text>'
    marks += f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}">{axis}</text>'
    marks += f'<text x="{_LEFT}" y="12">error ―  allowance ┄</text>'
    size = f'width="{_WIDTH - _LEFT - 8}" height="{bottom - _TOP}"'
    box = f'<rect x="{_LEFT}" y="{_TOP}" {size} fill="none" stroke="grey"/>'
    lines = line(error, 'stroke="#1f5f86"') + line(allowance, 'stroke="#c2501d" stroke-dasharray="5 3"')
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="grey">{marks}{box}{lines}</svg>'
    )
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
