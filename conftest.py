"""What every test shares: when GPU tests run, how hypothesis draws."""

import importlib.metadata
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings

from anchorline.tests import shapes

shapes.install(["jaxref", "torchtrain.attention", "torchtrain.data.rows"])  # before anything imports them

QUICK_XLA = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# A fresh clone gets the same examples everywhere; `--hypothesis-profile=explore` draws new ones. No example is timed.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """For programs that run once on tiny arrays: most of their time would be the compiler's."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
    """Compile JAX's programs quickly, and each once for all processes of a run, and of the next. Receive Ctrl-C."""
    # A shell starts what runs in its background with SIGINT ignored, and the tests' processes would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Half of what XLA's compiler takes for a CPU, it takes in emitters that make programs faster which run once here.
    # XLA ends the process at a flag that it does not know: jaxlib 0.11 lacks them.
    flags = os.environ.get("XLA_FLAGS", "")
    if QUICK_XLA not in flags and importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] = f"{flags} {QUICK_XLA}".strip()
    if (cache := getattr(config, "cache", None)) is not None:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without a CUDA device, and say so. Unpack SmolLM2 first: others wait for who does.

    Of the cases of a test marked `one_of(n)`, every nth stays in `make test`; the others become `sweep`.
    """
    items.sort(key=lambda item: item.path.name != "test_smollm2.py")
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_of")) is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker("sweep")
            seen[test] += 1
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none here"))
