"""One measurement in a process of its own: seconds of its CPU and of the clock, and the most memory that it held.

python -m benchmarks.data.measure tokenising "datasets, map" cut FOLDER
"""

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What is timed, and what tells afterwards, of its result, that it was the same work as others'."""

    run: Callable[[], Any]
    check: Callable[[Any], dict[str, Any]]


def measure(case: str, engine: str, kind: str, folder: Path) -> dict[str, Any]:
    """Measure one engine once.

    Raises:
        ImportError: a package of it is not installed.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    work = importlib.import_module(f"benchmarks.data.{case}").ENGINES[engine](folder, kind)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = _status("VmRSS")
    clock, cpu = time.perf_counter(), time.process_time()
    result = work.run()
    took = {"cpu_seconds": time.process_time() - cpu, "seconds": time.perf_counter() - clock}
    memory = {"bytes_before": before, "peak_bytes": _status("VmHWM")}
    return took | memory | work.check(result)


def _status(name: str) -> int:
    """Return bytes that the kernel counts of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    case, engine, kind, folder = sys.argv[1:]
    try:
        found = measure(case, engine, kind, Path(folder))
    except ImportError as error:
        found = {"missing": error.name or str(error)}
    print(json.dumps(found))
