"""The command line: print or draw what the oracle holds. A mistake is one line on standard error and exit code 2."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

# jax and matplotlib are imported where they are used: help does not wait for them.
if TYPE_CHECKING:
    from rich.table import Table

    from jaxref.rope import RopeSpec

MOST_TOKENS = 512  # in one drawing
MOST_POSITIONS = 2**24  # a float32 carrier holds no larger one exactly

app = typer.Typer(
    help="Ask the oracle: what a mask lets through, which angles RoPE rotates by, and what each rounding does to them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def mask(
    documents: Annotated[str, typer.Option(metavar="N,N,...", help="tokens of each document")],
    variant: Annotated[
        str, typer.Option(help="full, intra, intra_reset or anchor, each with +interleave or without; or all four")
    ] = "all",
    anchor: Annotated[int, typer.Option(help="tokens of the prefix that opens the row")] = 1,
    padding: Annotated[int, typer.Option(help="tokens of padding at the end")] = 0,
    chunks: Annotated[int, typer.Option(help="+interleave: pieces a document is cut into")] = 4,
    seed: Annotated[int, typer.Option(help="+interleave: seed of the order of the pieces")] = 0,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="draw a picture instead")] = None,
) -> None:
    """Draw which key each query sees: a line per query, a column per key, A the anchor, - padding.

    Example: jaxref mask --documents 3,5,2 --variant anchor

    Example: jaxref mask --documents 4,6,3 --png masks.png
    """
    with _one_line_errors():
        import numpy as np

        from jaxref.mask import VARIANTS, draw, layout, live_pairs

        lengths = _lengths(documents)
        tokens = anchor + sum(lengths) + padding
        if tokens > MOST_TOKENS:
            raise ValueError(f"documents: {tokens} tokens in all; a drawing holds up to {MOST_TOKENS}")
        variants = VARIANTS if variant == "all" else (variant,)
        layouts = {
            name: layout(lengths, name, anchor=anchor, padding=padding, chunks=chunks, seed=seed) for name in variants
        }
        if png is not None:
            from jaxref.draw import save_masks

            # The prefix is document 1's wherever it is no anchor.
            owners = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            save_masks(layouts, np.pad(owners, (anchor, padding), constant_values=(1, len(lengths))), png)
            print(f"{png}: {', '.join(variants)}")
            return
        for name, row in layouts.items():
            print(f"{name}\n\n{draw(row.document_ids)}\n")
            print(f"document_ids  {' '.join(map(str, row.document_ids))}")
            print(f"position_ids  {' '.join(map(str, row.position_ids))}")
            print(f"live pairs    {live_pairs(row.document_ids[None])}\n")


@app.command()
def rope(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a model's config.json, instead of the five options below")
    ] = None,
    theta: Annotated[float | None, typer.Option(help="base; 10000 if not given")] = None,
    rope_type: Annotated[
        str | None,
        typer.Option("--type", help="default, linear, ntk, dynamic or yarn (llama3 and longrope need --config)"),
    ] = None,
    factor: Annotated[float | None, typer.Option(help="scaling factor of linear, ntk, dynamic and yarn")] = None,
    original: Annotated[int | None, typer.Option(help="original length of dynamic and yarn, in tokens")] = None,
    head_dim: Annotated[int | None, typer.Option(help="dimensions of a head; 128 if not given")] = None,
    position: Annotated[int, typer.Option(help="position of the token to be rotated")] = 131_071,
) -> None:
    """Print RoPE pair by pair: frequency, wavelength, angle, and the error of its cosine under each rounding.

    Errors are against float64. Presets that build the same table share a column.

    Example: jaxref rope --theta 5e5 --head-dim 64 --position 32767

    Example: jaxref rope --config SmolLM2-135M/config.json --position 8191
    """
    with _one_line_errors():
        if not 0 <= position < MOST_POSITIONS:
            raise ValueError(f"position: {position}; give one from 0 to {MOST_POSITIONS - 1}")
        given = {
            "theta": theta,
            "type": rope_type,
            "factor": factor,
            "original": original,
            "head-dim": head_dim,
        }
        spec = _spec(config, {name: value for name, value in given.items() if value is not None})

        from rich.console import Console
        from rich.measure import Measurement

        console, table = Console(), _rope_table(spec, position)
        if not console.is_terminal:  # a file is as wide as it needs to be
            console.width = Measurement.get(console, console.options.update(max_width=1000), table).maximum
        console.print(table)


def _lengths(documents: str) -> list[int]:
    try:
        return [int(n) for n in documents.split(",")]
    except ValueError:
        raise ValueError(f"documents: {documents!r}; give the tokens of each, for example 3,5,2") from None


def _spec(config: Path | None, given: Mapping[str, Any]) -> "RopeSpec":
    from jaxref.rope import RopeSpec

    if config is None:
        return RopeSpec(
            head_dim=given.get("head-dim", 128),
            theta=given.get("theta", 10_000.0),
            rope_type=given.get("type", "default"),
            factor=given.get("factor"),
            original_max_position_embeddings=given.get("original"),
        )
    if given:
        raise ValueError(f"config: {config} says it all; leave out --{', --'.join(given)}")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config: {config} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"config: {config} is not a JSON object")
    for names in (("head_dim", "hidden_size"), ("head_dim", "num_attention_heads")):
        if not any(isinstance(content.get(name), int) for name in names):
            raise ValueError(f"config: {config} has neither {' nor '.join(names)}")
    return RopeSpec.from_hf(content)


def _rope_table(spec: "RopeSpec", position: int) -> "Table":
    import numpy as np
    from rich import box
    from rich.table import Table

    from jaxref.rope import cos_sin, inverse_frequencies
    from jaxref.rounding import PRESETS, preset

    inv_freq_C, scaling = inverse_frequencies(spec, position + 1)
    truth_C = np.asarray(cos_sin([[position]], inv_freq_C, scaling, preset("exact"))[0])[0, 0]
    columns: dict[bytes, tuple[list[str], np.ndarray]] = {}
    for name in sorted(PRESETS.keys() - {"exact"}, key=list(PRESETS).index):
        cos_C = np.asarray(cos_sin([[position]], inv_freq_C, scaling, PRESETS[name])[0], dtype=np.float64)[0, 0]
        columns.setdefault(cos_C.tobytes(), ([], np.abs(cos_C - truth_C)))[0].append(name)

    title = f"{spec.rope_type}, theta {spec.theta:g}, head_dim {spec.head_dim}, cos and sin times {scaling:.6g}"
    table = Table(title=title, caption=f"errors of cos at position {position:,} against float64", box=box.SIMPLE)
    for header in ("pair", "inverse frequency", "wavelength", "angle", "cos"):
        table.add_column(header, justify="right", vertical="bottom", no_wrap=True)
    for names, _ in columns.values():
        table.add_column("\n".join(names), justify="right", vertical="bottom", no_wrap=True)
    for pair, frequency in enumerate(inv_freq_C):
        errors = [f"{errors_C[pair]:.1e}" for _, errors_C in columns.values()]
        exact = [f"{frequency:.10g}", f"{2 * np.pi / frequency:,.2f}", f"{position * frequency:,.4f}"]
        table.add_row(str(pair), *exact, f"{truth_C[pair]:+.6f}", *errors)
    return table


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        _fail(str(error), 2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "jaxref":
            raise
        _fail(f"the package {error.name} is not installed: pip install 'anchorline[jax]'", 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    print(f"jaxref: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the command `jaxref`."""
    app()


if __name__ == "__main__":
    main()
