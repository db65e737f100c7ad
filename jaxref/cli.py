"""The command `jaxref`: print masks and RoPE's frequencies, convert models. Plug-ins add further verbs."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from anchorline.command import finite, make_app
from anchorline.errors import UserError, print, quoted
from anchorline.files import read_json
from anchorline.terminal import Console

PLUGINS = ("ropestudy.cli",)  # modules above this package that add verbs to `app` when they are imported
app = make_app("jaxref", "Anchorline's oracle: the right number, and which rounding moves it.")

MOST_TOKENS = 64  # of a drawing: a line of it fits a wide terminal
MOST_POSITION = 2**24  # every rounding carries positions up to here exactly, float32 too
_PAPER_LENGTHS = {f"paper-{k}k": k * 1024 for k in (32, 64, 128, 256)}


@app.command()
def mask(
    documents: Annotated[
        str, typer.Option(metavar="N,N,...", help="tokens of each document, in the order they are packed")
    ] = "3,5,2",
    variant: Annotated[
        str, typer.Option(help="full, intra, intra_reset or anchor; each may be followed by +tag and +interleave")
    ] = "anchor",
    anchor: Annotated[int, typer.Option(min=0, help="tokens of the prefix that opens the row in every variant")] = 1,
    padding: Annotated[int, typer.Option(min=0, help="tokens after the last document")] = 0,
    tag: Annotated[
        int | None,
        typer.Option(
            min=0, help="tokens that open each document, such as the name of its domain (0, and 2 under +tag)"
        ),
    ] = None,
    chunks: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, help="pieces that +interleave cuts a document into")
    ] = 4,
    seed: Annotated[int, typer.Option(min=0, help="of the order in which +interleave merges the pieces")] = 0,
) -> None:
    """Draw who sees whom in one packed row.

    A line is a query, a column is a key. A query sees a key at its place or before it, in its document or the anchor.
    A is the anchor (document 0, a prefix that every document sees), - is padding, which neither sees nor is seen.
    Variants differ in document ids and positions alone: both are printed.

    Example: jaxref mask --documents 3,5,2 --variant anchor --padding 2
    """
    from jaxref.layout import draw, lay_out
    from jaxref.mask import live_pairs

    lengths = whole_numbers("documents", documents)
    variant, tagged = _without_tag(variant)
    if tag is None:
        tag = 2 if tagged else 0
    tokens = anchor + sum(tag + n for n in lengths) + padding
    if tokens > MOST_TOKENS:
        raise UserError(
            f"documents: the row has {tokens} tokens, a drawing at most {MOST_TOKENS}; give shorter documents"
        )
    row = lay_out(lengths, variant, anchor=anchor, padding=padding, tag=tag, chunks=chunks, seed=seed)
    live, causal = live_pairs(row.document_ids[None]), tokens * (tokens + 1) // 2
    print(draw(row.document_ids))
    print(f"\npositions  {' '.join(map(str, row.position_ids))}")
    print(f"pairs      {live} of {causal} causal ones are live ({live / causal:.0%})")


@app.command()
def rope(
    theta: Annotated[
        str | None, typer.Option(help="base: a number (10000), or the paper's: paper-32k, -64k, -128k, -256k")
    ] = None,
    rope_type: Annotated[
        str | None,
        typer.Option("--type", help="default, linear, ntk, dynamic, yarn or llama3; longrope needs --config"),
    ] = None,
    factor: Annotated[
        float | None, typer.Option(callback=finite, help="of every type but default: new length over original")
    ] = None,
    original: Annotated[
        int | None, typer.Option(help="of dynamic, yarn and llama3: positions the model was made for (8192)")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="dimensions of a head (128); each pair of them has a frequency")
    ] = None,
    position: Annotated[int, typer.Option(help="where angles and errors are shown, in tokens")] = 131_071,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a model's config.json, in place of all but --position")
    ] = None,
) -> None:
    """Print RoPE's frequencies, and what each rounding does to them at a position.

    One line for each rotated pair: its inverse frequency in radians a token, its wavelength in tokens, its exact angle
    and cos at the position, and how far cos is from that under each preset of roundings. Presets that agree share a
    column. An error near 1 means that the pair no longer distinguishes positions.

    The last column is what model.to(bfloat16) does to a transformers model: it rounds the inverse frequencies
    themselves. Llama 3's low and high frequency factors are 1 and 4, as published.

    Example: jaxref rope --theta paper-128k --position 131071
    """
    import numpy as np

    from jaxref.rope import cos_sin, inverse_frequencies
    from jaxref.rope_spec import RopeSpec
    from jaxref.rounding import PRESETS, Rounding, preset

    if not 0 <= position <= MOST_POSITION:
        raise UserError(
            f"position: {position}; give one from 0 to {MOST_POSITION}: beyond, float32 holds not every one"
        )
    if config is None:
        rope_type = rope_type or "default"
        if original is None and rope_type in ("dynamic", "yarn", "llama3"):
            original = 8192
        bands: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
        spec = RopeSpec(
            128 if head_dim is None else head_dim,
            _theta(theta or "10000"),
            rope_type,
            factor=factor,
            original_max_position_embeddings=original,
            **bands,
        )
    elif any(option is not None for option in (theta, rope_type, factor, original, head_dim)):
        raise UserError("config: it says theta, type, factor, original and head_dim; give the file or the options")
    else:
        spec = RopeSpec.from_hf(_read_config(config))
    frequencies, scaling = inverse_frequencies(spec, position + 1)

    def cos(rounding: Rounding) -> np.ndarray:
        return np.asarray(cos_sin([[position]], frequencies, scaling, rounding)[0][0, 0], dtype=np.float64)

    roundings = {name: rounding for name, rounding in PRESETS.items() if name != "exact"}
    roundings["model.to(bf16)"] = preset("hf_eager_bf16").replace(inv_freq="bf16")
    exact, columns = cos(preset("exact")), {}
    for name, rounding in roundings.items():
        columns.setdefault(tuple(np.abs(cos(rounding) - exact)), []).append(name)

    details = "" if scaling == 1 else f", attention scaling {scaling:.6g}"
    table = Table(
        title=f"{spec.rope_type}, theta {spec.theta:g}, head_dim {spec.head_dim}, position {position:,}{details}"
    )
    for title in ("pair", "inverse\nfrequency", "wavelength\n(tokens)", "angle\n(radians)", "cos"):
        table.add_column(title, justify="right")
    for names in columns.values():
        table.add_column("cos error\n" + "\n".join(names), justify="right")
    for pair, frequency in enumerate(frequencies):
        errors = (f"{errors[pair]:.1e}" for errors in columns)
        numbers = (
            f"{frequency:.6e}",
            f"{2 * np.pi / frequency:,.1f}",
            f"{position * frequency:,.4f}",
            f"{exact[pair]:+.6f}",
        )
        table.add_row(str(pair), *numbers, *errors)
    table.add_section()
    table.add_row("", "", "", "", "largest", *(f"{max(errors):.1e}" for errors in columns))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="a Hugging Face folder (config.json, safetensors), or a checkpoint of Orbax made here"),
    ],
    target: Annotated[Path, typer.Argument(help="the folder that is made; it must not exist")],
) -> None:
    """Convert a Hugging Face folder to an Orbax checkpoint, or back, without changing a bit of a parameter.

    The direction follows from SOURCE. Parameters are converted, and the part of config.json that computes with them.
    Tokenizers, other files and the state of an optimizer are not.

    \b
    Examples:
      jaxref convert models/mine checkpoints/mine
      jaxref convert checkpoints/mine models/again
    """
    from jaxref.storage.checkpoint import convert as run

    print(run(source, target))


def load_app() -> typer.Typer:
    """Return the command with the verbs of the plug-ins that are installed."""
    for plugin in PLUGINS:
        if importlib.util.find_spec(plugin.split(".")[0]) is not None:
            importlib.import_module(plugin)
    return app


def main() -> None:
    """Entry point of the command `jaxref`."""
    load_app()()


def whole_numbers(option: str, given: str) -> list[int]:
    """Return the numbers that an option gives between commas. Raises UserError: they are not whole numbers."""
    try:
        return [int(number) for number in given.split(",")]
    except ValueError:
        raise UserError(f"{option}: {quoted(given)}; give whole numbers between commas, for example 3,5,2") from None


def _without_tag(variant: str) -> tuple[str, bool]:
    """Take `+tag` off: to the mask a tag is part of its document, only longer."""
    from jaxref.layout import VARIANTS

    base, *extras = variant.split("+")
    if base not in VARIANTS or sorted(extras) not in ([], ["interleave"], ["interleave", "tag"], ["tag"]):
        raise UserError(
            f"variant: {quoted(variant)}; give {', '.join(VARIANTS)}, each alone, with +tag, with +interleave or with "
            "both"
        )
    return variant.replace("+tag", ""), "tag" in extras


def _theta(theta: str) -> float:
    from jaxref.rope_spec import paper_theta

    if theta in _PAPER_LENGTHS:
        return paper_theta(_PAPER_LENGTHS[theta])
    try:
        return float(theta)
    except ValueError:
        raise UserError(f"theta: {quoted(theta)} is neither a number nor one of {', '.join(_PAPER_LENGTHS)}") from None


def _read_config(path: Path) -> dict:
    config = read_json(path, "config")
    if not ("head_dim" in config or "hidden_size" in config):
        raise UserError(f"config: {quoted(path)} is not the config.json of a model: it has no hidden_size")
    return config


if __name__ == "__main__":
    from jaxref.cli import main as run_main  # the plug-ins add their verbs to this module under its own name

    run_main()
