"""`--check`: a result beside an earlier one. Ratios are compared, never seconds, each with the noise of both."""

import math
from typing import Any

from anchorline.errors import UserError
from torchtrain.bench.memory import WAYS
from torchtrain.bench.spread import noise_of, show

# What tells rows of a result apart (where they have it), and which of its numbers are compared.
_KEYS = {
    "attention": (("dtype", "tokens", "row", "name"), ("of_full",)),
    "step": (("tokens", "loop"), ("of_yardstick",)),
    "memory": (("model", "processes", "gib", "trained", "lora"), WAYS),
}
_OPTIONAL = ("trained", "lora")


def compare_with(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each ratio that moved by more than the noise that both measured, and for what is gone.

    What only one of the two was asked for is not compared.

    Args:
        before: an earlier result.
        after: this one, of the same verb.

    Raises:
        UserError: they have nothing in common, or the earlier one is damaged.
    """
    names, ratios = _KEYS[after["what"]]

    def key_of(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in names if name in row or name not in _OPTIONAL)

    try:
        earlier = {key_of(row): row for row in before["rows"]}
        found, shared = list[str](), 0
        for row in after["rows"]:
            key = key_of(row)
            for ratio in ratios if key in earlier else ():
                old, new = earlier[key].get(ratio), row.get(ratio)
                shared += old is not None
                if moved := _moved(old, new, row):
                    which = (*key, ratio) if len(ratios) > 1 else key
                    found.append(f"{', '.join(which)}: {moved}")
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
