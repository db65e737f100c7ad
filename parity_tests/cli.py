"""The judge's command line. Exit code 0: all passes; 1: something differs; others: `anchorline.command`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from anchorline.command import INTERRUPTED, MISTAKE, Leave, make_app
from anchorline.errors import UserError, one_line, print
from anchorline.terminal import Console, progress

app = make_app(
    "parity",
    "Compare a computation with the oracle. Say whether it is the same, where it first differs, and by how much.",
)

OUT = Path("runs/parity")  # of a configuration, unless told otherwise
Format = Annotated[Literal["text", "github"], typer.Option("--format", help="github: with annotations of a workflow")]


@app.command()
def run(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...", help="a gate, and changes to it; or the settings of one case"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="report.html, report.json, junit.xml, badge.json; of a gate: runs/parity")
    ] = None,
    case: Annotated[str | None, typer.Option(help="run this case of the gate alone")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes that share the cases of a gate")] = 1,
    format_: Format = "text",
    keys: Annotated[bool, typer.Option("--keys", help="print the keys of a case, and end")] = False,
) -> None:
    """Compare a transformers model on our attention with the oracle in float64, array by array.

    The oracle has no decoder for some families. Those are compared with transformers' eager attention in float64.

    With a configuration, it runs every case and writes a report. After an interruption the same command continues.
    Without one, it compares one model and prints the worst tap of each layer; --keys lists its settings.
    Its model is tiny and random (llama, qwen3, windows, ...), smollm2, a folder or a hub id.

    The allowance of an array is twice the oracle's error under the same roundings, plus one rounding. An array passes
    if its error is at most its allowance.

    \b
    Examples:
      parity run configs/parity/ci.yaml --out runs/parity
      parity run configs/parity/ci.yaml --case llama-anchor-yarn-sdpa-float32-t53-o8139-s0
      parity run model=smollm2 variant=anchor+interleave dtype=bfloat16
      parity run model=my/export against=my/original dtype=bfloat16
    """
    from parity_tests.gate.spec import Single, load_gate, load_single

    if keys:
        from torchtrain.config.reference import list_settings

        print(*list_settings([Single]), sep="\n")
        return
    first, *rest = given or [""]
    if "=" in first or not first:
        if case is not None or workers > 1:
            raise UserError(f"--{'workers' if case is None else 'case'}: needs a configuration")
        gate = _gate_of_one(load_single([*filter(None, [first]), *rest]))
    else:
        gate = load_gate(first, rest)
        out = OUT if out is None and case is None else out
    from parity_tests.gate.run import run_gate, silence_transformers
    from parity_tests.report.verdict import in_words

    silence_transformers()
    command = shlex.join(["parity", *sys.argv[1:]])
    try:
        with progress("parity") as bar:
            report = run_gate(gate, out, case, lambda one, n, of: bar(_line(one), n, of), command, workers)
    except KeyboardInterrupt:
        raise Leave(
            "interrupted; with --out finished cases are kept, and the same command goes on", INTERRUPTED
        ) from None
    if len(report.cases) == 1:
        _show_case(report.cases[0])
    _leave_traces(report, out, format_)
    print(in_words(report))
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def compare(
    candidate: Annotated[Path, typer.Argument(help="safetensors: a file, or a folder of one file a rank or step")],
    truth: Annotated[Path | None, typer.Option(help="the same arrays in float64, or finer than candidate")] = None,
    reference: Annotated[Path | None, typer.Option(help="the same, rounded alike, by an engine you trust")] = None,
    against: Annotated[Path | None, typer.Option(help="instead of a truth: shows differences, judges nothing")] = None,
    names: Annotated[str, typer.Option(help="map of the candidate's names: a file, auto, none, hf, ...")] = "auto",
    truth_names: Annotated[str, typer.Option(help="map of the names of truth, reference and against")] = "auto",
    config: Annotated[Path | None, typer.Option(help="the model's config.json, where the dumps lack it")] = None,
    order: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="names in the order of the computation, one a line")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="names to compare; * is any text, ! leaves out")] = None,
    axes: Annotated[list[str] | None, typer.Option(help="letters of axes, such as '*.attn=BTHD' or '*=TM'")] = None,
    dtype: Annotated[str | None, typer.Option(help="what the candidate computes in, where stored wider")] = None,
    operations: Annotated[int, typer.Option(min=1, help="without a reference: roundings that a layer may make")] = 16,
    logprobs: Annotated[bool, typer.Option(help="token_ids and logprobs, as JSONL or safetensors")] = False,
    out: Annotated[Path | None, typer.Option(help="report.html, report.json, junit.xml, badge.json")] = None,
    format_: Format = "text",
) -> None:
    """Compare what two engines computed: which array is the first that differs by more than rounding, and why.

    An array passes if its error against the truth is at most twice the reference's, plus one rounding. Without a
    reference the truth's own rounding alone is allowed: noise floor only, not a proof. Needs neither torch nor JAX.

    \b
    Examples:
      parity compare mine.safetensors --truth fp64.safetensors --reference bf16.safetensors --out report
      parity compare ranks/ --truth fp64.safetensors --reference bf16.safetensors --names megatron
      parity compare new.safetensors --against old.safetensors
      parity compare --logprobs sampler.jsonl --truth fp64.jsonl --reference trainer.jsonl
    """
    from anchorline.tolerance import UNIT_ROUNDOFF

    given: Any = {}
    for text in axes or ():
        pattern, equals, letters = text.rpartition("=")
        if not equals or not letters.isalpha() or not letters.isupper() or len(set(letters)) < len(letters):
            raise UserError(f"--axes {text}: write a pattern of names and letters, each once, such as '*.attn=BTHD'")
        given[pattern] = letters
    if (truth is None) == (against is None) or (against and reference):
        raise UserError("give --truth, with --reference if you have one; or --against alone")
    if dtype not in (None, *UNIT_ROUNDOFF):
        raise UserError(f"--dtype {dtype}: unknown; choose from {', '.join(UNIT_ROUNDOFF)}")
    from parity_tests.comparing.compare import compare
    from parity_tests.comparing.dumps import check_alike, check_fits, open_dump
    from parity_tests.comparing.judging import Rule
    from parity_tests.comparing.logprobs import describe, open_logprobs
    from parity_tests.comparing.names import load_names, recognise, rename
    from parity_tests.report.verdict import in_words

    if out is not None:
        from parity_tests.report.write import make_folder, write

        make_folder(out)

    recorded, lines = list[str](), order.read_text("utf-8", "replace").splitlines() if order else []

    def read(path: Path | None, option: str, called: str) -> Any:
        if path is None:
            return None
        dump = open_dump(path, lines, config)
        recorded.extend(dump.arrays)
        if called == "auto" and (fitting := recognise(dump)):
            called, *others = fitting
            also = f" (fits as well: {', '.join(others)}; choose with {option})" if others else ""
            print(f"names of {path}: by the map {called}{also}")
        return dump if called in ("auto", "none") else rename(dump, load_names(called, option))

    paths = (truth, reference, against)
    if logprobs:
        first, second, third, fourth = open_logprobs(candidate, *paths)
    else:
        first = read(candidate, "--names", names)
        second, third, fourth = (read(path, "--truth-names", truth_names) for path in paths)
    right = second or fourth
    check_alike(right, first, third)
    for option, patterns in (("--only", only or ()), ("--axes", given)):
        check_fits(option, patterns, [*first.arrays, *right.arrays])
    check_fits("--order", [name.replace("*", "[*]") for name in lines if name], recorded)
    dtype = dtype or ("float32" if logprobs else None)
    rule = Rule(given, dtype, operations, "difference" if against else "reference" if reference else "floor")
    chosen = only or []
    if logprobs and any(not pattern.startswith("!") for pattern in chosen):
        chosen = [*chosen, "inputs.*"]  # other tokens have other log-probabilities
    with progress("parity") as bar:
        report = compare(first, second, third, fourth, rule, chosen, lambda _, n, total: bar(None, n, total))
    numbers = describe(first, right) if logprobs else []
    print(in_words(report, rule.kind), *report.cases[0].notes, *numbers, sep="\n  ")
    if out is not None:
        write(report, out, rule.kind)
    _leave_traces(report, out, format_)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def record(
    target: Annotated[
        str, typer.Argument(help="module:function or file.py:function; returns (model, {name: input of the model})")
    ],
    out: Annotated[Path, typer.Option(help="the safetensors file")],
    names: Annotated[list[str] | None, typer.Option(help="names to record; * is any text")] = None,
    backward: Annotated[bool, typer.Option(help="torch: call backward on the output's loss, record gradients")] = False,
) -> None:
    """Call a model of torch or Flax once, and record what every module returns, for `parity compare`.

    The model of flax.linen is bound to its variables. To record in your own code, copy parity_tests/record.py (Flax:
    record_flax.py), which needs nothing else of this project.

    Example: parity record mine.py:make --out bf16.safetensors --names 'model.layers.*'
    """
    from parity_tests.checking.target import load_target
    from parity_tests.comparing.dumps import open_dump

    make = load_target(target)
    try:
        found = make()
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            raise UserError(f"target {target!r}: returns {type(found).__name__}; return (model, {{name: input}})")
        _record(*found, out, names or "*", backward)
    except UserError:
        raise
    except Exception as error:  # in code that is not ours
        raise UserError(f"target {target!r}: running it raises {type(error).__name__}: {one_line(error)}") from error
    print(f"{out}: {len(open_dump(out).arrays)} arrays")


def _record(model: Any, inputs: dict[str, Any], out: Path, names: Any, backward: bool) -> None:
    if hasattr(model, "named_modules"):
        from parity_tests.record import record

        with record(model, out, names, **{n: x for n, x in inputs.items() if hasattr(x, "dtype")}):
            output = model(**inputs)
            if backward:
                output.loss.backward()
    elif hasattr(model, "sow") and getattr(model, "scope", model) is not None:
        from parity_tests.record_flax import record as record_flax

        if backward:
            raise UserError("--backward: a Flax model has no backward pass to record; leave it out")
        record_flax(model, out, names=names, **inputs)
    else:
        raise UserError(
            f"the model is of {type(model).__name__}; return a torch.nn.Module, an nnx.Module, or a linen module "
            "that is bound: module.bind(variables)"
        )


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="report.json of the earlier run")],
    b: Annotated[Path, typer.Argument(help="report.json of the later run")],
    gone: Annotated[
        list[str] | None, typer.Option(help="what the later may lack: a case, or case:array; * is any text")
    ] = None,
) -> None:
    """Show what moved between two reports.

    Exits with 1 if a case got worse, if a case or an array that was judged is gone, or if a new case does not pass.

    Example: parity diff runs/before/report.json runs/after/report.json
    """
    from parity_tests.report.diff import diff as compare_reports
    from parity_tests.report.schema import read_report

    found = compare_reports(read_report(a), read_report(b), gone or ())
    print(found.explain())
    if found.got_worse:
        raise typer.Exit(1)


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="module:function or file.py:function")],
    layouts: Annotated[list[str] | None, typer.Option(help="layouts of documents; default: all")] = None,
    dtypes: Annotated[list[str] | None, typer.Option(help="float32, bfloat16, float16")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="query heads / key-value heads, such as 4/2")] = None,
    head_dim: Annotated[int, typer.Option(help="size of a head")] = 16,
    backward: Annotated[bool, typer.Option(help="judge gradients too")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU where there is one")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of q, k and v")] = 0,
    library: Annotated[str | None, typer.Option(help="torch or jax")] = None,
    layout: Annotated[str | None, typer.Option(help="order of the axes it takes: BTHD, BHTD, ...")] = None,
    documents: Annotated[str | None, typer.Option(help="how it is told of documents: document_ids, plan, ...")] = None,
    like: Annotated[str | None, typer.Option(help="whose roundings it is allowed: flash or eager")] = None,
    lacks: Annotated[list[str] | None, typer.Option(help="what it does not do, and is not asked for")] = None,
) -> None:
    """Judge anyone's attention function on every layout of documents; see docs/same-computation.md.

    Example: parity check mypackage.attention:my_varlen_attention --dtypes bfloat16
    """
    from parity_tests.check import Adapter, check_attention
    from parity_tests.checking.target import load_target

    declared: Any = {"library": library, "layout": layout, "documents": documents, "like": like}
    adapter = Adapter(**declared, lacks=lacks or ())
    pairs = None if heads is None else [_pair(text) for text in heads]
    fn = load_target(target)
    with progress("parity") as bar:
        result = check_attention(
            fn,
            layouts=layouts,
            dtypes=dtypes,
            heads=pairs,
            head_dim=head_dim,
            backward=backward,
            device=device,
            adapter=adapter,
            seed=seed,
            progress=lambda _, number, total: bar(None, number, total),
        )
    _show(result.table())
    print(result.explain())
    if result.verdict != "same":
        raise typer.Exit(1 if result.verdict == "different" else MISTAKE)


def _pair(text: str) -> tuple[int, int]:
    head, slash, kv = text.partition("/")
    if not (slash and head.isdecimal() and kv.isdecimal()):
        raise UserError(f"heads: {text!r}; give query heads / key-value heads, as in 4/2")
    return int(head), int(kv)


@app.command()
def zoo(
    config: Annotated[Path, typer.Argument(help="the gate to try")] = Path("configs/parity/ci.yaml"),
    bugs: Annotated[list[str] | None, typer.Argument(help="names of bugs; all of them")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="only print every bug and where it happened")] = False,
) -> None:
    """Run a gate against every bug of the zoo and print which case catches which.

    Exits with 1 if a bug survives, or if the gate fails on the correct code; with 2 if no case can run here, or if the
    oracle has no decoder of a model.

    Example: parity zoo configs/parity/ci.yaml rope_interleaved causal_top_left
    """
    if list_only:
        from parity_tests.zoo import discover

        for bug in discover().values():
            print(f"{bug.name} ({bug.stage}): {bug.what}. {bug.where}")
        return
    from parity_tests.gate.run import silence_transformers
    from parity_tests.gate.spec import load_gate
    from parity_tests.zoo.run import run_zoo, show

    silence_transformers()
    gate = load_gate(config)
    with progress("parity") as bar:
        report = run_zoo(gate, bugs, bar)
    _show(show(report))
    if not report.passed:
        raise typer.Exit(1)


def _gate_of_one(given: Any) -> Any:
    """The gate of one case; with `against`, of two."""
    from pydantic import ValidationError

    from anchorline.settings import explain
    from parity_tests.gate.candidate import choose_engine, why_not_here
    from parity_tests.gate.spec import CaseSpec, Gate

    def spec(**changes: Any) -> CaseSpec:
        one = given.model_copy(update=changes)
        made = one.model_dump(exclude={"against_dtype"}) | {"engine": choose_engine(one)}
        case = CaseSpec.model_validate(made)
        if reason := why_not_here(case):
            raise UserError(reason)
        return case

    model, against = given.model, given.against
    if against is None and "against_dtype" in given.model_fields_set:
        raise UserError(f"against_dtype {given.against_dtype}: needs `against`, a second model")
    try:
        specs = [spec()]
        if against is not None:
            from parity_tests.gate.weights import check_same_weights

            check_same_weights(model, against, given.dtype)
            specs += [spec(model=against, dtype=given.against_dtype, against=None)]
        return Gate(title=model if against is None else f"{model} against {against}", cases=specs)
    except ValidationError as error:
        raise UserError(explain(Gate, error)) from None


def _line(case: Any) -> str:
    """One case in one line."""
    if case.passed:
        return f"passes   {case.id} in {case.seconds:.1f} s"
    return f"{'FAILS   ' if case.failed else 'skipped '} {case.id}: {case.reasons[0]}"


def _leave_traces(report: Any, out: Path | None, format_: str) -> None:
    if format_ == "github":
        from parity_tests.report.github import annotations

        print("\n".join(annotations(report)))
    if out is not None:
        print(f"report: {out / 'report.html'}")


def _show_case(case: Any) -> None:
    from rich.table import Table

    places: dict[str, list[Any]] = {}
    for measure in case.measures:
        place = measure.group if measure.layer is None else f"{measure.group}, layer {measure.layer}"
        places.setdefault(place, []).append(measure)
    table = Table("where", "worst", "error", "allowance", "error / allowance", title=case.id)
    table.caption = f"reference: {case.preset}"
    for place, measures in places.items():
        worst = max(measures, key=lambda measure: measure.ratio)
        ratio = f"{worst.ratio:.2f}" if worst.passed else f"[bold red]{worst.ratio:.3g}[/]"
        table.add_row(place, worst.tap, f"{worst.error:.2e}", f"{worst.allowance:.2e}", ratio)
    _show(table)


def _show(table: Any) -> None:
    """Print a table; of a narrow terminal, and of a pipe, lines go on below: no name is cut."""
    console = Console()
    console.width = max(console.width, 160)
    console.print(table)


def main() -> None:
    """Entry point of the command `parity`."""
    app()


if __name__ == "__main__":
    main()
