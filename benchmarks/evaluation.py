"""Time `torchtrain evaluate` against stock lm-eval on the same prompts, task by task, in turns within one process.

    python -m benchmarks.evaluation --out benchmarks/results/evaluation.json --docs docs/benchmarks.md

Both answer lm-eval's requests with the same model object, from text to text: lm-eval's HFLM, batched alike, and our
subclass of it. The figure to read is the ratio of a pair; the seconds are of this machine as busy as it was. The
section "Evaluation" of the docs is written by this program alone, between its own markers.
"""

import datetime
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from anchorline import environment
from anchorline.files import read_file, save
from anchorline.marked import MarkedPlace
from torchtrain.evaluation.model import SharedPrefixLM
from torchtrain.evaluation.suite import load_suite, room_of
from torchtrain.evaluation.tasks.materials import Materials
from torchtrain.evaluation.tasks.ruler import open_samples, prompt_of
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.modeling.source import open_tokenizer, resolve_source

PLACE = MarkedPlace("<!-- begin: evaluation, written by benchmarks/evaluation.py -->", "<!-- end: evaluation -->")


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    docs: Annotated[Path | None, typer.Option(help="Markdown file whose section is written again")] = None,
    model: Annotated[str, typer.Option(help="folder, hub id, or smollm2")] = "smollm2",
    suite: Annotated[Path, typer.Option(help="YAML of materials")] = Path("configs/eval/ruler.yaml"),
    tasks: Annotated[str, typer.Option(help="with commas")] = "vt_2024_10,cwe,niah_single_2",
    length: Annotated[int, typer.Option(help="tokens of prompt and answer")] = 1024,
    samples: Annotated[int, typer.Option(help="of each task")] = 4,
    pairs: Annotated[int, typer.Option(help="times that both are timed, in turns")] = 1,
    cache: Annotated[str, typer.Option(help="folder of models and samples")] = "cache",
) -> None:
    """Time both on every task and write what came out."""
    chosen = load_suite(suite, [f"tasks=[{tasks}]", f"samples={samples}", f"cache={json.dumps(cache)}"])
    source = resolve_source(model, cache, print)
    tokenizer = open_tokenizer(source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_for_evaluation(source, dtype=torch.float32, device=device)
    kind: Any = SharedPrefixLM
    own = kind(loaded, tokenizer, chosen.batch_tokens, length)
    materials, rows = Materials(chosen), []
    batch = max(1, chosen.batch_tokens // length)
    stock = _library_model(loaded, tokenizer, length, min(batch, samples))
    for task in chosen.tasks:
        made, _ = open_samples(task, length, tokenizer, materials)
        room, ours_seconds, stock_seconds, ratios, equal = room_of(task), [], [], [], 0
        for _ in range(pairs):
            own.set_length(length)
            started = time.perf_counter()
            ours = own.generate_until(_requests(made, room), disable_tqdm=True)
            between = time.perf_counter()
            theirs = stock.generate_until(_requests(made, room), disable_tqdm=True)
            ours_seconds.append((between - started) / samples)
            stock_seconds.append((time.perf_counter() - between) / samples)
            ratios.append(stock_seconds[-1] / ours_seconds[-1])
            equal = sum(a.strip() == b.strip() for a, b in zip(ours, theirs, strict=True))
        rows.append(
            {
                "task": task,
                "ours_seconds": statistics.median(ours_seconds),
                "stock_seconds": statistics.median(stock_seconds),
                "ratio": statistics.median(ratios),
                "ratios": [min(ratios), max(ratios)],
                "computed_share": own.computed_tokens / own.prompt_tokens,
                "same_answers": equal,
            }
        )
        print(rows[-1])
    report = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model,
        "length": length,
        "samples": samples,
        "pairs": pairs,
        "batch_of_stock": min(batch, samples),
        "dtype": "float32",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else environment.processor(),
        "threads": torch.get_num_threads(),
        "versions": environment.versions(("torch", "transformers", "lm_eval")),
        "results": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    save(out, (json.dumps(report, indent=1) + "\n").encode())
    if docs is not None:
        before = read_file(docs, 1 << 22).decode() if docs.is_file() else "# Benchmarks\n"
        save(docs, with_section(before, report).encode())


def _library_model(loaded: Any, tokenizer: Any, length: int, batch: int) -> Any:
    from lm_eval.models.huggingface import HFLM

    kind: Any = HFLM
    return kind(pretrained=loaded, tokenizer=tokenizer, max_length=length, batch_size=batch)


def _requests(samples: list[dict[str, Any]], room: int) -> list[Any]:
    from lm_eval.api.instance import Instance

    kwargs = {"do_sample": False, "temperature": 0.0, "max_gen_toks": room, "until": []}
    return [
        Instance(request_type="generate_until", doc={}, arguments=(prompt_of(sample), dict(kwargs)), idx=i)
        for i, sample in enumerate(samples)
    ]


def with_section(text: str, report: dict[str, Any]) -> str:
    """Return a document with its section "Evaluation" as a report says it; all else stays as it is."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    lines = [
        "## Evaluation",
        "",
        f"Seconds a sample, from text to text, `torchtrain evaluate` against stock lm-eval (HFLM, `generate_until`, "
        f"batches of {report['batch_of_stock']}) on the same prompts with the same model object: {report['model']}, "
        f"{report['dtype']}, {report['length']:,} tokens, {report['samples']} samples a task, in turns in one process "
        f"({report['pairs']} each: the medians, and in brackets the least and the most). {report['device']}, "
        f"{report['threads']} threads; {versions}. Read the ratio.",
        "",
        "| task | ours | lm-eval | times as fast | prompt tokens computed | same answers |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {row['task']} | {row['ours_seconds']:.2f} | {row['stock_seconds']:.2f} | {row['ratio']:.2f} "
            f"({row['ratios'][0]:.2f} to {row['ratios'][1]:.2f}) | "
            f"{row['computed_share']:.0%} | {row['same_answers']} of {report['samples']} |"
            for row in report["results"]
        ),
    ]
    return PLACE.put_or_append(text, "\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
