"""Anchorline's judge: the oracle and the trainer side by side. Only this package imports both."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`check_attention` at its first use: importing the package imports neither torch nor JAX."""
    if name == "check_attention":
        from parity_tests.check import check_attention

        return check_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
