"""Options, paths, and variables of the environment."""

import json
import random
from pathlib import Path

from benchmarks.fuzz.inputs import Input
from benchmarks.fuzz.values import PATHS, TEXTS
from parity_tests.commands import load_apps

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("COLUMNS", "TERM", "LANG", "HF_HOME"),
)


def option(random: random.Random, folder: Path) -> Input:
    """Options and arguments of any verb, with values of any kind."""
    import typer

    command = random.choice(["torchtrain", "jaxref", "parity"])
    group = typer.main.get_command(load_apps()[command])
    name = random.choice(sorted(group.commands))  # type: ignore[attr-defined]
    verb = group.commands[name]  # type: ignore[attr-defined]
    file = {"torchtrain": "config.yaml", "jaxref": "study.yaml", "parity": "gate.yaml"}[command]
    first: dict[str, list[str]] = {
        **{verb: [file] for verb in ("train", "plan", "config", "study", "zoo")},
        **{verb: ["run"] for verb in ("resume", "status", "verify")},
        "convert": ["model", "new"],
        "diff": ["a.json", "b.json"],
        "check": ["examples.check:f"],
        "ring": ["--model", "model", "--tokens", "16", "--ranks", "1,2", "--text", "text.jsonl"],
    }
    arguments = [name, *first.get(name, [])]
    if name == "run" and random.random() < 0.7:
        arguments += ["--tokens", "48"]
    if name == "zoo":
        arguments += ["no_such_bug"]  # one that runs takes minutes
    options = [one for one in verb.params if one.param_type_name == "option" and one.name != "help"]
    for parameter in random.sample(options, min(len(options), random.choice([1, 1, 2]))):
        switch = random.choice(parameter.opts)
        arguments.append(switch)
        if not getattr(parameter, "is_flag", False):
            arguments.append(random.choice([*TEXTS, *PATHS] if random.random() < 0.5 else TEXTS))
    if random.random() < 0.15 and len(arguments) > 1:
        arguments[1] = random.choice(PATHS)
    if random.random() < 0.05:
        arguments.insert(random.randrange(len(arguments) + 1), random.choice([*TEXTS, *PATHS]))
    return Input(command, arguments, about="options")


def place(random: random.Random, folder: Path) -> Input:
    """Paths of any kind, wherever one is taken."""
    path = random.choice(PATHS)
    written = json.dumps(path)
    command, arguments = random.choice(
        [
            ("torchtrain", ["train", "config.yaml", f"run.folder={written}"]),
            ("torchtrain", ["train", "config.yaml", f"data.cache={written}"]),
            ("torchtrain", ["train", "config.yaml", f"model.source={written}"]),
            ("torchtrain", ["train", "config.yaml", f"data.sources.0.files={written}"]),
            ("torchtrain", ["plan", "config.yaml", f"model.source={written}"]),
            ("torchtrain", ["plan", "config.yaml", "--measured", path]),
            ("torchtrain", ["train", path]),
            ("torchtrain", ["resume", path]),
            ("torchtrain", ["status", path]),
            ("torchtrain", ["verify", path]),
            ("jaxref", ["study", "study.yaml", "--out", path]),
            ("jaxref", ["study", "study.yaml", f"model.source={written}"]),
            ("jaxref", ["study", "study.yaml", f"text.source={written}"]),
            ("jaxref", ["mask", "--png", path]),
            ("jaxref", ["rope", "--config", path]),
            ("jaxref", ["ring", "--model", path]),
            ("jaxref", ["convert", path, "new"]),
            ("jaxref", ["convert", "model", path]),
            ("jaxref", ["convert", "orbax", path]),
            ("parity", ["run", path]),
            ("parity", ["run", "gate.yaml", "--out", path]),
            ("parity", ["run", "--model", path]),
            ("parity", ["run", "--model", "model", "--against", path]),
            ("parity", ["diff", path, path]),
            ("parity", ["zoo", path]),
            ("parity", ["zoo", "gate.yaml", "no_such_bug", "--table", path]),
            ("parity", ["check", path]),
            ("parity", ["check", f"{path}.py:f"]),
        ]
    )
    return Input(command, arguments, about="paths")


def environment(random: random.Random, folder: Path) -> Input:
    """Variables that torchrun and others set."""
    words = [text for text in TEXTS if "\0" not in text and "\ud800" not in text]
    words += ["256.1.1.1", "no.such.invalid", "127.0.0.1"]
    given = {name: random.choice(words)[:200] for name in random.sample(VARIABLES, random.choice([1, 2, 3]))}
    if given.get("WORLD_SIZE", "1") not in ("1", "0", "-1") and given.get("WORLD_SIZE", "").isdecimal():
        given["MASTER_PORT"] = "x"  # others that never come are waited for
    command, arguments = random.choice(
        [
            ("torchtrain", ["train", "config.yaml"]),
            ("torchtrain", ["plan", "config.yaml"]),
            ("torchtrain", ["config", "none.yaml"]),
            ("jaxref", ["mask"]),
            ("parity", ["run", "gate.yaml"]),
        ]
    )
    return Input(command, arguments, given, about="environment")
