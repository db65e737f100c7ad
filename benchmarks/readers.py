"""Make the tables of docs/exports.md: how older transformers read an export of every RoPE type.

    make readers
    python benchmarks/readers.py [--write docs/exports.md]

The tables of llama.cpp and vLLM behind the marked place are written by hand.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from anchorline.files import save  # noqa: E402
from anchorline.marked import MarkedPlace  # noqa: E402
from torchtrain.modeling.save import reader_notes  # noqa: E402
from torchtrain.tests.readers import CASES, environment, export_case, read_with  # noqa: E402

FAMILIES = ("llama", "qwen3")
PLACE = MarkedPlace("<!-- made by benchmarks/readers.py -->", "<!-- end -->")


def main() -> None:
    """Export models, read them, print the tables. With --write put the tables between the marks of that file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = {(family, case): Path(temporary, family, case) for family in FAMILIES for case in CASES}
        for (family, case), folder in folders.items():
            export_case(folder, CASES[case], family)
        ours = read_with(sys.executable, folders.values())
        parts = [_notes(folders)]
        for version in ("4.57.3", "4.51.3"):
            if (python := environment(version)) is None:
                raise SystemExit(f"no transformers {version} here: make readers")
            read = read_with(python, folders.values())
            rows = [
                (key, _compare(ours["folders"][str(folder)], read["folders"][str(folder)]))
                for key, folder in folders.items()
            ]
            parts.append(_table(f"transformers {read['version']}, run", ours["version"], rows))
    text = "\n\n".join(parts)
    print(text)
    if arguments.write:
        save(arguments.write, PLACE.put(arguments.write.read_text(encoding="utf-8"), text).encode())


def _table(title: str, version: str, rows: list[tuple[tuple[str, str], tuple[str, ...]]]) -> str:
    lines = [
        f"### {title}",
        "",
        f"Against transformers {version}.",
        "",
        "| RoPE | theta | scaling | length | logits |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join(lines + [f"| {' | '.join((keys, *cells))} |" for cells, keys in _group(rows).items()])


def _group(rows: list[tuple[tuple[str, str], tuple[str, ...]]]) -> dict[tuple[str, ...], str]:
    """Return what is alike of several exports, and which: a type of RoPE, with the family where not all are alike."""
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for key, cells in rows:
        groups.setdefault(cells, []).append(key)
    names = {}
    for cells, keys in groups.items():
        cases = dict.fromkeys(case for _, case in keys)
        whole = [case for case in cases if all((family, case) in keys for family in FAMILIES)]
        names[cells] = "; ".join([*whole, *(f"{case} ({family})" for family, case in keys if case not in whole)])
    return names


def _notes(folders: dict[tuple[str, str], Path]) -> str:
    from transformers import AutoConfig

    lines = ["### What a run says when it exports", "", "| RoPE | note |", "| --- | --- |"]
    notes = [(key, (note,)) for key, at in folders.items() for note in reader_notes(AutoConfig.from_pretrained(at))]
    return "\n".join(lines + [f"| {keys} | {note} |" for (note,), keys in _group(notes).items()])


def _compare(ours: dict[str, Any], read: dict[str, Any]) -> tuple[str, ...]:
    if "error" in read:
        return ("refused", read["error"].replace("|", "/"), "", "")
    same_scaling = all(ours[name] == read[name] for name in ("inv_freq", "attention_scaling", "type"))
    lengths = ("length", "generates_up_to", "tokenizer_length")
    worst = [_worst(ours[name], read[name]) for name in ("within", "beyond")]
    logits = (
        "same bits" if not any(worst) else f"off by {worst[0]:.2g} within, {worst[1]:.2g} beyond the original length"
    )
    return (
        "same" if ours["theta"] == read["theta"] else f"{read['theta']:g} for {ours['theta']:g}",
        "same bits" if same_scaling else "differs",
        "same" if all(ours[name] == read[name] for name in lengths) else "differs",
        logits,
    )


def _worst(ours: list[list[str]], read: list[list[str]]) -> float:
    pairs = ((a, b) for one, other in zip(ours, read, strict=True) for a, b in zip(one, other, strict=True))
    return max(abs(float.fromhex(a) - float.fromhex(b)) for a, b in pairs)


if __name__ == "__main__":
    main()
