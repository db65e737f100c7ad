"""Calling a function of any library and layout: numpy in, numpy out, and in words what went wrong in between.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · N packed queries · M packed keys.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch

from jaxref.mask import visible_BQJ
from parity_tests.checking.adapter import Resolved
from parity_tests.checking.cases import Arrays, CheckCase
from parity_tests.oracle import to_numpy
from torchtrain.attention.plan import AttentionPlan, make_plan
from torchtrain.attention.rule import visible as visible_to

_NAMES = ("q", "k", "v")
AUTOCAST = "torch.autocast"
Pull = Callable[[np.ndarray], Arrays]


class Unusable(Exception):  # noqa: N818, it is a finding and not our error
    """What the function did instead of computing attention, in words."""


class Torch:
    """The calls in torch."""

    kind: Any = torch.Tensor

    def __init__(self, device: str) -> None:
        self.device = device

    def array(self, x: np.ndarray) -> torch.Tensor:
        """To the device, same bits and strides: [B, H, T, D] is a transposed view, as models pass it."""
        x = x.copy(order="K")
        if x.dtype.name in ("bfloat16", "float16"):
            return torch.from_numpy(x.view(np.int16)).view(getattr(torch, x.dtype.name)).to(self.device)
        return torch.from_numpy(x).to(self.device)

    def numpy(self, x: torch.Tensor) -> np.ndarray:
        """Back, bit for bit."""
        return to_numpy(x)

    def forward(self, call: Callable[..., Any], qkv: Sequence[torch.Tensor]) -> Any:
        """Call without gradients."""
        with torch.no_grad():
            return call(*qkv)

    def vjp(self, call: Callable[..., Any], qkv: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """What comes back, and a function from the output's cotangent to the gradients of q, k and v."""

        def run() -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
            leaves = [x.detach().requires_grad_() for x in qkv]
            with torch.enable_grad():
                returned = call(*leaves)
            return returned, returned[0] if isinstance(returned, tuple | list) else returned, leaves

        def pull(weight: torch.Tensor) -> Sequence[torch.Tensor]:
            # Run the forward pass again each time: compiled code frees its saved tensors, so no graph can be kept.
            _, out, leaves = run()
            grads = torch.autograd.grad(out, leaves, weight, allow_unused=True)
            for name, grad in zip(_NAMES, grads, strict=True):
                if grad is None:
                    raise Unusable(f"backward: no gradient reaches {name} (detached inside?)")
            return grads

        returned, out, _ = run()
        if not out.requires_grad:
            raise Unusable(
                "its output carries no gradient (detached, or no_grad inside); declare lacks='backward' if so meant"
            )
        return returned, pull


class Jax:
    """The calls in JAX. The oracle needs 64-bit JAX; the function is called with 32-bit defaults, as it is at home."""

    kind: Any = jax.Array

    def __init__(self, device: str) -> None:
        self.device = jax.devices("gpu" if device.startswith("cuda") else device)[0]

    def array(self, x: np.ndarray) -> jax.Array:
        """To the device."""
        return jax.device_put(x.astype(np.int32) if x.dtype == np.int64 else x, self.device)

    def numpy(self, x: jax.Array) -> np.ndarray:
        """Back, bit for bit."""
        if x.is_deleted():
            raise Unusable("gives its inputs away (donate_argnums): the caller's arrays are gone after the call")
        return np.asarray(x)

    def forward(self, call: Callable[..., Any], qkv: Sequence[jax.Array]) -> Any:
        """Call it."""
        with jax.enable_x64(False):
            return jax.block_until_ready(call(*qkv))

    def vjp(self, call: Callable[..., Any], qkv: Sequence[jax.Array]) -> tuple[Any, Any]:
        """What comes back, and a function from the output's cotangent to the gradients of q, k and v."""

        def split(*arrays: jax.Array) -> tuple[jax.Array, Any]:
            returned = call(*arrays)
            return (returned[0], returned) if isinstance(returned, tuple | list) else (returned, returned)

        with jax.enable_x64(False):
            _, vjp, returned = jax.vjp(split, *qkv, has_aux=True)

        def pull(weight: jax.Array) -> Sequence[jax.Array]:
            with jax.enable_x64(False):
                return vjp(weight)

        return returned, pull


def _hand(x: Any, how: str, heads: int) -> Any:
    """The same values, lying in memory as a layout's `handed` says. heads: the axis of the heads."""
    if how == "sliced":  # what lies around it is NaN: whoever reads it is seen
        shape = list(x.shape)
        shape[heads] += 2
        larger = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
        larger.narrow(heads, 1, x.shape[heads]).copy_(x)
        return larger.narrow(heads, 1, x.shape[heads])
    if how == "transposed":
        other = 3 - heads if x.dim() == 4 else 1 - heads
        return x.transpose(heads, other).contiguous().transpose(heads, other)
    if how == "expanded":
        return x.narrow(heads, 0, 1).expand(x.shape)
    return x


def _block_mask(plan: AttentionPlan) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    ids_BT = plan.document_ids_BT
    B, T = ids_BT.shape

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return visible_to(ids_BT[b, q], ids_BT[b, k], q, k)

    return create_block_mask(rule, B, None, T, T, device=ids_BT.device)


@dataclass(frozen=True)
class Candidate:
    """A function ready to be called on a case's arrays."""

    fn: Callable[..., Any]
    how: Resolved
    case: CheckCase
    device: str

    @property
    def like(self) -> str:
        """Whose roundings it is allowed."""
        return self.how.adapter.like or "flash"

    @cached_property
    def library(self) -> Torch | Jax:
        """The library it is called in."""
        return (Torch if self.how.adapter.library == "torch" else Jax)(self.device)

    @cached_property
    def _plan(self) -> AttentionPlan:
        return make_plan(torch.from_numpy(self.case.document_ids_BT))

    @cached_property
    def _keywords(self) -> dict[str, Any]:
        case, adapter = self.case, self.how.adapter
        given: dict[str, Any] = {"scale": case.scale, "enable_gqa": case.kv_heads < case.heads, "return_lse": True}
        # Whoever gets no mask hides the future itself. flash-attn has both words, torch's varlen_attn the second only.
        given["causal"] = adapter.documents in ("document_ids", "cu_seqlens", "none")
        if "scale" in self.how.optional and case.layout.name == "anchor":
            del given["scale"]  # the default is tried, too
        if case.layout.window is not None:
            given["window_size"] = (case.layout.window - 1, 0)
        elif given["causal"] and "causal" not in self.how.keywords:
            given["window_size"] = (-1, 0)
        given |= {name: getattr(case.layout, name) for name in case.layout.adds}
        if case.sinks_H is not None:
            given["sinks"] = self.library.array(case.sinks_H)
        if adapter.documents == "document_ids":
            given["document_ids"] = self.library.array(case.document_ids_BT)
        elif adapter.documents == "mask":
            given["mask"] = self.library.array(visible_BQJ(case.document_ids_BT)[:, None])
        elif adapter.documents in ("plan", "block_mask"):  # which torch alone has (`resolve` refuses)
            plan = self._plan.to(self.device)
            given[adapter.documents] = plan if adapter.documents == "plan" else _block_mask(plan)
        elif adapter.documents == "cu_seqlens":
            given |= {
                "cu_seqlens_q": self.library.array(self._plan.cu_seqlens_q.numpy()),
                "cu_seqlens_k": self.library.array(self._plan.cu_seqlens_k.numpy()),
                "max_seqlen_q": self._plan.max_seqlen_q,
                "max_seqlen_k": self._plan.max_seqlen_k,
            }
        return given

    def forward(self, q_BTHD: np.ndarray, k_BTKD: np.ndarray, v_BTKD: np.ndarray) -> Arrays:
        """`out`, and `lse` if it comes back, in the function's dtypes. Raises Unusable, also for changed inputs."""
        arrays = self._arrays(q_BTHD, k_BTKD, v_BTKD)
        with self._unchanged({f"its input {name}": x for name, x in zip(_NAMES, arrays, strict=True)}):
            returned = self._guard("", lambda: self.library.forward(self._call, arrays))
        return self._read(returned)

    @contextmanager
    def _unchanged(self, arrays: dict[str, Any]) -> Iterator[None]:
        """Refuse a call that changes what it is given."""
        parameters = self.how.keywords
        given = {
            f"its input {parameters.get(n, n)}": x
            for n, x in self._keywords.items()
            if isinstance(x, self.library.kind)
        } | arrays
        before = {name: self.library.numpy(x).tobytes() for name, x in given.items()}
        yield
        for name, x in given.items():
            if self.library.numpy(x).tobytes() != before[name]:
                raise Unusable(f"changes {name} in place")

    def forward_and_pull(self, q_BTHD: np.ndarray, k_BTKD: np.ndarray, v_BTKD: np.ndarray) -> tuple[Arrays, Pull]:
        """The same with gradients: a function from the output's cotangent [B, T, H, D] to `dq`, `dk`, `dv`."""
        arrays = self._arrays(q_BTHD, k_BTKD, v_BTKD)
        named = {f"its input {name}": x for name, x in zip(_NAMES, arrays, strict=True)}
        with self._unchanged(named):
            returned, library_pull = self._guard("with gradients, ", lambda: self.library.vjp(self._call, arrays))

        def pull(weight_BTHD: np.ndarray) -> Arrays:
            weight = self._cotangent(weight_BTHD)
            with self._unchanged(named | {"the output's gradient": weight}):
                grads = self._guard("backward ", lambda: library_pull(weight))
            for name, grad, x in zip(_NAMES, grads, arrays, strict=True):
                if grad.shape != x.shape:
                    raise Unusable(f"backward: d{name} has shape {list(grad.shape)}, {name} has {list(x.shape)}")
            return self._named("qkv", grads)

        return self._read(returned), pull

    def _cotangent(self, weight_BTHD: np.ndarray) -> Any:
        weight, handed = self.library.array(self._lay_out(weight_BTHD, 0)), self.case.layout.handed
        return _hand(weight, handed, 2 if self.how.adapter.layout == "BTHD" else 1)

    def some_gradients(self, which: str, *qkv: np.ndarray, weight_BTHD: np.ndarray, another: bool = False) -> Arrays:
        """The gradients of some of `qkv` where the rest has none, in torch only.

        another: a second forward pass, on other numbers, comes before the backward pass, as the next layer's does.
        """
        arrays = [x.detach().requires_grad_(n in which) for n, x in zip(_NAMES, self._arrays(*qkv), strict=True)]

        def pull() -> Any:
            with torch.enable_grad():
                returned = self._call(*arrays)
                if another:
                    self._call(*[(0 * x.detach()).requires_grad_() for x in arrays])
            out = returned[0] if isinstance(returned, tuple | list) else returned
            return torch.autograd.grad(out, [x for x in arrays if x.requires_grad], self._cotangent(weight_BTHD))

        grads = self._guard(f"with gradients of {which} alone, ", pull)
        return self._named(which, grads)

    def _named(self, which: str, grads: Sequence[Any]) -> Arrays:
        pairs = zip(which, grads, strict=True)
        return {f"d{name}": self._store(self.library.numpy(grad), "qkv".index(name)) for name, grad in pairs}

    def in_modes(self) -> Iterator[tuple[str, Callable[..., np.ndarray | None]]]:
        """Words and a call that gives `out`; None where the function cannot be called in that way at all."""

        def inference(*qkv: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                return self._read(self._guard("under inference mode, ", lambda: self._call(*self._arrays(*qkv))))["out"]

        def compiled(*qkv: np.ndarray) -> np.ndarray | None:
            torch.compiler.reset()  # else a function that was compiled often is not compiled any more
            fn = torch.compile(self.fn, backend="aot_eager")
            logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # graph breaks are no news here
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # those of the compiler
                    return self._read(replace(self, fn=fn)._call(*self._arrays(*qkv)))["out"]
            except Exception:  # a function need not compile: what it gives where it does is judged
                return None

        def cast(*qkv: np.ndarray) -> np.ndarray | None:
            try:
                with torch.no_grad(), torch.autocast(torch.device(self.device).type, torch.bfloat16):
                    return self._read(self._call(*self._arrays(*qkv)))["out"]
            except Exception:  # nor run under autocast, nor give the dtype it was given
                return None

        yield "torch.inference_mode", inference
        yield "torch.compile", compiled
        if self.case.dtype == "bfloat16":  # others are cast before the function sees them
            yield AUTOCAST, cast

    def refill(self, other: "Candidate") -> None:
        """Write another case's documents into the tensors that this one's calls are given."""
        for name, x in self._keywords.items():
            new = other._keywords[name]
            if isinstance(x, torch.Tensor) and isinstance(new, torch.Tensor) and x.shape == new.shape:
                x.copy_(new)
            else:
                self._keywords[name] = new

    def _guard(self, when: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Unusable:
            raise
        except (Exception, SystemExit) as error:
            text = " ".join(str(error).split())
            raise Unusable(f"{when}raises {type(error).__name__}: {text[:300] or '(no message)'}") from error

    def _call(self, *qkv: Any) -> Any:
        keywords = {parameter: self._keywords[m] for m, parameter in self.how.keywords.items() if m in self._keywords}
        fourth = () if self.how.fourth is None else (self._keywords[self.how.fourth],)
        return self.fn(*(qkv[i] for i in self.how.positional), *fourth, **keywords)

    def _arrays(self, *qkv: np.ndarray) -> list[Any]:
        handed, heads = self.case.layout.handed, 2 if self.how.adapter.layout == "BTHD" else 1
        if handed == "sliced":
            return self._slices(*qkv)
        arrays = [self.library.array(self._lay_out(x, i)) for i, x in enumerate(qkv)]
        if handed == "usual":
            return arrays
        return [x if handed == "expanded" and i == 0 else _hand(x, handed, heads) for i, x in enumerate(arrays)]

    def _slices(self, *qkv: np.ndarray) -> list[Any]:
        """As a model with one product for q, k and v hands them over: in each token one behind the other."""
        packed = self.how.adapter.layout == "varlen"
        heads_last = [self._lay_out(x, i) if packed else x for i, x in enumerate(qkv)]
        views: list[Any] = []
        for group in [heads_last[:1], heads_last[1:]] if packed else [heads_last]:
            edge = np.full_like(group[0][..., :1, :], np.nan)
            whole: Any = self.library.array(np.concatenate([edge, *group, edge], axis=-2))
            start = 1
            for x in group:
                views.append(whole.narrow(-2, start, x.shape[-2]))
                start += x.shape[-2]
        return [x.transpose(1, 2) for x in views] if self.how.adapter.layout == "BHTD" else views

    def _index(self, which: int) -> np.ndarray:
        return (self._plan.q_index_N if which == 0 else self._plan.k_index_M).numpy()

    def _lay_out(self, x_BTHD: np.ndarray, which: int) -> np.ndarray:
        """[B, T, H, D] in the function's layout; `which` tells queries (0) from keys and values."""
        if self.how.adapter.layout == "varlen":
            return x_BTHD.reshape(-1, *x_BTHD.shape[2:])[self._index(which)]
        return x_BTHD.swapaxes(1, 2) if self.how.adapter.layout == "BHTD" else x_BTHD

    def _store(self, x: np.ndarray, which: int) -> np.ndarray:
        """The inverse, in float64: copies of a token are added up, tokens that were left out are 0."""
        x = x.astype(np.float64)
        if self.how.adapter.layout == "BHTD":
            return x.swapaxes(1, 2)
        if self.how.adapter.layout == "BTHD":
            return x
        B, T = self.case.document_ids_BT.shape
        stored = np.zeros((B * T, *x.shape[1:]))
        np.add.at(stored, self._index(which), x)
        return stored.reshape(B, T, *x.shape[1:])

    def _read(self, returned: Any) -> Arrays:
        """Check what came back, and store it as `out` [B, T, H, D] and `lse` [B, H, T], in float64."""
        out, lse = returned, None
        if isinstance(returned, tuple | list):
            if not returned:
                raise Unusable("returns an empty tuple; expected out, or (out, lse)")
            out = returned[0]
            if len(returned) > 1 and self.how.adapter.returns != "out":
                lse = getattr(returned[1], "lse", returned[1])
        if self.how.adapter.returns == "out_lse" and lse is None:
            raise Unusable("returns no log-sum-exp, although it is declared to (returns='out_lse')")
        if not isinstance(out, self.library.kind):
            what = "None" if out is None else f"a {type(out).__module__}.{type(out).__name__}"
            raise Unusable(f"returns {what}; expected a {self.how.adapter.library} array")
        expected = self._lay_out(self.case.draw()[0], 0).shape
        if tuple(out.shape) != expected:
            raise Unusable(
                f"returns out of shape {list(out.shape)}; expected {list(expected)} ({self.how.adapter.layout})"
            )
        if (dtype := str(out.dtype).removeprefix("torch.")) != self.case.dtype:
            raise Unusable(f"returns out in {dtype}; its inputs are {self.case.dtype}")
        results = {"out": self._store(self.library.numpy(out), 0)}
        if lse is not None:
            results["lse"] = self._read_lse(lse)
        return results

    def _read_lse(self, lse: Any) -> np.ndarray:
        """[B, H, T] or [B, T, H] (packed: [H, N] or [N, H]), told apart by shape. Tokens left out are -inf."""
        B, T = self.case.document_ids_BT.shape
        H, N = self.case.heads, len(self._plan.q_index_N)
        varlen = self.how.adapter.layout == "varlen"
        shapes = ((H, N), (N, H)) if varlen else ((B, H, T), (B, T, H))
        if not isinstance(lse, self.library.kind) or tuple(lse.shape) not in shapes:
            what = list(lse.shape) if isinstance(lse, self.library.kind) else type(lse).__name__
            raise Unusable(
                f"returns {what} in second place; expected the log-sum-exp {list(shapes[0])}, or declare returns='out'"
            )
        values = self.library.numpy(lse).astype(np.float64)
        heads_first = tuple(lse.shape) == shapes[0]
        if not varlen:
            return values if heads_first else values.swapaxes(1, 2)
        stored = np.full((H, B * T), -np.inf)
        stored[:, self._index(0)] = values if heads_first else values.T
        return stored.reshape(H, B, T).swapaxes(0, 1)
