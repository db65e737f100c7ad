"""The error rule, under the name by which this package knows it; `anchorline/tolerance.py` defines it."""

from anchorline.tolerance import UNIT_ROUNDOFF, Judged, Verdict, judge

__all__ = ["UNIT_ROUNDOFF", "Judged", "Verdict", "judge"]
