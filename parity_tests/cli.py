"""The command line of the judge: `parity run` compares one model, layer by layer, with the oracle; `parity check` judges
anyone's attention function.

Exit codes: 0 the same within the allowance, 1 something breaks the rule, 2 a user's mistake.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Judge a computation against the oracle: is it the same, and if not, where does it part and by how much?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def run(
    model: Annotated[
        str, typer.Option(help="llama, mistral, qwen2, qwen3 (tiny, random); smollm2; a folder; or a hub id")
    ] = "llama",
    variant: Annotated[str, typer.Option(help="full, intra, intra_reset, anchor; with +tag, +interleave")] = "anchor",
    engine: Annotated[str, typer.Option(help="auto, flash, flex, sdpa, dense")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
    tokens: Annotated[int, typer.Option(help="tokens a row", min=32)] = 192,
    seed: Annotated[int, typer.Option(help="of random weights, tokens and interleaving", min=0)] = 0,
    cache: Annotated[Path, typer.Option(help="folder for converted models")] = Path("cache"),
) -> None:
    """Compare a transformers model on our attention with the oracle in float64, tap by tap.

    The allowance of each tap is twice what the oracle errs under the same roundings, plus one rounding. The table shows
    the worst tap of each layer; error over allowance passes up to 1.

    Example: parity run --model smollm2 --variant anchor+interleave --dtype bfloat16
    """
    try:
        report = _compare(model, variant, engine, dtype, tokens, seed, cache)
    except (ValueError, OSError) as error:  # UserError is a ValueError
        print(f"parity: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from None
    _show(report)
    name = report.first_divergence
    if name is not None:
        print(f"DIFFERENT: {name} is the first to break the rule: {report.verdicts[name]}")
        raise typer.Exit(1)
    worst, verdict = report.worst
    print(f"SAME: {len(report.verdicts)} taps within their allowance; the worst is {worst}, ratio {verdict.ratio:.2f}")


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="module:function or file.py:function")],
    layouts: Annotated[list[str] | None, typer.Option(help="layouts of documents; default: all")] = None,
    dtypes: Annotated[list[str] | None, typer.Option(help="float32, bfloat16, float16")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="query heads / key-value heads, such as 4/2")] = None,
    head_dim: Annotated[int, typer.Option(help="size of a head")] = 16,
    backward: Annotated[bool, typer.Option(help="judge gradients too")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU where there is one")] = None,
    seed: Annotated[int, typer.Option(help="of q, k and v")] = 0,
    library: Annotated[str | None, typer.Option(help="torch or jax")] = None,
    layout: Annotated[str | None, typer.Option(help="order of the axes it takes: BTHD, BHTD, ...")] = None,
    documents: Annotated[str | None, typer.Option(help="how it is told of documents: document_ids, plan, ...")] = None,
    like: Annotated[str | None, typer.Option(help="whose roundings it is allowed: flash or eager")] = None,
    lacks: Annotated[list[str] | None, typer.Option(help="what it does not do, and is not asked for")] = None,
) -> None:
    """Judge anyone's attention function on every layout of documents. docs/checking-your-kernel.md says how it is called.

    Example: parity check mypackage.attention:my_varlen_attention --dtypes bfloat16
    """
    from parity_tests.check import check_command

    code = check_command(
        target,
        layouts=layouts,
        dtypes=dtypes,
        heads=heads,
        head_dim=head_dim,
        backward=backward,
        device=device,
        seed=seed,
        library=library,
        layout=layout,
        documents=documents,
        like=like,
        lacks=lacks or (),
    )
    raise typer.Exit(code)


def _compare(model: str, variant: str, engine: str, dtype: str, tokens: int, seed: int, cache: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import torchtrain
    from parity_tests.layers import compare_layers
    from parity_tests.models import FAMILIES, packed_batch, text_batch, tiny_model
    from torchtrain.attention import resolve_engine
    from torchtrain.attention.hf import implementation_name
    from torchtrain.errors import UserError
    from torchtrain.modeling.load import resolve_source

    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype {dtype!r}: choose float32 or bfloat16")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torchtrain.register()
    torch_dtype = getattr(torch, dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = resolve_engine(engine, device, torch_dtype, training=False)
    implementation = implementation_name(chosen)
    candidate: Any
    if model in FAMILIES:
        candidate = tiny_model(model, torch_dtype, implementation, seed, max_position_embeddings=tokens)
        lengths = (tokens * 2 // 5, 1, tokens // 4, tokens // 8)
        lengths = (*lengths, tokens - 1 - sum(lengths))
        batch = packed_batch(variant, lengths, seed=seed)
    else:
        source = resolve_source(model, cache)
        batch = text_batch(AutoTokenizer.from_pretrained(source), variant, tokens, seed)
        candidate = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype, attn_implementation=implementation)
    print(f"parity: {model} · {variant} · {chosen} · {dtype} · 2 x {tokens} tokens on {device}", file=sys.stderr)
    batch = {name: x.to(device) for name, x in batch.items()}
    return compare_layers(candidate.eval().to(device), batch, chosen)


def _show(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    places: dict[str, dict[str, Any]] = {}
    for name, verdict in report.verdicts.items():
        layer, _, tap = name.removeprefix("layers.").rpartition(".")
        places.setdefault(f"layer {layer}" if layer else tap, {})[tap] = verdict
    table = Table("where", "worst tap", "error", "allowance", "error / allowance")
    for place, verdicts in places.items():
        tap, worst = max(verdicts.items(), key=lambda item: item[1].ratio)
        ratio = f"{worst.ratio:.2f}" if worst.passed else f"[bold red]{worst.ratio:.3g}[/]"
        table.add_row(place, tap, f"{worst.error:.2e}", f"{worst.allowance:.2e}", ratio)
    Console().print(table)


def main() -> None:
    """Entry point of the command `parity`."""
    app()


if __name__ == "__main__":
    main()
