"""What torchrun sets, set wrongly: one line that names the variable, on the spot."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from anchorline.errors import UserError
from torchtrain.config import load_config
from torchtrain.distributed import world
from torchtrain.distributed.world import check_driver, read_ranks
from torchtrain.tests.forks import forks, free_port
from torchtrain.tests.runs import TIME_LIMIT

PLACE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def place(monkeypatch):
    def place(**changes: str | None) -> None:
        for name in PLACE:
            monkeypatch.delenv(name, raising=False)
        for name, value in changes.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return place


def test_one_process_and_a_place_among_others(place):
    place()
    assert read_ranks() == (0, 1, 0)
    place(**PLACE)
    assert read_ranks() == (1, 2, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("RANK", value) for value in ("abc", "", "-1", "2", "1.0", "9" * 5000, "\u0661")),
        *(("WORLD_SIZE", "0"), ("LOCAL_RANK", "2"), ("MASTER_PORT", "65536"), ("MASTER_PORT", None)),
        *(("MASTER_ADDR", value) for value in ("no.such.host.invalid", None, "a b", "256.1.1.1")),
    ],
)
def test_what_is_set_wrongly_is_named(place, name, value):
    place(**(PLACE | {name: value}))
    with pytest.raises(UserError, match=f"^{name}.*; start processes with torchrun, which sets it$") as refused:
        read_ranks()
    assert len(str(refused.value)) < 400


def test_a_port_that_is_taken_is_one_line(tree, write_config, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        there = PLACE | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port}
        ended = forks().run("train", str(write_config(tree)), log=tmp_path / "log", environment=there)
    said = (tmp_path / "log").read_text()
    assert ended["codes"] == [2], said
    assert said.splitlines()[-1].startswith(
        f"torchtrain: MASTER_ADDR and MASTER_PORT, 127.0.0.1:{port}: the processes cannot connect there: "
    )
    assert "Traceback" not in said


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("number", "code", "how"), [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_ends_who_waits_for_the_others(tree, write_config, number, code, how):
    """The call in which it waits would return after two hours."""
    program = (
        "import sys\n"
        "from torchtrain.config import load_config\n"
        "from torchtrain.distributed.world import join\n"
        "from torchtrain.run.termination import Termination\n"
        "with Termination(), join(load_config(sys.argv[1]).distributed): pass\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
        }
        waiting = subprocess.Popen(
            [sys.executable, "-c", program, write_config(tree)],
            env=os.environ | place,
            stderr=subprocess.PIPE,
            text=True,
        )
        first.accept()
        waiting.send_signal(number)
        _, said = waiting.communicate(timeout=TIME_LIMIT)
    assert waiting.returncode == code
    assert f"torchtrain: rank 1: {how} while it waited for the other processes at 127.0.0.1:{port}\n" in said


def test_a_group_waits_as_long_as_an_export_takes(tree, write_config):
    """NCCL's own ten minutes are less than an export takes."""
    alone = load_config(write_config(tree), ["distributed.zero_stage=1"])
    with world.join(alone.distributed):
        found = world.dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    assert found == world.TIMEOUT


@pytest.mark.parametrize(("visible", "refused"), [(None, True), ("", False)])
def test_gpus_that_torch_cannot_use_stop_a_run(monkeypatch, visible, refused):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter(["/dev/nvidia0"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match="install a driver for CUDA") if refused else nullcontext():
        check_driver()


@pytest.mark.parametrize("user", [None, "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_gpus_allocator_may_grow_its_segments_unless_the_user_configures_it(
    tree, write_config, monkeypatch, place, user
):
    place()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    if user is not None:
        monkeypatch.setenv(user, "max_split_size_mb:512")
    for name, answer in (("is_available", True), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, answer=answer: answer)
    with world.join(load_config(write_config(tree)).distributed):
        wanted = "expandable_segments:True" if user is None else None
        assert os.environ.get("PYTORCH_ALLOC_CONF") == wanted


# In the second attempt rank 0 connects seconds before rank 1 does, and must not find the first attempt's address.
RESTARTED = """
import os, sys, time
from pathlib import Path
from torchtrain.config import load_config
from torchtrain.distributed.world import join
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if os.environ["RANK"] == "1" and not first:
    time.sleep(2)
with join(load_config(sys.argv[1]).distributed, for_threads=True) as world:
    told = world.for_threads().gather(world.rank), world.gather(world.rank)
    if first and world.rank == 1:
        os._exit(1)
    world.sum([1])
    Path(f"{sys.argv[2]}-{world.rank}").write_text(f"{told}")
"""


def test_processes_connect_again_when_torchrun_restarts_them(tree, write_config, tmp_path):
    (tmp_path / "restarted.py").write_text(RESTARTED)
    torchrun = [*(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1")]
    torchrun += [f"--master_port={free_port()}", str(tmp_path / "restarted.py"), str(write_config(tree))]
    torchrun += [str(tmp_path / "told")]
    clean = {name: value for name, value in os.environ.items() if name not in PLACE}
    ended = subprocess.run(torchrun, env=clean, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(2)] == ["([0, 1], [0, 1])"] * 2


# The store's machine lost power: no connection breaks, and a request waits forever.
SILENT_STORE = """
import threading
from torchtrain.distributed import heartbeat

class Silent:
    def __init__(self, *_, **__): pass
    def set(self, *_): threading.Event().wait()

heartbeat.dist.TCPStore = Silent
heartbeat.PERIOD, heartbeat.PATIENCE, heartbeat.GRACE = 0.05, 0.2, 0.05
with heartbeat.heartbeat(0, 2):
    threading.Event().wait(60)
"""


def test_a_store_that_no_longer_answers_ends_the_rank():
    ended = subprocess.run(
        [sys.executable, "-c", SILENT_STORE], env=os.environ | PLACE, capture_output=True, text=True, timeout=TIME_LIMIT
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("torchtrain: rank 0: stopped, because torchrun's store is gone (no answer)\n")
