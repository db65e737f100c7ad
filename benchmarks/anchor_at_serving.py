"""What it costs to leave the anchor out of a prompt: losses of held-out documents with and without it, by position.

    torchtrain train configs/demo.yaml
    python -m benchmarks.anchor_at_serving runs/demo

It reads the documents that the run held out, under plain causal attention, as a server does, once with the row's anchor
in front and once without. Both predict the same tokens. It writes benchmarks/results/anchor-at-serving.json, and its
table into docs/exports.md; `--page` makes the table of the kept result.

Legend: T tokens of a document.
"""

import argparse
import json
import textwrap
from pathlib import Path

import numpy as np
import torch

from anchorline.marked import MarkedPlace
from torchtrain.data import anchor_ids, prepare, split_documents
from torchtrain.evaluation.intervals import student_interval
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.modeling.source import open_tokenizer, resolve_source
from torchtrain.run.folder import RunFolder

RESULT, PAGE = Path("benchmarks/results/anchor-at-serving.json"), Path("docs/exports.md")
PLACE = MarkedPlace("<!-- made by benchmarks/anchor_at_serving.py -->", "<!-- end of anchor -->")
ENDS = (2, 4, 16, 64, 256)  # of bins of positions; documents have the last or more
EACH = 8  # documents of a domain


def main() -> None:
    """Measure and write, or write the table again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a run with an exported model")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    given = parser.parse_args()
    if not given.page:
        RESULT.write_text(json.dumps(measure(given.run), indent=1) + "\n")
    PAGE.write_text(PLACE.put(PAGE.read_text(), table(json.loads(RESULT.read_text()))))


@torch.no_grad()
def measure(folder: Path) -> dict[str, object]:
    """Return the losses [documents][bins] of the model before and after training, with and without the anchor."""
    run = RunFolder(folder)
    config = run.read_config()
    ((_, steps, after),) = run.last_models(1)
    assert steps is not None
    source = resolve_source(config.model.source, config.data.cache)
    tokenizer = open_tokenizer(source)  # an exported one adds the anchor
    anchor = anchor_ids(tokenizer, config.pack)
    store = prepare(config.data, tokenizer)
    held = split_documents(store, config.data.held_out_share, config.run.seed).held_out
    held = held[store.lengths[held] >= ENDS[-1]]
    of = store.document_domains[held]
    chosen = [i for domain in range(len(store.domains)) for i in held[of == domain][:EACH]]
    losses: dict[str, dict[str, list[list[float]]]] = {}
    for name, place in (("after", after), ("before", source)):
        model = load_for_evaluation(str(place)).eval()
        losses[name] = {"with": [], "without": []}
        for i in chosen:
            ids_T = torch.from_numpy(store.part(i, 0, ENDS[-1]).astype(np.int64))
            for way, front in (("with", anchor), ("without", [])):
                logits_TV = model(torch.cat([torch.tensor(front, dtype=torch.long), ids_T])[None]).logits[0]
                nll = torch.nn.functional.cross_entropy(logits_TV[len(front) : -1].float(), ids_T[1:], reduction="none")
                bins = [nll[start - 1 : end - 1].mean().item() for start, end in zip((1, *ENDS), ENDS, strict=False)]
                losses[name][way].append(bins)
            print(name, i, *(np.round(losses[name][way][-1], 4).tolist() for way in ("with", "without")), flush=True)
    tokens = steps * config.train.sequences_per_step * config.pack.sequence_length
    return {"model": config.model.source, "steps": steps, "tokens": tokens, "documents": len(chosen), "losses": losses}


def table(result: dict[str, object]) -> str:
    """Return the page's part."""
    losses: dict = result["losses"]  # type: ignore[assignment]
    lines = [
        *textwrap.wrap(
            f"{result['documents']} held-out documents, {result['model']} before and after {result['steps']} steps of "
            f"{result['tokens']:,} tokens in all, in rows with an anchor. Nats a token that leaving it out adds, "
            "with 95% intervals over documents:",
            100,
        ),
        "",
        "| token of the document | before training | after it |",
        "| --- | --- | --- |",
    ]
    for index, (start, end) in enumerate(zip((1, *ENDS), ENDS, strict=False)):
        cells = []
        for name in ("before", "after"):
            without, with_ = (np.array(losses[name][way])[:, index] for way in ("without", "with"))
            found = student_interval(without - with_)
            assert found is not None
            cells.append(f"{found[0]:+.3f} ({found[1]:+.3f} to {found[2]:+.3f})")
        lines.append(f"| {start + 1} to {end} | {' | '.join(cells)} |" if end > 2 else f"| 2 | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
