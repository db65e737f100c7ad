"""The command line in processes that can be killed, without waiting for imports each time.

`python -m torchtrain.tests.forks` reads requests, a line of JSON each, forks a child that runs `torchtrain ARGV`, waits
for it and answers with a line of JSON: its exit code, negative for the signal that ended it, and the seconds it took. A
request may ask for several processes that work together, and say at which phase of the run one kills itself, or after
how many seconds.
"""

import atexit
import gc
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_ports = itertools.count(os.getpid() * 40)


def free_port() -> int:
    """Return a port that is free now, of those below 30,000: the system itself hands out none of them."""
    while True:
        port = 10_000 + next(_ports) % 20_000
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Forks:
    """The server's other end, until `close`.

    module: the server's.
    environment: of the server, besides this process's.
    """

    def __init__(self, module: str = "torchtrain.tests.forks", **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "DS_ACCELERATOR": "cpu",
            }
            | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the server."""
        self._process.communicate()

    def run(self, *argv: str, log: Path, at: str | None = None, nth: int = 1, **more: Any) -> dict[str, Any]:
        """Run `torchtrain ARGV` to its end.

        argv: verb and arguments.
        log: takes what it prints.
        at: phase at whose `nth` time the child sends itself a signal (`PHASES`).
        nth: from 1.
        more: `signal`, default SIGKILL; `error`: raised there instead, an OSError of that number, or a RuntimeError
            with that text; `signal_after`: seconds after which the signal is sent from outside; `processes`: how many
            there are, as torchrun starts them; `rank`: which of them gets the signal or error, default all; `agent`:
            whether all are sent SIGTERM when the first has failed, as torchrun does; `set`: values of constants by
            dotted name; `environment`: variables; `main`: a module whose `main` runs in the command line's place.
            `{rank}` in an argument stands for the process's. Returns `codes`, one a process, and `seconds`, until each
            was gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"argv": argv, "log": str(log), "at": at, "nth": nth, **more}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@cache
def forks() -> Forks:
    """Return the one server of this process."""
    server = Forks()
    atexit.register(server.close)
    return server


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _cut_line(file: Any, *_: Any) -> None:
    file._file.write(b'{"ev')
    _die()


def _half(path: Path, *parts: bytes | memoryview) -> None:
    content = b"".join(parts)
    path.write_bytes(content[: len(content) // 2])
    _die()


# Phase -> (module, the name in it that is replaced at the nth call, what is done first, whether the real thing comes
# before).
PHASES: dict[str, tuple[str, str, Callable[..., None], bool]] = {
    "config": ("transformers", "AutoConfig.from_pretrained", _die, False),
    "tokenizer": ("transformers", "AutoTokenizer.from_pretrained", _die, False),
    "model": ("transformers", "AutoModelForCausalLM.from_pretrained", _die, False),
    "folder": ("torchtrain.run.folder", "replace_file", _die, False),
    "record": ("torchtrain.run.start", "check_config", _die, False),
    "replacement": ("torchtrain.run.folder", "write_file", _die, False),
    "gradient": ("torchtrain.training.step", "accumulate", _die, True),
    "update": ("torch.optim", "AdamW.step", _die, True),
    "event": ("torchtrain.training.events", "MetricsFile.write", _cut_line, False),
    "state": ("torchtrain.checkpoint.fragments", "write_file", _half, False),
    "generators": ("torchtrain.checkpoint.rng", "write_file", _half, False),
    "manifest": ("torchtrain.checkpoint.store", "write_file", _half, False),
    "commit": ("torchtrain.checkpoint.store", "commit", _die, False),
    "committed": ("torchtrain.checkpoint.store", "commit", _die, True),
    "removal": ("torchtrain.checkpoint.folder", "set_aside", _die, True),
    "export": ("torchtrain.run.folder", "commit", _die, False),
    "exported": ("torchtrain.run.folder", "commit", _die, True),
    "evaluation": ("torchtrain.training.held_out", "make_micro_batch", _die, True),
    "plot": ("torchtrain.run.report", "plot", _die, True),
}  # fmt: skip


def arm(phase: str, nth: int, number: int, error: int | str | None) -> None:
    """Do at the `nth` time of a phase what `Forks.run` says: send this process a signal, or raise."""
    module, name, deed, real_first = PHASES[phase]
    target: Any = importlib.import_module(module)
    *owners, leaf = name.split(".")
    for owner in owners:
        target = getattr(target, owner)
    real, calls = getattr(target, leaf), 0

    def replaced(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != nth:
            return real(*args, **kwargs)
        if error is not None:
            raise OSError(error, os.strerror(error), "a file") if isinstance(error, int) else RuntimeError(error)
        if number != signal.SIGKILL:  # one that the process takes, and goes on or not
            os.kill(os.getpid(), number)
            return real(*args, **kwargs)
        if real_first:
            real(*args, **kwargs)
        return deed(*args, **kwargs)

    setattr(target, leaf, replaced)


def _child(request: dict[str, Any], rank: int, port: int) -> None:
    main = importlib.import_module(request.get("main", "torchtrain.cli")).main
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if request["at"] and request.get("rank", rank) == rank:
        arm(request["at"], request["nth"], request.get("signal", signal.SIGKILL), request.get("error"))
    for name, value in request.get("set", {}).items():
        module, _, leaf = name.rpartition(".")
        setattr(importlib.import_module(module), leaf, value)
    os.environ.update(request.get("environment", {}))
    sys.argv = ["torchtrain", *(argument.replace("{rank}", str(rank)) for argument in request["argv"])]
    if (processes := request.get("processes", 1)) > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    code = 1
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed speaks there while it is imported

    # All that a run imports on its way, so that no child does.
    for name in (
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
        "deepspeed.runtime.zero.stage3",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "torchtrain.run.recipe",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(name)
    importlib.import_module("torchtrain.distributed.zero").import_deepspeed()
    importlib.import_module("torch").set_num_threads(1)
    gc.freeze()  # what is imported is not garbage, and DeepSpeed collects often
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        port = free_port()
        children = []
        for rank in range(request.get("processes", 1)):
            children.append(os.fork())
            if children[-1] == 0:
                _child(request, rank, port)
        if (delay := request.get("signal_after")) is not None:
            time.sleep(delay)
            for rank, child in enumerate(children):
                if request.get("rank", rank) == rank:
                    os.kill(child, request.get("signal", signal.SIGKILL))
        codes, seconds = {}, {}
        if request.get("agent"):
            left = dict(enumerate(children))
            while left:
                child, status = os.wait()
                (rank,) = (rank for rank, other in left.items() if other == child)
                del left[rank]
                codes[rank], seconds[rank] = os.waitstatus_to_exitcode(status), time.perf_counter() - started
                if codes[rank]:
                    for other in left.values():
                        os.kill(other, signal.SIGTERM)
            children = []
        stopped = request["rank"] if request.get("signal") == signal.SIGSTOP else None
        for rank, child in sorted(enumerate(children), key=lambda one: one[0] == stopped):
            if rank == stopped:  # it will not end by itself
                os.kill(child, signal.SIGKILL)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            seconds[rank] = time.perf_counter() - started
        answer = {name: [of[rank] for rank in sorted(of)] for name, of in (("codes", codes), ("seconds", seconds))}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
