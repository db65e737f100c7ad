"""How an attention function is called: what it declares, and what its signature says by itself.

Most functions need no declaration: the names of the parameters tell how documents are passed, annotations or the code
tell the tensor library. What stays open is asked for in one line.
"""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from anchorline.errors import UserError, did_you_mean
from parity_tests.checking.cases import ADDED, DTYPES, FEATURES, LIKE

Library = Literal["torch", "jax"]
Tensors = Literal["BTHD", "BHTD", "varlen"]
Documents = Literal["document_ids", "plan", "mask", "block_mask", "cu_seqlens", "none"]

# Parameter names in use elsewhere, in lower case and without a suffix of shape letters.
_NAMES = {
    "document_ids": ("document_ids", "doc_ids", "documents", "document_id", "segment_ids"),
    "plan": ("plan", "attention_plan"),
    "mask": ("mask", "attn_mask", "attention_mask", "bool_mask"),
    "block_mask": ("block_mask",),
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seq_lens_q", "cu_seq_q", "cu_seqlens"),
    "cu_seqlens_k": ("cu_seqlens_k", "cu_seq_lens_k", "cu_seq_k", "cu_seqlens_kv"),
    "max_seqlen_q": ("max_seqlen_q", "max_length_q", "max_q", "max_seqlen"),
    "max_seqlen_k": ("max_seqlen_k", "max_length_k", "max_k", "max_seqlen_kv"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "causal": ("causal", "is_causal"),
    "window_size": ("window_size",),
    "window": ("window", "sliding_window"),
    "keep_anchor": ("keep_anchor",),
    "softcap": ("softcap", "soft_cap", "logits_soft_cap", "attn_logit_softcapping"),
    "sinks": ("sinks", "sink", "s_aux", "attention_sinks", "learnable_sink"),
    "enable_gqa": ("enable_gqa",),
    "return_lse": ("return_lse",),
}
_MEANING = {name: meaning for meaning, names in _NAMES.items() for name in names}
_KINDS = ("document_ids", "plan", "mask", "block_mask", "cu_seqlens_q")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What a function takes and gives. None is read off the function (`resolve`).

    library: `torch` or `jax`.
    layout: of q, k, v, out: `BTHD` [batch, tokens, heads, head_dim], `BHTD`, `varlen` [packed tokens, heads, head_dim].
    documents: how it is told about documents: `document_ids` (integers [B, T]), `plan` (torchtrain's AttentionPlan),
        `mask` (bool [B, 1, T, T], True is visible), `block_mask` (FlexAttention's), `cu_seqlens` (int32, with the
        longest lengths where it takes them; anchor rows before each document's keys; causal, bottom-right) or `none`.
    returns: `out`, or `out_lse` for a tuple (out, log-sum-exp [B, H, T], ...). None takes what comes.
    like: whose roundings it is allowed in half precision: `flash` or `eager` (see jaxref/rounding.py).
    dtypes: dtypes it takes; None is all of them.
    lacks: names of `FEATURES` it does not support. Cases that need them are listed as not run.

    Of `dtypes` and `lacks` a single name may stand for a collection of one. Raises UserError naming field and value.
    """

    library: Library | None = None
    layout: Tensors | None = None
    documents: Documents | None = None
    returns: Literal["out", "out_lse"] | None = None
    like: str | None = None
    dtypes: Any = None  # a tuple, when made
    lacks: Any = ()  # a frozenset, when made

    def __post_init__(self) -> None:
        dtypes, lacks = ((x,) if isinstance(x, str) else x for x in (self.dtypes, self.lacks))
        object.__setattr__(self, "dtypes", None if dtypes is None else tuple(dtypes))
        object.__setattr__(self, "lacks", frozenset(lacks or ()))
        for field, choices in (
            ("library", get_args(Library)),
            ("layout", get_args(Tensors)),
            ("documents", get_args(Documents)),
            ("returns", ("out", "out_lse")),
            ("like", LIKE),
            ("dtypes", DTYPES),
            ("lacks", FEATURES),
        ):
            said = getattr(self, field)
            for value in said if isinstance(said, tuple | frozenset) else [said]:
                if value is not None and value not in choices:
                    near = did_you_mean(value, choices)
                    raise UserError(f"{field}: {value!r} is unknown{near}; choose from {', '.join(choices)}")


def attention(**declared: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that declares how a function is called; takes the fields of `Adapter`. The function stays as it is."""
    adapter = Adapter(**declared)

    def mark(fn: Callable[..., Any]) -> Callable[..., Any]:
        fn.parity_attention = adapter  # type: ignore[attr-defined]
        return fn

    return mark


def merge(first: Adapter | None, then: Adapter | None) -> Adapter:
    """What `first` says, and where it says nothing what `then` says; both may add to `lacks`."""
    first, then = first or Adapter(), then or Adapter()
    given = {name: value for name, value in vars(first).items() if value is not None}
    return replace(then, **given | {"lacks": {*first.lacks, *then.lacks}})


@dataclass(frozen=True)
class Resolved:
    """A complete declaration, and the function's parameters by meaning."""

    adapter: Adapter
    positional: tuple[int, int, int]  # q, k, v in the function's own order (indices into q, k, v)
    keywords: dict[str, str]  # meaning -> parameter
    fourth: str | None  # meaning of a fourth positional argument, where it has no name
    optional: frozenset[str]  # meanings of parameters whose default is None


def resolve(fn: Callable[..., Any], declared: Adapter | None = None) -> Resolved:
    """Complete a declaration by what the function's signature and code say.

    Raises UserError, one line that says what to declare: something is open or contradicts itself.
    """
    adapter = merge(declared, getattr(fn, "parity_attention", None))
    name = name_of(fn)
    parameters = _parameters(fn)
    if parameters is None and adapter.documents is None:
        raise UserError(
            f"{name}: its signature cannot be read; wrap it in a def, or declare documents=... and library=..."
        )
    meanings = {p.name: _MEANING.get(_plain(p.name)) for p in parameters or ()}
    qkv, order = _first_three(name, parameters)
    documents = adapter.documents or _documents_kind(name, {m for m in meanings.values() if m})
    keywords = {meaning: parameter for parameter, meaning in meanings.items() if meaning}
    fourth = None
    wanted = "cu_seqlens_q" if documents == "cu_seqlens" else documents
    if documents != "none" and wanted not in keywords:
        unknown = [
            p.name for p in parameters or () if p.name not in qkv and meanings[p.name] is None and _is_required(p)
        ]
        if parameters is None:
            fourth = wanted
        elif unknown:
            keywords[wanted] = unknown[0]
        else:
            raise UserError(
                f"{name}: declared documents={documents!r}, but none of its parameters can take it: {list(meanings)}"
            )
    for p in parameters or ():
        known = p.name in qkv or (p.name in keywords.values() and meanings[p.name] not in ADDED)
        if not known and _is_required(p):
            raise UserError(
                f"{name}: parameter {p.name!r} has no default and is not known, or not given in every layout; wrap the "
                "function in one without it"
            )
    layout = adapter.layout or ("varlen" if documents == "cu_seqlens" else _layout_of(qkv))
    if (layout == "varlen") != (documents == "cu_seqlens"):
        raise UserError(
            f"{name}: layout {layout!r} with documents {documents!r}; varlen goes with cu_seqlens and nothing else"
        )
    library = adapter.library or _library_of(fn, name, documents)
    if library == "jax" and documents in ("plan", "block_mask"):
        raise UserError(
            f"{name}: documents {documents!r} is a torch object; with jax choose document_ids, mask or cu_seqlens"
        )
    lacks = set(adapter.lacks)
    if documents == "none":
        lacks.add("documents")
    if library == "jax":
        lacks.add("strides")
    if documents == "cu_seqlens" and "cu_seqlens_k" not in keywords:
        lacks.add("anchor")  # one set of lengths: queries and keys are the same tokens
    full = replace(
        adapter,
        library=library,
        layout=layout,
        documents=documents,
        like=adapter.like or "flash",
        lacks=frozenset(lacks),
    )
    optional = frozenset(m for p in parameters or () if p.default is None and (m := meanings[p.name]))
    return Resolved(full, order, keywords, fourth, optional)


def name_of(fn: Callable[..., Any]) -> str:
    """A name to speak of the function by."""
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        parameters = inspect.signature(getattr(fn, "forward", fn)).parameters.values()
    except (TypeError, ValueError):
        return None
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def _plain(parameter: str) -> str:
    """`document_ids_BT` -> `document_ids`."""
    return re.sub(r"_[A-Z0-9]+$", "", parameter).lower()


def _first_three(name: str, parameters: list[inspect.Parameter] | None) -> tuple[list[str], tuple[int, int, int]]:
    if parameters is None:
        return [], (0, 1, 2)
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY][:3]
    if len(names) < 3:
        raise UserError(
            f"{name}: takes {len(names)} positional arguments; an attention function takes q, k, v and the documents"
        )
    letters = [_plain(n)[:1] for n in names]
    i, j, k = ("qkv".index(letter) for letter in letters) if sorted(letters) == ["k", "q", "v"] else range(3)
    return names, (i, j, k)


def _documents_kind(name: str, meanings: set[str]) -> Documents:
    kinds = [kind for kind in _KINDS if kind in meanings]
    if "cu_seqlens_q" in kinds:
        return "cu_seqlens"
    if len(kinds) == 1:
        return kinds[0]  # type: ignore[return-value]
    what = f"takes {' and '.join(kinds)}" if kinds else "has no parameter that is known to take documents"
    raise UserError(f"{name}: {what}; declare documents= one of {', '.join(get_args(Documents))}")


def _layout_of(qkv: list[str]) -> Tensors:
    suffix = qkv[0].rpartition("_")[2] if qkv else ""
    return "BHTD" if suffix in ("BHTD", "BHSD", "BHLD", "BHQD", "BNTD", "BNSD") else "BTHD"


def _library_of(fn: Callable[..., Any], name: str, documents: str) -> Library:
    """Read it off the annotations, the names the code uses, those of the functions that it calls, the class, the
    modules its file imports, in this order. What uses neither library by name is given torch's arrays.
    """
    if documents in ("plan", "block_mask"):
        return "torch"
    inner = inspect.unwrap(fn)
    inner = getattr(inner, "func", inner)  # functools.partial
    if not inspect.isroutine(inner):
        inner = getattr(inner, "forward", None) or type(inner).__call__
    annotations = getattr(inner, "__annotations__", {}).values()
    modules = [x for x in getattr(inner, "__globals__", {}).values() if inspect.ismodule(x)]
    class_ = [*type(fn).__mro__, getattr(inner, "__module__", "")]
    found: set[Library] = set()
    for places in (annotations, _used(inner), _used(inner, calls=_CALLS), class_, modules):
        found = {library for x in places for library in _libraries(x)}
        if len(found) == 1:
            return found.pop()
    if not found:
        return "torch"
    raise UserError(
        f"{name}: cannot tell whether it takes torch or jax arrays; say --library torch or jax, or declare "
        "library='torch' or library='jax'"
    )


_CALLS = 4  # that are followed, one into the next


def _used(fn: Any, calls: int = 0) -> list[Any]:
    """What a function's code names, that of the functions within it, and of those that it calls."""
    fn = inspect.unwrap(getattr(fn, "func", fn))
    code = getattr(fn, "__code__", None)
    if code is None:
        return []
    known = {**getattr(fn, "__globals__", {}), **inspect.getclosurevars(fn).nonlocals}
    codes, used = [code], []
    for own in codes:
        codes += [x for x in own.co_consts if inspect.iscode(x)]
        named = [
            known.get(n, n if n.partition(".")[0] in ("torch", "jax") else sys.modules.get(n)) for n in own.co_names
        ]
        for n in own.co_names:  # what a module, a class or an object holds: `m.attend(...)`
            named += [inspect.getattr_static(x, n, None) for x in named if x is not None and not _libraries(x)]
        used += named
        used += [known[n] for n in own.co_freevars if n in known]
    mine = [x for x in used if inspect.isfunction(inspect.unwrap(getattr(x, "func", x))) and not _libraries(x)]
    return used + [x for called in mine if calls for x in _used(called, calls - 1)]


_OWNERS: dict[str, Library] = {"torch": "torch", "Tensor": "torch"}
_OWNERS |= dict.fromkeys(("jax", "jaxlib", "Array", "ArrayLike"), "jax")


def _libraries(x: Any) -> list[Library]:
    """The library that a module, a class, an object's class or an annotation's text belongs to, if it is one."""
    if isinstance(x, tuple):
        return [library for part in x for library in _libraries(part)]
    text = x if isinstance(x, str) else getattr(x, "__module__", None) or getattr(x, "__name__", "")
    root = text.partition(".")[0] if isinstance(text, str) else ""
    return [_OWNERS[root]] if root in _OWNERS else []
