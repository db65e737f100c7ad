"""A "cuda" device for a machine without a GPU: real numbers in the host's memory (`device.cpp`). Import this before
torch.

    import torchtrain.tests.cuda.standin       # loads the device; torch.cuda then says that there are four H100s

What it shows: devices that are mixed, dtypes, copies nobody waited for, where the host waits (`waits`), what a device
holds, collectives under the name of NCCL. What it cannot show: kernels' numbers, streams, races, NCCL itself.

`why_not()` says, without loading anything, why a machine cannot have it.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
COMPILERS = ("c++", "g++", "clang++")
_OURS = str(SOURCE.parents[2])  # the trainer's folder
DEVICE: Any = None  # the library, once it is loaded


def why_not() -> str | None:
    """Say why this machine cannot have the device, or None."""
    version = importlib.metadata.version("torch")
    if not sys.platform.startswith("linux"):
        return f"the stand-in for CUDA is made for Linux, this is {sys.platform}"
    if _torch_folder().joinpath("lib", "libtorch_cuda.so").exists():
        return f"the stand-in for CUDA needs PyTorch's CPU build, and {version} is built for CUDA or ROCm"
    if _compiler() is None:
        return f"the stand-in for CUDA needs a C++ compiler ({', '.join(COMPILERS)}), none is installed"
    return None


def build() -> Path:
    """Compile the device, once for each source and version of torch, and return the library.

    It takes some 30 s. The folder is `cache/cuda-standin` of the repository, which git ignores.

    Raises RuntimeError: the compiler refuses it; with what it says.
    """
    torch = _torch_folder()
    compiler = _compiler()
    assert compiler is not None, why_not()
    command = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", "-w", str(SOURCE)]
    command += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    made_of = [SOURCE.read_text(encoding="utf-8"), importlib.metadata.version("torch"), *command]
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = SOURCE.parents[3] / "cache" / "cuda-standin"
    library = folder / f"{digest}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # of another process, too, only what is whole is seen
        made = Path(temporary) / library.name
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{compiler} could not compile {SOURCE}:\n{done.stderr}")
        made.replace(library)
    return library


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def load() -> Any:
    """Load the device, before torch, and set up `torch.cuda`; return the library. Raises RuntimeError: torch is there
    already.
    """
    global DEVICE
    if "torch" in sys.modules:
        raise RuntimeError("torch asks for its devices when it is imported: load the stand-in before")
    os.environ["DS_ACCELERATOR"] = "cuda"
    device = ctypes.CDLL(str(build()))
    for name in ("standin_held", "standin_peak"):
        getattr(device, name).restype = ctypes.c_int64
    import torch

    assert device.standin_start(), "torch has not taken the stand-in for its CUDA"
    _set_up(torch, device)
    DEVICE = device
    return device


class _Properties:
    """What torch tells of a device."""

    name, major, minor = "NVIDIA H100 80GB HBM3 (stand-in)", 9, 0
    total_memory, multi_processor_count = 80 * 2**30, 132


def _set_up(torch: Any, device: Any) -> None:
    """Answer for CUDA's Python side, which a CPU build of torch lacks."""
    cuda = torch.cuda
    generators = {i: torch.Generator() for i in range(device.standin_devices())}

    def index(of: Any = None) -> int:
        of = torch.device("cuda", of) if isinstance(of, int) else torch.device("cuda" if of is None else of)
        assert of.type == "cuda", of
        return device.standin_current() if of.index is None else of.index

    @contextlib.contextmanager
    def on(of: Any) -> Iterator[None]:
        before = device.standin_current()
        device.standin_set_current(index(of))
        try:
            yield
        finally:
            device.standin_set_current(before)

    class Stream:
        def __new__(cls, device: Any = None, **_: Any) -> Any:
            return torch.Stream(torch.device("cuda", index(device)))

    class Event:
        def __new__(cls, **_: Any) -> Any:
            return torch.Event("cuda")

    answers = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: device.standin_devices(),
        "current_device": lambda: device.standin_current(),
        "set_device": lambda of: device.standin_set_current(index(of)),
        "device": on,
        "get_device_capability": lambda of=None: (_Properties.major, _Properties.minor),
        "get_device_name": lambda of=None: _Properties.name,
        "get_device_properties": lambda of=None: _Properties,
        "synchronize": lambda of=None: device.standin_synchronize(),
        "memory_allocated": lambda of=None: device.standin_held(index(of)),
        "memory_reserved": lambda of=None: device.standin_held(index(of)),
        "max_memory_allocated": lambda of=None: device.standin_peak(index(of)),
        "max_memory_reserved": lambda of=None: device.standin_peak(index(of)),
        "reset_peak_memory_stats": lambda of=None: device.standin_reset_peak(index(of)),
        "memory_stats": lambda of=None: {"allocated_bytes.all.current": device.standin_held(index(of))},
        "empty_cache": lambda: None,
        "Stream": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "Event": Event,
        "get_rng_state": lambda of=None: generators[index(of)].get_state(),
        "set_rng_state": lambda state, of=None: generators[index(of)].set_state(state),
        "manual_seed": lambda seed: generators[index()].manual_seed(seed) and None,
        "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in generators.values()] and None,
    }
    for name, answer in answers.items():
        assert hasattr(cuda, name), f"torch.cuda has no {name} any more"
        setattr(cuda, name, answer)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: 0
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(cuda.random, name, answers[name])


@contextlib.contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count what the host waits for the device for while the block lasts, and float64 there, by where in the trainer.

    Keys are "PLACE: WHAT", such as "training/losses.py add: item"; in a backward pass, on a thread of torch's, PLACE is
    "autograd".
    """
    seen: Counter[str] = Counter()

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def note(what: bytes) -> None:
        seen[f"{_place()}: {what.decode()}"] += 1

    DEVICE.standin_watch(note)
    try:
        yield seen
    finally:
        DEVICE.standin_watch(None)


def _place() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        own = file.startswith(_OURS) and not file.startswith(str(SOURCE.parent))
        if own and not frame.f_code.co_name.startswith("<"):  # a comprehension is a frame up to Python 3.11
            return f"{Path(file).relative_to(_OURS)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"
