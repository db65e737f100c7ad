"""Where a process runs: the commit, the machine, the packages."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from anchorline.environment import git_state, packaged_file, processor, usable_cores, versions


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_checkout_has_a_commit_and_is_clean_or_not(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "checkout"
    folder.mkdir()
    assert git_state(folder) == (None, None)
    assert git_state(tmp_path / "none") == (None, None)
    git(folder, "init", "-q")
    assert git_state(folder) == (None, None)  # there is no commit yet
    (folder / "a").write_text("a")
    git(folder, "add", "a")
    git(folder, "commit", "-qm", "one")
    commit = git(folder, "rev-parse", "HEAD")
    assert len(commit) == 40
    (folder / "untracked").touch()
    assert git_state(folder) == (commit, False)
    (folder / "a").write_text("b")
    assert git_state(folder) == (commit, True)
    monkeypatch.setenv("PATH", "")
    assert git_state(folder) == (None, None)


def test_the_processor_has_its_cores_and_versions_are_of_installed_packages():
    name, _, cores = processor().rpartition(", ")
    assert name
    assert cores == f"{os.cpu_count()} cores"
    known = versions(["pydantic", "none-of-this-name"])
    assert known == {"python": platform.python_version(), "pydantic": importlib.metadata.version("pydantic")}


def test_a_file_of_a_package_is_found_without_importing_it():
    file = packaged_file("pydantic", "main.py")
    assert file is not None
    assert file.name == "main.py"
    assert packaged_file("pydantic", ".gguf") is None
    assert packaged_file("none-of-this-name", ".py") is None


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),  # a container's
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 1),  # of a group above
        ("9:name=systemd:/", {}, 8),
        (None, {}, 8),  # no Linux
    ],
)
def test_a_process_uses_no_more_cores_than_its_control_group_gives(tmp_path, monkeypatch, groups, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, text in {**({} if groups is None else {"proc/self/cgroup": groups}), **files}.items():
        path = tmp_path / (name if name.startswith("proc") else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert usable_cores(tmp_path) == cores


def test_a_worker_ends_with_a_parent_that_is_killed():
    """Both hold the pipe, which closes when both are gone."""
    work = "from anchorline.environment import *; import time; end_with_parent(); print(1, flush=True); time.sleep(60)"
    code = f"import multiprocessing as m; m.get_context('spawn').Process(target=exec, args=({work!r},)).start()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"1\n"
        parent.kill()
        assert (parent.stdout.read(), parent.wait()) == (b"", -9)
