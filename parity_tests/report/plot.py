"""Error along the sequence against the allowance, as inline SVG: two step lines over tokens, on a logarithmic scale.

Runs of tokens where the error exceeds the allowance are shaded. Colours and line styles are the page's.
"""

import math
from collections.abc import Callable

from parity_tests.report.schema import Profile

WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 22, 26, 34  # margins
GRID_LINES = 5
APART = 40  # labels on the x axis do not stand closer


def plot(profile: Profile, tokens: int) -> str:
    """One plot.

    Args:
        profile: at least one run.
        tokens: of a row; the last run ends there.
    """
    edges = [*profile.starts, max(tokens, profile.starts[-1] + 1)]
    low, high = _decades(profile)

    def x(token: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (token - edges[0]) / (edges[-1] - edges[0])

    def y(value: float) -> float:
        exponent = (
            high if math.isnan(value) else math.log10(value) if 0 < value < math.inf else low if value <= 0 else high
        )
        share = (min(max(exponent, low), high) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def line(name: str, values: list[float]) -> str:
        steps = "".join(f"V{y(value):.1f}H{x(stop):.1f}" for value, stop in zip(values, edges[1:], strict=True))
        return f'<path class="{name}" d="M{x(edges[0]):.1f} {y(values[0]):.1f}{steps}"/>'

    over = _over(profile)
    bottom = HEIGHT - BOTTOM
    shaded = "".join(
        f'<rect class="over" x="{x(edges[i]):.1f}" y="{TOP}" width="{x(edges[i + 1]) - x(edges[i]):.1f}" '
        f'height="{bottom - TOP}"/>'
        for i in over
    )
    step = math.ceil((high - low) / GRID_LINES)
    grid = "".join(
        f'<path class="grid" d="M{LEFT} {y(10.0**e):.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="left" x="{LEFT - 6}" y="{y(10.0**e) + 4:.1f}">1e{e}</text>'
        for e in range(low, high + 1, step)
    )
    ticks = "".join(
        f'<path class="grid" d="M{x(t):.1f} {bottom}v4"/><text class="below" x="{x(t):.1f}" y="{bottom + 15}">{t:,}</text>'
        for t in _ticks([edges[i] for i in over[:1]], edges, x)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Error and allowance along the sequence: '
        f'{where_over(profile)}">{shaded}{grid}{ticks}{line("allowance", profile.allowance)}{line("error", profile.error)}'
        f'<path class="error" d="M{LEFT} 12h20"/><text x="{LEFT + 26}" y="16">error</text>'
        f'<path class="allowance" d="M{LEFT + 74} 12h20"/><text x="{LEFT + 100}" y="16">allowance</text>'
        f'<text class="left" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}">token</text></svg>'
    )


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
    if over == list(range(over[0], over[-1] + 1)):
        return f"above its allowance from token {first:,} to {profile.starts[over[-1] + 1] - 1:,}"
    return f"above its allowance in {len(over)} of {runs} runs, the first from token {first:,}"


def _over(profile: Profile) -> list[int]:
    """The runs that break the rule by themselves."""
    pairs = zip(profile.error, profile.allowance, strict=True)
    return [i for i, (error, allowance) in enumerate(pairs) if not error <= allowance < math.inf]


def _decades(profile: Profile) -> tuple[int, int]:
    """Powers of ten that hold every positive number; what is zero or infinite is drawn at the edge."""
    exponents = [math.log10(v) for v in (*profile.error, *profile.allowance) if 0 < v < math.inf] or [0.0]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    return low, max(high, low + 1)


def _ticks(first_over: list[int], edges: list[int], x: Callable[[int], float]) -> list[int]:
    """The first token above the allowance, the ends and the middle, as far as there is room."""
    ticks: list[int] = []
    middle = (edges[0] + edges[-1]) // 2
    for token in (*first_over, edges[0], edges[-1], middle):
        if all(abs(x(token) - x(other)) >= APART for other in ticks):
            ticks.append(token)
    return sorted(ticks)
