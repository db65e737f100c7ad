"""Where a process runs: the commit, the machine, the versions of packages, the process that started it."""

import importlib.metadata
import multiprocessing
import multiprocessing.process
import os
import platform
import subprocess
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout of `root`, and whether tracked files differ; None for what git does not say."""
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no") if commit else None
    return commit, None if status is None else bool(status)


@cache
def processor() -> str:
    """Return the processor's name, or its architecture where the system does not name it, and the number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def end_with_parent() -> None:
    """Let this worker end when the process that started it is gone, even by SIGKILL. The fork server ends after it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, by its mask and control group. root: holds /proc and /sys."""
    # sched_getaffinity exists on Linux alone.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, *map(int, _quotas(root)), cores))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the cores that each control group above this process allows (Linux, version 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for place in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        for folder in (Path(place), *Path(place).parents):
            try:
                quota, period = (root / "sys/fs/cgroup" / folder / "cpu.max").read_text(encoding="utf-8").split()
            except (OSError, ValueError):
                continue
            if quota != "max":
                yield int(quota) / int(period)


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of the running Python, then those of the packages that are installed, by name."""
    return {"python": platform.python_version()} | {
        package: number for package in packages if (number := version(package)) is not None
    }


def packaged_file(package: str, ending: str) -> Path | None:
    """Return the first file with this ending that an installed package carries, or None. It is not imported."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.name.endswith(ending)]
    return paths[0] if paths and paths[0].is_file() else None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
