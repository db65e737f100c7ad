"""`--check`: a result beside an earlier one. Ratios are compared, never seconds, each with the noise of both."""

import math
from typing import Any

from anchorline.errors import UserError
from torchtrain.bench.spread import noise_of, show

# What tells rows of a result apart, and which of its ratios is compared.
_KEYS = {
    "attention": (("dtype", "tokens", "row", "name"), "of_full"),
    "step": (("tokens", "loop"), "of_yardstick"),
    "memory": (("model", "processes", "gib"), "all"),
}


def compare_with(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each ratio that moved by more than the noise that both measured, and for what is gone.

    What only one of the two was asked for is not compared.

    Args:
        before: an earlier result.
        after: this one, of the same verb.

    Raises:
        UserError: they have nothing in common, or the earlier one is damaged.
    """
    names, ratio = _KEYS[after["what"]]

    def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return (*(row[name] for name in names), *([row["trained"]] if "trained" in row else []))

    try:
        earlier = {key_of(row): row for row in before["rows"]}
        found, shared = list[str](), 0
        for row in after["rows"]:
            key = key_of(row)
            if key in earlier:
                old, new = earlier[key].get(ratio), row.get(ratio)
                shared += old is not None
                if moved := _moved(old, new, row):
                    found.append(f"{', '.join(map(str, key))}: {moved}")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError("--check: the earlier result is damaged or of another version; make it anew") from None
    if not shared:
        raise UserError("--check: the earlier result has nothing that was measured here; give one of the same config")
    return found


def _moved(old: Any, new: Any, row: dict[str, Any]) -> str | None:
    """Say how a ratio moved, or nothing. What was not there before cannot have moved."""
    if old is None:
        return None
    if new is None:
        return f"was measured, and is not any more: {row.get('not_run', 'nothing fits')}"
    if not isinstance(old, dict):  # counted, without noise
        return None if old == new else f"{old:,} before, {new:,} now"
    change, noise = math.log(new["median"] / old["median"]), noise_of(old) + noise_of(new)
    if abs(change) <= noise:
        return None
    return f"{show(old)} before, {show(new)} now: {math.exp(change) - 1:+.0%}, noise {math.exp(noise) - 1:.0%}"
