"""Judge anyone's attention function against the oracle: `parity check mypackage.attention:my_function`.

    from parity_tests.check import check_attention
    check_attention(my_function).raise_if_different()

Truth is the oracle in float64, the allowance what the oracle errs under the function's roundings
(`anchorline/tolerance.py`). Beyond numbers: nothing invisible may have any effect, exactly.
docs/same-computation.md says how a function is called.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from anchorline.errors import UserError
from parity_tests.checking.adapter import Adapter, Resolved, attention, merge, name_of, resolve
from parity_tests.checking.cases import DTYPES, LAYOUTS, CheckCase
from parity_tests.checking.hints import find_hint
from parity_tests.checking.judging import CaseResult, check_case, takes
from parity_tests.checking.result import CheckResult, NotTheSame

__all__ = ["Adapter", "CaseResult", "CheckCase", "CheckResult", "NotTheSame", "attention", "check_attention"]

HEADS = ((4, 2), (4, 4), (4, 1))  # groups of 2, of 1, and multi-query
# Each in one more case of a whole check, with heads of its own: many, groups of 3, the usual ones.
HEAD_DIMS: dict[int, tuple[int, int] | None] = {64: (16, 8), 96: (6, 2), 128: None, 256: None}
TellResult = Callable[[CaseResult, int, int], None]


def check_attention(
    fn: Callable[..., Any],
    *,
    layouts: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    heads: Iterable[tuple[int, int]] | None = None,
    head_dim: int = 16,
    backward: bool = True,
    like: str | None = None,
    device: str | None = None,
    adapter: Adapter | None = None,
    seed: int = 0,
    progress: TellResult | None = None,
) -> CheckResult:
    """Judge an attention function on every layout.

    fn: takes q, k, v and the documents (see `Adapter`); returns out, or (out, log-sum-exp).
    layouts: names of `LAYOUTS`; None is all, those with windows, caps and sinks where `fn` takes them, and head_dim
        64, 96, 128 and 256 in one case each.
    dtypes: `float32`, `bfloat16`, `float16`; None is what it declares, else float32 and bfloat16.
    heads: (query heads, key/value heads) pairs; None is groups of 2, 1 and 4.
    head_dim: of all of them.
    backward: also judge dq, dk and dv.
    like: `flash` or `eager`: whose roundings it is allowed; None is what it declares, else `flash`.
    device: None is a GPU where there is one.
    adapter: what the function takes; None is what it declares and its signature says.
    seed: of q, k, v and the cotangent.
    progress: called after each case with its result, the number of the case and of all cases.

    Raises UserError, one line: an option that does not exist, a function whose signature leaves something open.
    Whatever the function itself does wrong is in the result.
    """
    how = resolve(fn, merge(Adapter(like=like), adapter))
    cases = make_cases(how, layouts=layouts, dtypes=dtypes, heads=heads, head_dim=head_dim, seed=seed)
    device = choose_device(how, device)
    results = []
    for number, case in enumerate(cases, start=1):
        results.append(check_case(fn, how, case, backward=backward, device=device))
        if progress is not None:
            progress(results[-1], number, len(cases))

    def right_in_layout(layout: str, case: CheckCase) -> bool:
        other = resolve(fn, merge(Adapter(layout=layout), merge(adapter, how.adapter)))  # type: ignore[arg-type]
        return check_case(fn, other, case, backward=False, device=device).passed

    return CheckResult(name_of(fn), how.adapter, tuple(results), find_hint(how.adapter, results, right_in_layout))


def make_cases(
    how: Resolved,
    *,
    layouts: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    heads: Iterable[tuple[int, int]] | None = None,
    head_dim: int = 16,
    seed: int = 0,
) -> list[CheckCase]:
    """Multiply the options out. Raises UserError naming an option that does not exist."""
    everything, default = layouts is None, heads is None
    if layouts is None:
        layouts = [name for name, layout in LAYOUTS.items() if all(takes(how, added) for added in layout.adds)]
    layouts = list(layouts)
    dtypes = list(how.adapter.dtypes or ("float32", "bfloat16") if dtypes is None else dtypes)
    heads = list(HEADS if heads is None else heads)
    for field, values, choices in (("layouts", layouts, LAYOUTS), ("dtypes", dtypes, DTYPES)):
        for value in values:
            if value not in choices:
                raise UserError(f"{field}: {value!r} is unknown; choose from {', '.join(choices)}")
        if not values:
            raise UserError(f"{field}: none given; choose from {', '.join(choices)}")
    if not heads or any(k < 1 or h < 1 or h % k for h, k in heads):
        raise UserError(f"heads: {heads}; give (query heads, key/value heads) with the first a multiple of the second")
    if head_dim < 1:
        raise UserError(f"head_dim: {head_dim}; give a positive number")
    if seed < 0:
        raise UserError(f"seed: {seed}; give 0 or a positive number")
    cases = [
        CheckCase(LAYOUTS[name], h, k, head_dim, dtype, seed) for name in layouts for dtype in dtypes for h, k in heads
    ]
    if everything:
        others = [size for size in HEAD_DIMS if size != head_dim]
        own = [(HEAD_DIMS[size] if default else None) or heads[0] for size in others]
        cases += [
            CheckCase(LAYOUTS["anchor"], h, k, size, dtype, seed)
            for size, (h, k) in zip(others, own, strict=True)
            for dtype in dtypes
        ]
    return cases


def choose_device(how: Resolved, device: str | None) -> str:
    """The device to run on. Raises UserError for one that is not there."""
    if how.adapter.library == "jax":
        import jax

        chosen = device or ("cuda" if jax.default_backend() == "gpu" else "cpu")
        try:
            jax.devices("gpu" if chosen.startswith("cuda") else chosen)
        except RuntimeError as error:
            raise UserError(f"device: {chosen!r}: {' '.join(str(error).split())}") from None
        return chosen
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device: {chosen!r}: {str(error).splitlines()[0]}") from None
    return chosen
