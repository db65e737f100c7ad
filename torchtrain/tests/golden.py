"""Losses of tiny runs that no refactoring may move by a bit, by kernels that are alike on every x86-64.

    python -m torchtrain.tests.golden           # compare; exit code 1 where a bit moved
    python -m torchtrain.tests.golden --write   # after a change that is meant to move them: say so in its commit

They depend on PyTorch's version, too: golden_losses.json names the one it was made with.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "golden_losses.json"
# Before anything is imported: MKL's, PyTorch's and oneDNN's code for the oldest processor, and one thread.
ENVIRONMENT = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
RUNS: dict[str, list[str]] = {
    "anchor": [],
    "tags interleaved": ["pack.variant=anchor+tag+interleave", "train.weight_decay=0.1", "train.schedule=cosine"],
    "documents apart": ["pack.variant=intra_reset", "train.micro_batch=1", "train.clip_norm=0.1"],
    "dense, bfloat16": ["model.attention=dense", "model.dtype=bfloat16", "pack.variant=full"],
    "yarn, checkpointing": ["rope.type=yarn", "rope.theta=keep", "model.activation_checkpointing=true"],
}


def measure() -> dict[str, Any]:
    """Return what golden_losses.json must hold, computed by a process of its own."""
    command = [sys.executable, "-c", "from torchtrain.tests import golden; golden.print_losses()"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def print_losses() -> None:
    """Train, and print every loss and gradient norm as it stands in metrics.jsonl."""
    import torch
    import yaml
    from rich.console import Console

    from torchtrain import products
    from torchtrain.config import load_config
    from torchtrain.run import recipe
    from torchtrain.tests.tiny import tiny_model, tiny_settings, tiny_tokenizer, write_corpus

    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    products.chooses_float32 = lambda: False  # a measurement of this machine must not decide
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny_model().save_pretrained(folder / "source")
        tiny_tokenizer().save_pretrained(folder / "source")
        corpus = write_corpus(folder / "documents.jsonl")
        (folder / "config.yaml").write_text(yaml.safe_dump(tiny_settings(folder, folder / "source", corpus)))
        for number, (name, overrides) in enumerate(RUNS.items()):
            run = folder / f"run{number}"
            recipe.train(
                load_config(folder / "config.yaml", [f"run.folder={run}", "train.steps=6", *overrides]),
                console=Console(quiet=True),
            )
            events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            found[name] = [
                [event["event"], event["step"], event["loss"], event.get("gradient_norm")] for event in events
            ]
    print(json.dumps({"torch": torch.__version__.partition("+")[0], "machine": platform.machine(), "runs": found}))


def main() -> None:
    """Compare or write."""
    found = measure()
    if "--write" in sys.argv[1:]:
        lines = (
            f"  {json.dumps(name)}: [\n    " + ",\n    ".join(map(json.dumps, events)) + "\n  ]"
            for name, events in found.pop("runs").items()
        )
        head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in found.items())
        FILE.write_text("{\n" + head + ' "runs": {\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
    elif found != json.loads(FILE.read_text(encoding="utf-8")):
        raise SystemExit("a loss moved")


if __name__ == "__main__":
    main()
