"""Matrix products of a bfloat16 model on a CPU without fast bfloat16 products: in float32, each rounded once.

A CPU with AVX2 alone can multiply bfloat16 matrices up to 50 times slower than float32 ones (docs/LOG.md), and its
flags do not say so: a process measures the three products of a linear layer once. bfloat16 kernels sum in float32 and
round at the same place; only the order of sums differs.

Legend: n tokens · I, O input and output width of a layer.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FACTOR = 2.0  # bfloat16 must be so many times slower: a wide gap, so that a machine chooses the same every time
_N, _I, _O = 128, 512, 512  # of the products that are measured
_TURNS = 3  # the fastest counts
_SLICE = 2**24  # elements of a weight that are in float32 at one time
_MADE, _COLUMNS = 2**21, 4096  # elements of a result, and its columns: a cache holds them until they are rounded


@dataclass(frozen=True)
class Rates:
    """GFLOP/s of one core for the products of a linear layer: its output, its input's and its weight's gradient."""

    bfloat16: tuple[float, float, float]
    float32: tuple[float, float, float]  # with the conversions to float32 and back

    @property
    def slowdown(self) -> float:
        """How many times as long bfloat16 takes for one product of each kind."""
        return sum(1 / rate for rate in self.bfloat16) / sum(1 / rate for rate in self.float32)


@cache
def measure_rates() -> Rates:
    """Measure bfloat16 products and those of `multiply` in float32 on this CPU. Takes milliseconds, once a process."""
    shapes = (_N, _I), (_O, _I), (_N, _O)
    x_nI, w_OI, g_nO = (torch.ones(shape, dtype=torch.bfloat16, device="cpu") for shape in shapes)
    pairs = ((x_nI, w_OI.t()), (g_nO, w_OI), (g_nO.t(), x_nI))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with CPU time, so that other programs on the machine change nothing
    try:
        with torch.no_grad():
            plain, wide = (tuple(_rate(product, a, b) for a, b in pairs) for product in (torch.mm, _in_float32))
    finally:
        torch.set_num_threads(threads)
    return Rates(plain, wide)  # type: ignore[arg-type]


def _rate(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    product(a, b)  # the first call prepares the kernel
    seconds = []
    for _ in range(_TURNS):
        started = time.thread_time()
        product(a, b)
        seconds.append(time.thread_time() - started)
    return 2 * _N * _I * _O / min(seconds) / 1e9


def measure_speed(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square product as a model of this dtype multiplies on this CPU, with all threads."""
    size, seconds = 1024, []
    x = torch.ones(size, size, dtype=dtype, device="cpu")
    with torch.no_grad():
        for _ in range(1 + _TURNS):
            started = time.perf_counter()
            multiply(x, x)
            seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


@cache
def chooses_float32() -> bool:
    """Whether bfloat16 models on this CPU multiply in float32: where that is at least `FACTOR` times as fast."""
    return measure_rates().slowdown >= FACTOR


def multiplies_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model of this dtype, on this device, multiplies as `multiply` does in float32."""
    return dtype == torch.bfloat16 and device.type == "cpu" and chooses_float32()


def describe_products(dtype: torch.dtype, device: torch.device) -> str:
    """Return how a model multiplies, and why, in a line for people; empty where nothing was chosen."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        return ""
    rates = measure_rates()
    slow, fast = (f"{3 / sum(1 / rate for rate in each):,.0f}" for each in (rates.bfloat16, rates.float32))
    reason = f"a core multiplies bfloat16 at {slow} GFLOP/s, float32 with its conversions at {fast}"
    return f"in float32, each rounded to bfloat16 once: {reason}" if chooses_float32() else f"in bfloat16: {reason}"


def use_float32_products(model: nn.Module) -> None:
    """Let bfloat16 linear layers multiply as `linear` does where a CPU is slow at it; chosen here, once."""
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        if multiplies_in_float32(module.weight.dtype, module.weight.device):
            module.__class__ = LinearInFloat32  # not a forward of its own, which torch.compile compiles for each layer


class LinearInFloat32(nn.Linear):
    """A linear layer that multiplies in float32 and rounds once."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input W^T + bias."""
        return _Linear.apply(input, self.weight, self.bias)  # type: ignore[return-value]

    def widened(self, input_nI: Tensor) -> Tensor:
        """Return the numbers of `forward` in float32, without a gradient."""
        out_nO = input_nI.new_empty(len(input_nI), len(self.weight), dtype=torch.float32)
        return _in_float32(input_nI, self.weight.t(), self.bias, out_nO)


LINEAR = (nn.Linear, LinearInFloat32)  # types of a layer that computes x W^T + bias, and nothing else


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + bias [.., O] as `F.linear`; bfloat16 on a CPU by `multiply`'s rule, in its gradients, too."""
    if _is_slow(x):
        return _Linear.apply(x, weight_OI, bias_O)  # type: ignore[return-value]
    return F.linear(x, weight_OI, bias_O)


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a b of two matrices; of bfloat16 on a CPU that is slow at it, by float32, rounded once. No gradient.

    a: of b's dtype, or what `round_for_products` returned.
    b: a matrix.
    out: written to and returned, if it is given.
    """
    return _in_float32(a, b, out=out) if _is_slow(b) else torch.mm(a, b, out=out)


def round_for_products(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 matrix rounded to dtype, as `multiply` takes it: there in float32, and x itself, overwritten."""
    if not multiplies_in_float32(dtype, x.device):
        return x.to(dtype)
    for rows in _parts(len(x), _MADE // max(1, x.shape[1])):
        x[rows] = x[rows].to(dtype)
    return x


def _is_slow(x: Tensor) -> bool:
    return multiplies_in_float32(x.dtype, x.device)


def _in_float32(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return a b + bias in b's dtype, rounded once, a large b part by part. out: of b's dtype, or float32, rounded."""
    out = b.new_empty(a.shape[0], b.shape[1]) if out is None else out
    if b.numel() <= _SLICE or b.shape[1] >= b.shape[0]:
        for columns in _parts(b.shape[1], min(_COLUMNS, _SLICE // max(1, b.shape[0]))):
            wide_b = b[:, columns].float()
            for rows in _parts(a.shape[0], _MADE // max(1, wide_b.shape[1])):
                made = a[rows].float() @ wide_b
                made = made if bias is None else made.add_(bias[columns])
                out[rows, columns] = made if out.dtype == b.dtype else made.to(b.dtype)
        return out
    wide_a = a.float()
    rows = max(1, _SLICE // b.shape[1])
    made = wide_a.new_zeros(a.shape[0], b.shape[1])
    for part_a, part_b in zip(wide_a.split(rows, 1), b.split(rows), strict=True):
        made.addmm_(part_a, part_b.float())
    return out.copy_((made if bias is None else made.add_(bias)).to(b.dtype))


def _parts(length: int, most: int) -> Iterator[slice]:
    """Cut a length into parts of equal size, at most so large."""
    size = max(1, -(-length // max(1, -(-length // max(1, most)))))
    return (slice(first, first + size) for first in range(0, length, size))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _in_float32(x.flatten(0, -2), weight_OI.t(), bias_O).view(*x.shape[:-1], len(weight_OI))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        x_nI, g_nO = x.flatten(0, -2), gradients[0].flatten(0, -2)
        of_x = _in_float32(g_nO, weight_OI).view_as(x) if ctx.needs_input_grad[0] else None
        of_weight = _in_float32(g_nO.t(), x_nI) if ctx.needs_input_grad[1] else None
        of_bias = g_nO.sum(0, dtype=torch.float32).to(g_nO.dtype) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias
