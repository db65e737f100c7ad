"""What every test shares: when GPU tests run, how hypothesis draws."""

import importlib.util
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A fresh clone gets the same examples everywhere; `--hypothesis-profile=explore` draws new ones. No example is timed.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """For tests of what is computed by programs that run once on tiny arrays: most of their time would be the compiler's."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device, and say so."""
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none here"))
