"""What `parity compare` catches, where it says that a fault is, and how often it gives a false alarm.

    python -m benchmarks.compare_study [--seeds 40]  # writes benchmarks/results/compare-study.json and the page's table

A tiny Llama of transformers is recorded with each change of compare_study.yaml, and in ways that are right; so is
`jaxref.Decoder` with the changes that are of its weights, modules or settings. Truth is transformers' model in float64,
the reference its eager attention in the candidate's dtype.
"""

import argparse
import copy
import json
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import torch
import yaml
from flax import nnx
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked
from benchmarks.bench_page import format_table
from jaxref.decoder_config import DecoderConfig
from jaxref.loss import token_nll
from jaxref.rope_spec import RopeSpec
from jaxref.rounding import preset
from jaxref.storage.weights import from_arrays
from parity_tests.comparing.compare import compare
from parity_tests.comparing.dumps import Array, Dump, sort_key
from parity_tests.comparing.judging import Rule
from parity_tests.comparing.names import load_names, rename
from parity_tests.oracle import widen
from parity_tests.record import watch

T, ROWS, FIRST, DTYPES = 53, 2, 1000, ("float32", "bfloat16")
ROWS_OF_STUDY = yaml.safe_load((Path(__file__).parent / "compare_study.yaml").read_text(encoding="utf-8"))
RESULT = Path(__file__).parent / "results" / "compare-study.json"
PAGE = Path(__file__).parents[1] / "docs" / "same-computation.md"
PLACE = MarkedPlace("<!-- made by benchmarks/compare_study.py -->", "<!-- end of the study -->")
COLUMNS = [(writer, dtype) for writer in ("wrong", "flax") for dtype in DTYPES]
SIZES: dict[str, Any] = {"attn_implementation": "eager"}
SIZES |= {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
Change = Callable[[Any], Any]
F = nn.functional


@cache
def make(seed: int) -> tuple[Any, dict[str, Tensor]]:
    """A model whose weights are bfloat16 numbers, held in float32, and its inputs."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, p in model.named_parameters():
            size = (1.3 if "q_proj" in name or "k_proj" in name else 0.64) / p.shape[-1] ** 0.5
            p.normal_(0, size) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
            p.copy_(p.bfloat16())
    ids, places = torch.randint(0, 97, (ROWS, T)), torch.arange(FIRST, FIRST + T).expand(ROWS, T)
    return model, {"input_ids": ids, "labels": ids, "position_ids": places}


@cache
def dump(seed: int, dtype: str, change: Change = lambda model: None, apart: bool = False) -> Dump:
    """Outputs, loss and gradients of a changed model, under the oracle's names. apart: each row by itself."""
    source, inputs = make(seed)
    model, rotary = copy.deepcopy(source).to(getattr(torch, dtype)), copy.deepcopy(source.model.rotary_emb)
    model.model.rotary_emb = rotary.double() if dtype == "float64" else rotary  # frequencies stay in float32
    patches = change(model) or patch.object(llama, "T", T, create=True)
    parts = [{n: x[row : row + 1] for n, x in inputs.items()} for row in range(ROWS)] if apart else [inputs]
    found: list[dict[str, Tensor]] = [{} for _ in parts]
    with patches, watch(model, lambda name, x: at.update({name: x.detach().clone()})):
        losses = []
        for part, at in zip(parts, found, strict=True):  # noqa: B007
            losses.append(model(**part, attention_mask=getattr(model, "other_mask", None)).loss / len(parts))
        torch.stack(losses).sum().backward()
    arrays = {name: torch.cat([x[name] for x in found]) for name in found[0] if "rotary_emb" not in name}
    arrays["loss"] = torch.stack(losses).detach().sum(0, keepdim=True)
    for name, p in model.named_parameters():
        arrays[f"gradients.{name}"] = torch.zeros_like(p) if p.grad is None else p.grad
    kept = {name: (str(x.dtype).removeprefix("torch."), widen(x)) for name, x in arrays.items()}
    held = {name: [Array(dtype, lambda x=x: x)] for name, (dtype, x) in kept.items()}
    named = rename(Dump("", held, model.config.to_dict()), load_names("hf"))
    return Dump("", {n: named.arrays[n] for n in sorted(named.arrays, key=sort_key)}, named.config, named.targets)


def judge(candidate: Dump, seed: int, dtype: str) -> tuple[float, str | None, float]:
    """The largest ratio, the first array that breaks, and seconds that judging took."""
    sides = candidate, dump(seed, "float64"), dump(seed, dtype)
    started = time.process_time()
    case = compare(*sides, None, Rule({}, None, 16, "reference")).cases[0]
    first = case.first_divergence
    return max(m.ratio for m in case.measures), first and first.name, time.process_time() - started


# -- correct code ------------------------------------------------------------------------------------------------------


def _sdpa(model: Any) -> None:
    model.set_attn_implementation("sdpa")


def _reorder(model: Any) -> None:
    order = torch.randperm(SIZES["intermediate_size"])
    for layer in model.model.layers:
        layer.mlp.down_proj.forward = lambda x, w=layer.mlp.down_proj: F.linear(x[..., order], w.weight[:, order])


def _fuse(model: Any) -> None:
    for layer in model.model.layers:
        parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
        sizes = [part.weight.shape[0] for part in parts]
        for n, part in enumerate(parts):
            whole = lambda x, ps=parts: F.linear(x, torch.cat([p.weight for p in ps]))  # noqa: E731
            part.forward = lambda x, n=n, whole=whole, sizes=sizes: whole(x).split(sizes, -1)[n]


def _in_parts(model: Any) -> None:
    for m in model.modules():
        if isinstance(m, nn.Linear):
            h = m.in_features // 2
            m.forward = lambda x, w=m, h=h: x[..., :h] @ w.weight[:, :h].mT + x[..., h:] @ w.weight[:, h:].mT


def _recompute(model: Any) -> None:
    model.train().gradient_checkpointing_enable({"use_reentrant": False})


def _wide_head(model: Any) -> None:
    model.lm_head.forward = lambda x, w=model.lm_head: F.linear(x.float(), w.weight.float()).to(x.dtype)


@cache
def _compiled() -> list[Any]:
    functions = (llama.LlamaRMSNorm.forward, llama.apply_rotary_pos_emb, llama.eager_attention_forward)
    return [torch.compile(function, fullgraph=True, dynamic=False) for function in functions]


def _compile(model: Any) -> Any:
    norm, rotate, attend = _compiled()
    for m in model.modules():
        if isinstance(m, llama.LlamaRMSNorm):
            m.forward = partial(norm, m)
    return patch.multiple(llama, apply_rotary_pos_emb=rotate, eager_attention_forward=attend)


def _in_halves(model: Any) -> Any:
    """Tokens in two halves: gradients of weights, keys and values are sums of two parts."""
    at, right = T // 2, llama.eager_attention_forward
    for m in model.modules():
        if isinstance(m, nn.Linear | llama.LlamaRMSNorm):
            m.forward = lambda x, f=m.forward: torch.cat([f(x[:, :at]), f(x[:, at:])], 1)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **rest: Any) -> tuple[Tensor, None]:
        halves = (slice(at), slice(at, None))
        parts = [right(module, q[:, :, own], k, v, mask[:, :, own], **rest)[0] for own in halves]
        return torch.cat(parts, 1), None

    return patch.object(llama, "eager_attention_forward", attend)


WAYS: dict[str, tuple[Change, bool]] = {
    "the same": (lambda model: None, False),
    "SDPA": (_sdpa, False),
    "sums of the MLP in another order": (_reorder, False),
    "q, k and v fused": (_fuse, False),
    "products in two parts, as two tensor parallel ranks": (_in_parts, False),
    "activations recomputed": (_recompute, False),
    "the head in float32": (_wide_head, False),
    "norms, rotation and attention under torch.compile": (_compile, False),
    "tokens in two halves, as two sequence parallel ranks": (_in_halves, False),
    "each row by itself, as two data parallel ranks": (lambda model: None, True),
}

# -- wrong code --------------------------------------------------------------------------------------------------------


def on(path: str, change: Callable[..., Any]) -> Change:
    """Another output of a module: `change(output, module, input)`."""

    def apply(model: Any) -> None:
        module = model.get_submodule(path)
        right = module.forward
        module.forward = lambda *args, **kwargs: change(right(*args, **kwargs), module, args[0] if args else None)

    return apply


def weights(path: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of one layer's weight."""
    return lambda model: setattr(p := model.get_parameter(f"{path}.weight"), "data", change(p.data).contiguous())


def tables(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Change:
    """Return a change of the positions and inverse frequencies that RoPE's table is made of."""

    def forward(model: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        positions, frequencies = change(position_ids.float(), model.model.rotary_emb.inv_freq.float())
        angle = (positions[..., None] * frequencies).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    return lambda model: setattr(
        model.model.rotary_emb, "forward", lambda x, position_ids: forward(model, x, position_ids)
    )


def masked(rule: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """Return another mask; rule: which keys [T] a query [T, 1] sees."""
    visible = rule(torch.arange(T)[:, None], torch.arange(T))
    return lambda m: setattr(m, "other_mask", torch.where(visible, 0.0, -1e9)[None, None].to(m.dtype))


def labelled(change: Callable[..., Tensor]) -> Change:
    """Return a change of the loss; change: takes the loss as a function of the labels, and the labels."""

    def apply(model: Any) -> None:
        right = model.loss_function
        loss = lambda logits, labels, **rest: change(lambda y: right(logits=logits, labels=y, **rest), labels)  # noqa: E731
        model.loss_function = loss

    return apply


def residual(attn: float, hidden: float, after: Callable[..., Tensor]) -> Change:
    """Return a change of what layer 1 adds to its residual."""

    def apply(model: Any) -> None:
        layer = model.model.layers[1]

        def forward(x: Tensor, **kwargs: Any) -> Tensor:
            out = attn * layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0] + hidden * x
            return after(out, x) + layer.mlp(layer.post_attention_layernorm(out))

        layer.forward = forward

    return apply


def _exchange(model: Any) -> None:
    a = model.model.layers[1].self_attn
    a.k_proj.weight.data, a.v_proj.weight.data = a.v_proj.weight.data, a.k_proj.weight.data


def _pairs(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def _rms(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


AT = "model.layers.1."
NORM, ATTN, MLP = f"{AT}input_layernorm", f"{AT}self_attn", f"{AT}mlp"
CHANGES: dict[str, Change] = {
    "norm_in_half": on(NORM, lambda out, m, x: (m.weight * (h := x.bfloat16()) * (_rms(h) + 1e-6).rsqrt()).to(x.dtype)),
    "layernorm": on(NORM, lambda out, m, x: F.layer_norm(x, (256,), m.weight)),
    "offset": weights(NORM, lambda w: 1 + w),
    "no_final_norm": on("model.norm", lambda out, m, x: x),
    "gate_up": on(MLP, lambda out, m, x: m.down_proj(m.gate_proj(x) * m.act_fn(m.up_proj(x)))),
    "gelu": on(MLP, lambda out, m, x: m.down_proj(F.gelu(m.gate_proj(x)) * m.up_proj(x))),
    "transposed": weights(f"{ATTN}.o_proj", lambda w: w.T),
    "kv": _exchange,
    "tiled": lambda model: patch.object(llama, "repeat_kv", lambda x, n: x.repeat(1, n, 1, 1)),
    "no_scale": lambda model: setattr(model.get_submodule(ATTN), "scaling", 1.0),
    "wide_scale": lambda model: setattr(model.get_submodule(ATTN), "scaling", 256**-0.5),
    "theta": tables(lambda p, f: (p, 1e5 ** (-torch.arange(32) / 32))),
    "angles": tables(lambda p, f: (p.bfloat16().float(), f.bfloat16().float())),
    "inv_freq": tables(lambda p, f: (p, f.bfloat16().float())),
    "positions": tables(lambda p, f: (p.bfloat16().float(), f)),
    "boundary": tables(lambda p, f: (p + (p > FIRST + 20), f)),
    "linear": tables(lambda p, f: (p, f / 2)),
    "half": tables(lambda p, f: (p, torch.where(torch.arange(32) < 16, f, 0.0))),
    "interleaved": lambda model: patch.object(llama, "rotate_half", _pairs),
    "yarn": on("model.rotary_emb", lambda out, m, x: tuple(1.1 * y for y in out)),
    "doubled": residual(2.0, 0.0, lambda out, x: out),
    "old_residual": residual(1.0, 1.0, lambda out, x: x),
    "embed_scale": on("model.embed_tokens", lambda out, m, x: out * 16),
    "rows": weights("model.embed_tokens", lambda w: w.roll(1, 0)),
    "untied": weights("lm_head", lambda w: w.flip(0)),
    "logits": on("lm_head", lambda out, m, x: out.bfloat16().to(out.dtype)),
    "labels": labelled(lambda loss, labels: loss(labels.roll(-1, 1))),
    "counted": labelled(lambda loss, labels: loss(labels) * (T - 1) / T),
    "bias": on(f"{ATTN}.k_proj", lambda out, m, x: out + 0.1),
    "block_scale": weights(f"{MLP}.down_proj", lambda w: torch.cat([1.4 * w[:64], w[64:]])),
    "zero_point": weights(f"{ATTN}.o_proj", lambda w: w + 0.05 * (torch.arange(256) == 5).to(w)[:, None]),
    "ranks": weights(f"{ATTN}.q_proj", lambda w: w.view(2, 2, 64, 256).swapaxes(0, 1).reshape(256, 256)),
    "not_causal": masked(lambda q, k: k >= 0 * q),
    "diagonal": masked(lambda q, k: (k < q) | (k == 0)),
    "window": masked(lambda q, k: (k <= q) & (q - k < 40)),
    "dropout": on(MLP, lambda out, m, x: F.dropout(out, 0.1)),
    "k_gradient": on(f"{ATTN}.k_proj", lambda out, m, x: 1.5 * out - 0.5 * out.detach()),
    "epsilon": on(NORM, lambda out, m, x: m.weight * (x / (_rms(x.float()).sqrt() + 1e-6)).to(x.dtype)),
    "rsqrt": on(NORM, lambda out, m, x: m.weight * (x / (_rms(x.float()) + 1e-6).rsqrt()).to(x.dtype)),
    "norm_twice": on(NORM, lambda out, m, x: type(m).forward(m, out)),
}


# -- the same in Flax --------------------------------------------------------------------------------------------------


class Instead(nnx.Module):
    """A module of the decoder with another output: `change(output, module, input)`."""

    def __init__(self, module: nnx.Module, change: Callable[..., Any]):
        self.module, self.change = module, change

    def __call__(self, x: jax.Array, *rest: Any) -> jax.Array:
        """What the module returns, changed."""
        return self.change(self.module(x, *rest), self.module, x)


def _norm(x: jax.Array, m: Any, centre: bool = False) -> jax.Array:
    x = x - x.mean(-1, keepdims=True) if centre else x
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * m.weight[...].astype(x.dtype)


def _mlp(
    x: jax.Array, m: Any, act: Callable[..., jax.Array], gate: str = "gate_proj", up: str = "up_proj"
) -> jax.Array:
    times = lambda x, name: x @ getattr(m, name).weight[...].T.astype(x.dtype)  # noqa: E731
    return times(act(times(x, gate)) * times(x, up), "down_proj")


def _mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(x * x, -1, keepdims=True)


KEPT = jax.random.bernoulli(jax.random.key(0), 0.9, (ROWS, T, 1)) / 0.9
OF_WEIGHTS = {"offset", "transposed", "kv", "rows", "untied", "block_scale", "zero_point", "ranks"}
OF_MODULES: dict[str, tuple[str, Callable[..., Any]]] = {
    "norm_in_half": ("input_layernorm", lambda out, m, x: _norm(x.astype(jnp.bfloat16), m).astype(x.dtype)),
    "layernorm": ("input_layernorm", lambda out, m, x: _norm(x, m, centre=True)),
    "epsilon": ("input_layernorm", lambda out, m, x: x / (jnp.sqrt(_mean_square(x)) + 1e-6) * m.weight[...]),
    "rsqrt": ("input_layernorm", lambda out, m, x: x / jax.lax.rsqrt(_mean_square(x) + 1e-6) * m.weight[...]),
    "norm_twice": ("input_layernorm", lambda out, m, x: _norm(out, m)),
    "no_final_norm": ("norm", lambda out, m, x: x),
    "embed_scale": ("embed_tokens", lambda out, m, x: out * 16),
    "bias": ("self_attn.k_proj", lambda out, m, x: out + 0.1),
    "gate_up": ("mlp", lambda out, m, x: _mlp(x, m, jax.nn.silu, "up_proj", "gate_proj")),
    "gelu": ("mlp", lambda out, m, x: _mlp(x, m, partial(jax.nn.gelu, approximate=False))),
    "dropout": ("mlp", lambda out, m, x: out * KEPT),
}
FLAX, HALF = "written by jaxref, in Flax", "bfloat16"
OF_SETTINGS: dict[str, dict[str, Any]] = {
    "no_scale": {"scale": 1.0}, "wide_scale": {"scale": 256**-0.5}, "window": {"windows": (40,) * 3},
    "theta": {"rope": RopeSpec(64, 1e5)}, "linear": {"rope": RopeSpec(64, 1e4, "linear", 2.0)},
    "half": {"rope": RopeSpec(64, 1e4, "proportional", partial_rotary_factor=0.5)},
    "angles": {"position": "bf16", "inv_freq": "bf16"}, "inv_freq": {"inv_freq": "bf16"},
    "positions": {"position": "bf16"}, "logits": {"logits": "bf16"},
}  # fmt: skip
OF_INPUTS = {"boundary", "labels", "counted"}
IN_FLAX = {*OF_WEIGHTS, *OF_MODULES, *OF_SETTINGS, *OF_INPUTS}


def dump_of_flax(seed: int, dtype: str, key: str = "") -> Dump:
    """Outputs and loss of `jaxref.Decoder`, rounded as transformers rounds, with a change of IN_FLAX."""
    source, inputs = make(seed)
    model = copy.deepcopy(source).to(getattr(torch, dtype))
    if key in OF_WEIGHTS:
        CHANGES[key](model)
    config, rounding = DecoderConfig.from_hf(model.config.to_dict()), preset("fp32")
    rounding = preset("hf_eager_bf16") if dtype == HALF else rounding
    for name, value in OF_SETTINGS.get(key, {}).items():
        config = replace(config, **{name: value}) if hasattr(config, name) else config
        rounding = replace(rounding, **{name: value}) if hasattr(rounding, name) else rounding
    decoder = from_arrays(config, {name: widen(p) for name, p in model.state_dict().items()})
    path, change = OF_MODULES.get(key, ("", None))
    if change is not None:
        *parents, own = path.split(".")
        at: Any = decoder if path in ("norm", "embed_tokens") else decoder.layers[1]
        for parent in parents:
            at = getattr(at, parent)
        setattr(at, own, Instead(getattr(at, own), change))
    ids, labels, positions = (inputs[name].numpy() for name in ("input_ids", "labels", "position_ids"))
    positions = positions + (positions > FIRST + 20) if key == "boundary" else positions
    _, taps = decoder(ids, positions, np.ones_like(ids), rounding, taps=True)
    labels = np.roll(labels, -1, 1) if key == "labels" else labels
    after = np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    loss = token_nll(taps["logits"], after).sum() / (ROWS * (T if key == "counted" else T - 1))
    arrays = {n: np.asarray(x) for n, x in taps.items() if n != "rope_table"}
    held = {n: [Array(dtype, lambda x=x: x)] for n, x in arrays.items()}
    held["loss"] = [Array("float32", lambda: np.asarray(loss, np.float32)[None])]
    return Dump("", {n: held[n] for n in sorted(held, key=sort_key)}, model.config.to_dict())


def first_in_flax(key: str) -> str:
    """The first array that is wrong there: settings are those of all layers, and no module is inside of the MLP."""
    first = ROWS_OF_STUDY[key][2]
    first = first.replace("layers.1", "layers.0") if key in OF_SETTINGS else first
    return "layers.1.mlp" if first.endswith("down_proj") else first


def format_results(kept: dict[str, Any]) -> str:
    """Return the rates, a table of the changes with the largest ratio of each dump, and one of the right ways."""
    caught = {column: 0 for column in COLUMNS}
    for writer, dtype in COLUMNS:
        for key, own in kept[writer].items():
            first = ROWS_OF_STUDY[key][2] if writer == "wrong" else first_in_flax(key)
            caught[writer, dtype] += (own[dtype][1] or "").startswith(first)
    pairs = [name for each in kept["right"].values() for _, name, _ in each]
    rates = [f"{caught[writer, d]} of {len(kept[writer])} in {d}" for writer, d in COLUMNS]
    said = (
        f"Caught at the right array: written by transformers {rates[0]} and {rates[1]}, by `jaxref` {rates[2]} and "
        f"{rates[3]}. Of {len(pairs)} pairs that are right {sum(name is not None for name in pairs)} fail. The tables "
        "have the largest error over its allowance, of transformers' dumps and of the right pairs."
    )
    changes = []
    for key, (what, tracker, first) in ROWS_OF_STUDY.items():
        (_, repository, _, number), own = tracker.split("/"), kept["wrong"][key]
        ratios = [f"{own[dtype][0]:.2g}" if own[dtype][1] else "missed" for dtype in DTYPES]
        changes.append((what, f"[{repository}#{number}](https://github.com/{tracker})", f"`{first}`", *ratios))
    ways = [
        (way, str(len(each)), *(f"{max(x for x, _, _ in each[at::2]):.2f}" for at in range(2)))
        for way, each in kept["right"].items()
    ]
    tables = (("change", "seen in", "first array", *DTYPES), changes), (("right", "pairs", *DTYPES), ways)
    return "\n\n".join(["\n".join(textwrap.wrap(said, 100)), *(format_table(*table) for table in tables)])


def main() -> None:
    """Try all, keep the numbers, and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40, help="right pairs of each kind; default: 40")
    seeds = parser.parse_args().seeds
    fresh = dump.__wrapped__
    wrong = {
        key: {dtype: judge(fresh(0, dtype, change), 0, dtype) for dtype in DTYPES} for key, change in CHANGES.items()
    }
    flax = {key: {dtype: judge(dump_of_flax(0, dtype, key), 0, dtype) for dtype in DTYPES} for key in sorted(IN_FLAX)}
    right: dict[str, list[Any]] = {FLAX: []} | {way: [] for way in WAYS}
    for seed in range(seeds):
        dtype = DTYPES[seed % 2]
        right[FLAX].append(judge(dump_of_flax(seed, dtype), seed, dtype))
        for way, (change, apart) in WAYS.items():
            right[way].append(judge(fresh(seed, dtype, change, apart), seed, dtype))
    kept = {"wrong": wrong, "flax": flax, "right": right}
    save(RESULT, json.dumps(kept, indent=1).encode())
    save(PAGE, PLACE.put(read_marked(PAGE, [PLACE]), format_results(kept)).encode())


if __name__ == "__main__":
    main()
