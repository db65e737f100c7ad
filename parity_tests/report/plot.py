"""Error along the sequence against the allowance: where two step lines over tokens run, on a logarithmic scale.

Runs of tokens where the error exceeds the allowance are shaded. `profile.svg.j2` draws it in the page's colours and
line styles.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parity_tests.report.schema import Profile

WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 22, 26, 34  # margins
GRID_LINES = 5
APART = 40  # labels on the x axis do not stand closer


@dataclass(frozen=True)
class Plot:
    """A drawing's places, in units of its view box; y grows downwards."""

    words: str
    over: list[tuple[float, float]]  # x and width of every run above its allowance
    grid: list[tuple[float, str]]  # y of a power of ten
    ticks: list[tuple[float, str]]  # x of a token
    error: str  # a path
    allowance: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def plot(profile: Profile, tokens: int) -> Plot:
    """One plot.

    Args:
        profile: at least one run.
        tokens: of a row; the last run ends there.
    """
    edges = [*profile.starts, max(tokens, profile.starts[-1] + 1)]
    low, high = _decades(profile)

    def x(token: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (token - edges[0]) / (edges[-1] - edges[0]), 1)

    def y(value: float) -> float:
        exponent = (
            high if math.isnan(value) else math.log10(value) if 0 < value < math.inf else low if value <= 0 else high
        )
        share = (min(max(exponent, low), high) - low) / (high - low)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)

    def path(values: Sequence[float]) -> str:
        steps = "".join(f"V{y(value)}H{x(stop)}" for value, stop in zip(values, edges[1:], strict=True))
        return f"M{x(edges[0])} {y(values[0])}{steps}"

    over = _over(profile)
    decades = range(low, high + 1, math.ceil((high - low) / GRID_LINES))
    return Plot(
        words=where_over(profile),
        over=[(x(edges[i]), round(x(edges[i + 1]) - x(edges[i]), 1)) for i in over],
        grid=[(y(10.0**exponent), f"1e{exponent}") for exponent in decades],
        ticks=[(x(token), f"{token:,}") for token in _ticks([edges[i] for i in over[:1]], edges, x)],
        error=path(profile.error),
        allowance=path(profile.allowance),
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
