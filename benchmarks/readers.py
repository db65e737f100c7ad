"""Make the tables of docs/exports.md: how older transformers and llama.cpp read an export of every RoPE type.

    make readers
    python benchmarks/readers.py [--llama-cpp FOLDER --llama-cpp-version TEXT] [--write docs/exports.md]

FOLDER holds llama.cpp's sources (`convert_hf_to_gguf.py`, `conversion/`, `gguf-py/`); its converter runs in the
environment of transformers 4.57.3. The GGUF is read back and turned into frequencies by llama.cpp's rule, which is
written down below. Logits of a GGUF are not computed. The table of vLLM is written by hand: vLLM is not run.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from anchorline.files import save  # noqa: E402
from anchorline.marked import MarkedPlace  # noqa: E402
from torchtrain.modeling.save import reader_notes  # noqa: E402
from torchtrain.tests.readers import CASES, LENGTH, environment, export_case, read_with  # noqa: E402

FAMILIES = ("llama", "qwen3")
PLACE = MarkedPlace("<!-- made by benchmarks/readers.py -->", "<!-- end -->")

CONVERT = """
import runpy, sys
root = sys.argv[1]
sys.path[:0] = [root, root + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # it knows tokenizers by a hash; this one is a test's
for folder in sys.argv[2:]:
    sys.argv = ["convert", folder, "--outtype", "f32", "--outfile", folder + ".gguf"]
    try:
        runpy.run_path(root + "/convert_hf_to_gguf.py", run_name="__main__")
    except Exception as error:
        open(folder + ".refused", "w").write(f"{type(error).__name__}: {error}")
"""


def main() -> None:
    """Export, read, print; with --write put the tables between the marks of that file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--llama-cpp-version", default="unknown version")
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
            theirs = read_with(python, folders.values())
            rows = [
                (key, _compare(ours["folders"][str(folder)], theirs["folders"][str(folder)]))
                for key, folder in folders.items()
            ]
            parts.append(_table(f"transformers {theirs['version']}, run", ours["version"], rows))
        if arguments.llama_cpp:
            _convert(arguments.llama_cpp, folders.values())
            rows = [
                (key, _compare_gguf(ours["folders"][str(folder)], _read_gguf(folder)))
                for key, folder in folders.items()
            ]
            title = f"llama.cpp's GGUF by its converter ({arguments.llama_cpp_version}), converter run"
            parts.append(_table(title, ours["version"], rows))
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
        "| family | RoPE | theta | scaling | length | logits |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join(lines + [f"| {' | '.join((*key, *cells))} |" for key, cells in rows])


def _notes(folders: dict[tuple[str, str], Path]) -> str:
    from transformers import AutoConfig

    lines = ["### What a run says when it exports", "", "| family | RoPE | note |", "| --- | --- | --- |"]
    for key, folder in folders.items():
        notes = reader_notes(AutoConfig.from_pretrained(folder))
        lines += [f"| {' | '.join(key)} | {note} |" for note in notes]
    return "\n".join(lines)


def _compare(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, ...]:
    if "error" in theirs:
        return ("refused", theirs["error"].replace("|", "/"), "", "")
    same_scaling = all(ours[name] == theirs[name] for name in ("inv_freq", "attention_scaling", "type"))
    lengths = ("length", "generates_up_to", "tokenizer_length")
    worst = [_worst(ours[name], theirs[name]) for name in ("within", "beyond")]
    logits = (
        "same bits" if not any(worst) else f"off by {worst[0]:.2g} within, {worst[1]:.2g} beyond the original length"
    )
    return (
        "same" if ours["theta"] == theirs["theta"] else f"{theirs['theta']:g} for {ours['theta']:g}",
        "same bits" if same_scaling else "differs",
        "same" if all(ours[name] == theirs[name] for name in lengths) else "differs",
        logits,
    )


def _worst(ours: list[list[str]], theirs: list[list[str]]) -> float:
    pairs = ((a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    return max(abs(float.fromhex(a) - float.fromhex(b)) for a, b in pairs)


def _convert(sources: Path, folders: Iterable[Path]) -> None:
    """Run the converter on all folders in one process; NAME.gguf or NAME.refused stands beside each after it."""
    command = [str(environment("4.57.3")), "-c", CONVERT, str(sources), *map(str, folders)]
    subprocess.run(command, capture_output=True, check=True)


def _read_gguf(folder: Path) -> dict[str, Any]:
    import gguf

    target, refused = Path(f"{folder}.gguf"), Path(f"{folder}.refused")
    if refused.is_file():
        return {"error": " ".join(refused.read_text().split())[:200]}
    reader = gguf.GGUFReader(target)
    fields = {name.split(".", 1)[1]: field.contents() for name, field in reader.fields.items() if "." in name}
    tensors = {tensor.name: tensor.data.tolist() for tensor in reader.tensors if tensor.name.startswith("rope_")}
    return {"fields": fields, "tensors": tensors}


def _compare_gguf(ours: dict[str, Any], converted: dict[str, Any]) -> tuple[str, ...]:
    if "error" in converted:
        return ("refused", converted["error"].replace("|", "/"), "", "")
    fields = converted["fields"]
    frequencies, attention = _ggml(fields, converted["tensors"])
    expected = [float.fromhex(x) for x in ours["inv_freq"]]
    worst = max(abs(a / b - 1) for a, b in zip(frequencies, expected, strict=True))
    rounding = 2.0**-23  # both sides are float32 formulas of a handful of operations; 16 roundings and their powers
    same = worst <= 32 * rounding
    off = max(max(a / b, b / a) for a, b in zip(frequencies, expected, strict=True))
    scaling = "same" if same else f"frequencies off by up to {off:.3g} times"
    if ours["type"] == "dynamic":
        # What was read is at the last position, the model's length, up to which dynamic is unscaled.
        scaling += " up to its length, unscaled beyond"
    if abs(attention - ours["attention_scaling"]) > 32 * rounding:
        scaling += f"; attention factor {attention:.4g} for {ours['attention_scaling']:.4g}"
    theta = fields["rope.freq_base"]
    same_theta = abs(theta / ours["theta"] - 1) <= rounding
    same_length = fields["context_length"] == ours["length"] == LENGTH
    return ("same" if same_theta else f"{theta:g}", scaling, "same" if same_length else "differs", "not run")


def _ggml(fields: dict[str, Any], tensors: dict[str, list[float]]) -> tuple[list[float], float]:
    """Frequencies and attention factor by llama.cpp's rule: ggml-cpu's `rope_yarn`, llama-context.cpp's factors."""
    d, base = fields.get("rope.dimension_count") or fields["attention.key_length"], fields["rope.freq_base"]
    kind, factor = fields.get("rope.scaling.type", "none"), fields.get("rope.scaling.factor", 1.0)
    per_pair = tensors.get("rope_freqs.weight", [1.0] * (d // 2))
    plain = [base ** (-2 * i / d) / per_pair[i] for i in range(d // 2)]
    attention = fields.get("rope.scaling.attn_factor", 1.0)
    if kind == "linear":
        return [x / factor for x in plain], attention
    if kind != "yarn":
        return plain, attention
    original = fields["rope.scaling.original_context_length"]
    fast, slow = fields.get("rope.scaling.yarn_beta_fast", 32.0), fields.get("rope.scaling.yarn_beta_slow", 1.0)

    def place(beta: float) -> float:
        return d * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(place(fast))), min(d - 1, math.ceil(place(slow)))
    ramp = [1 - min(1, max(0, (i - low) / max(0.001, high - low))) for i in range(d // 2)]
    mixed = [x / factor * (1 - r) + x * r for x, r in zip(plain, ramp, strict=True)]
    return mixed, attention * (1 + 0.1 * math.log(factor))


if __name__ == "__main__":
    main()
