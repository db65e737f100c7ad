"""Folders of models, text, tokens, runs and checkpoints."""

import json
import random
from pathlib import Path

from benchmarks.fuzz.damage import damage_file, damage_folder
from benchmarks.fuzz.inputs import Input
from benchmarks.fuzz.values import PATHS


def model(random: random.Random, folder: Path) -> Input:
    """A damaged folder of a model."""
    done = _damage_model(random, folder / "model")
    command, arguments = random.choice(
        [
            ("torchtrain", ["plan", "config.yaml"]),
            ("torchtrain", ["train", "config.yaml"]),
            ("torchtrain", ["train", "config.yaml"]),
            ("jaxref", ["rope", "--config", "model/config.json"]),
            ("jaxref", ["study", "study.yaml", "--out", "out"]),
            ("parity", ["run", "--model", "model", "--tokens", "48", "--dtype", "float32"]),
        ]
    )
    return Input(command, arguments, about=done)


def convert(random: random.Random, folder: Path) -> Input:
    """A damaged folder of Hugging Face or of Orbax, to be converted into the other."""
    name = random.choice(["model", "orbax", "orbax"])
    if name == "model":
        done = _damage_model(random, folder / name)
    else:
        done = ""
        if random.random() < 0.5:  # with the list of its files the first look at them ends it
            (folder / name / "files.json").unlink()
            done = "files.json removed; "
        done += damage_folder(random, folder / name)
    target = "new"
    if random.random() < 0.2:
        target = random.choice([*PATHS, f"{name}/new", "model/new", "./new/", "new/."])
    return Input("jaxref", ["convert", name, target], about=done, made="new" if target == "new" else "")


def _damage_model(random: random.Random, folder: Path) -> str:
    """Damage a file of a Hugging Face folder, more often one that says more; now and then after it is cut in shards."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    weights = folder / "model.safetensors"
    if random.random() < 0.15:
        shard = weights.rename(folder / "model-00001-of-00001.safetensors")
        from safetensors import safe_open

        with safe_open(shard, framework="np") as opened:
            names = dict.fromkeys(opened.keys(), shard.name)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
        files = [index]
    elif random.random() < 0.05:
        files = [weights.rename(folder / "pytorch_model.bin")]
    by_name = {"config.json": 5, "tokenizer.json": 2, "tokenizer_config.json": 2}
    return damage_file(random, random.choices(files, [by_name.get(path.name, 1) for path in files])[0])


def records(random: random.Random, folder: Path) -> Input:
    """Damaged text."""
    name = random.choice(["text.jsonl", "text.parquet"])
    done = damage_file(random, folder / name)
    read = ["train", "config.yaml", f"data.sources.0.files={name}"]
    command, arguments, refused = random.choice(
        [
            ("torchtrain", read, False),
            ("torchtrain", [*read, "data.bad_record_share=1.0"], False),
            ("torchtrain", [*read, "data.min_tokens=1000"], True),  # all is read, and nothing is long enough
            ("jaxref", ["study", "study.yaml", f"text.source={name}", "--out", "out"], False),
        ]
    )
    return Input(command, arguments, about=done, refused=refused)


def store(random: random.Random, folder: Path) -> Input:
    """Damaged tokens."""
    done = damage_folder(random, folder / "cache")
    arguments = random.choice([["train", "config.yaml", "run.folder=another"], ["verify", "run"]])
    return Input("torchtrain", arguments, about=done)


def run_folder(random: random.Random, folder: Path) -> Input:
    """A damaged folder of a run."""
    top = sorted(path for path in (folder / "run").iterdir() if path.is_file())
    whole = random.random() < 0.5
    done = damage_folder(random, folder / "run") if whole else damage_file(random, random.choice(top))
    if random.random() < 0.5:
        (folder / "run" / "loss.png").unlink(missing_ok=True)
        done += "; loss.png removed"
    return Input("torchtrain", random.choice(_ON_A_RUN), about=done)


def checkpoint(random: random.Random, folder: Path) -> Input:
    """A damaged checkpoint, of a run that was interrupted."""
    (folder / "run" / "loss.png").unlink(missing_ok=True)
    return Input("torchtrain", random.choice(_ON_A_RUN), about=damage_folder(random, folder / "run" / "checkpoints"))


_ON_A_RUN = [
    ["status", "run"],
    ["status", "run"],
    ["verify", "run"],
    ["resume", "run"],
    ["resume", "run", "--step", "2"],
    ["train", "config.yaml", "train.steps=2"],
    ["train", "config.yaml", "--replace"],
    ["plan", "config.yaml", "--measured", "run"],
]
