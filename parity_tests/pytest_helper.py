"""The judge in anyone's test suite:

    import pytest
    from parity_tests.pytest_helper import attention_cases
    from my_kernels import my_attention

    @pytest.mark.parametrize("case", attention_cases(my_attention))
    def test_my_attention(case):
        case.raise_if_different()

There is one test for each layout, dtype and pair of heads. A case that the function cannot run is skipped, with a
reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from parity_tests.check import Adapter, CheckCase, CheckResult, check_attention, make_cases, merge, resolve
from parity_tests.checking.judging import why_not_run


@dataclass(frozen=True)
class BoundCase:
    """A function and one case to judge it on."""

    fn: Callable[..., Any]
    case: CheckCase
    options: dict[str, Any]

    def check(self) -> CheckResult:
        """Judge it."""
        case = self.case
        return check_attention(
            self.fn,
            layouts=[case.layout.name],
            dtypes=[case.dtype],
            heads=[(case.heads, case.kv_heads)],
            head_dim=case.head_dim,
            seed=case.seed,
            **self.options,
        )

    def raise_if_different(self) -> None:
        """Raise an AssertionError that says what is wrong, where and by how much, unless the function passes."""
        __tracebackhide__ = True
        self.check().raise_if_different()


def attention_cases(
    fn: Callable[..., Any],
    *,
    backward: bool = True,
    like: str | None = None,
    device: str | None = None,
    adapter: Adapter | None = None,
    **options: Any,
) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, with ids. `options` are `layouts`, `dtypes`, `heads`, `head_dim` and `seed`.

    Raises ValueError, one line, as `check_attention` does, for an ambiguous signature or an unknown option.
    """
    how = resolve(fn, merge(Adapter(like=like), adapter))
    bound = {"backward": backward, "like": like, "device": device, "adapter": adapter}
    parameters = []
    for case in make_cases(how, **options):
        reason = why_not_run(how, case)
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        parameters.append(pytest.param(BoundCase(fn, case, bound), id=case.id, marks=marks))
    return parameters
