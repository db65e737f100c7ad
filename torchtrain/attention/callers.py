"""Who called: read from the stack, only where an error is about to be raised."""

import inspect
from collections.abc import Iterator
from types import FrameType

from transformers import GenerationMixin, PreTrainedModel


def is_generating() -> bool:
    """Whether transformers' `generate` is among the callers."""
    generate = inspect.unwrap(vars(GenerationMixin)["generate"]).__code__
    return any(frame.f_code is generate for frame in callers())


def say_no_cache(what: str) -> str:
    """Return the refusal of a KV cache, with an implementation that the calling model has."""
    models = (frame.f_locals.get("self") for frame in callers())
    model = next((x for x in models if isinstance(x, PreTrainedModel)), None)
    use = f'model.set_attn_implementation("{"sdpa" if getattr(model, "_supports_sdpa", False) else "eager"}")'
    if is_generating():
        return f"generate: `anchor` has no KV cache; generate with {use}, and set `anchor` again to train"
    return f"{what}: `anchor` has no KV cache: pass use_cache=False, and generate with {use}"


def callers() -> Iterator[FrameType]:
    """Walk the frames of whoever called, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
