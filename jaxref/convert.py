"""A Hugging Face folder becomes an Orbax checkpoint, an Orbax checkpoint a Hugging Face folder; no bit of a parameter
changes.
"""

from pathlib import Path

from anchorline.errors import UserError, quoted
from anchorline.files import resolve
from jaxref.checkpoint import holds_optimizer, is_checkpoint, restore, save
from jaxref.folders import check_new
from jaxref.weights import load_hf, save_hf


def convert(source: Path, target: Path) -> str:
    """Convert a folder of either kind into one of the other.

    Args:
        source: what it is tells the direction.
        target: a folder that does not exist; it appears complete or not at all.

    Returns:
        What was done, in words.

    Raises:
        UserError: before anything is written: the source is neither kind, both or damaged, the target cannot be made.
    """
    source, target = resolve("source", source), resolve("target", target)
    check_new("target", target)
    if not source.is_dir():
        raise UserError(f"source: {quoted(source)} is not a folder; give one of Hugging Face or a checkpoint of jaxref")
    from_hf, from_orbax = (source / "config.json").exists(), is_checkpoint(source)
    if from_hf and from_orbax:
        raise UserError(
            f"source: {quoted(source)} holds a config.json and a checkpoint too; give a folder that is one of them"
        )
    if from_hf:
        _, decoder = load_hf(source)
        save(target, decoder)
        return f"{quoted(target)}: an Orbax checkpoint of the parameters and what they are computed with; nothing else"
    if from_orbax:
        decoder, _ = restore(source)
        save_hf(target, decoder)
        left = "; the optimizer's state stays behind" if holds_optimizer(source) else ""
        return f"{quoted(target)}: config.json and model.safetensors; a tokenizer has to be put beside them{left}"
    raise UserError(
        f"source: {quoted(source)} is neither a Hugging Face folder (it has no config.json) nor a checkpoint of jaxref "
        "(it has no about and params)"
    )
