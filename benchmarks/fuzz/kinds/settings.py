"""Configurations and overrides."""

import json
import random
from pathlib import Path

import yaml

from benchmarks.fuzz.damage import damage_file, damage_tree
from benchmarks.fuzz.inputs import Input
from benchmarks.fuzz.values import VALUES, value_text


def config(random: random.Random, folder: Path) -> Input:
    """A damaged configuration of any of the commands."""
    command, arguments = random.choice(
        [
            ("torchtrain", ["config", "config.yaml"]),
            ("torchtrain", ["plan", "config.yaml"]),
            ("torchtrain", ["train", "config.yaml"]),
            ("jaxref", ["study", "study.yaml", "--out", "out"]),
            ("parity", ["run", "gate.yaml", "--out", "out"]),
        ]
    )
    path = folder / arguments[1]
    if random.random() < 0.25:
        return Input(command, arguments, about=damage_file(random, path))
    tree = yaml.safe_load(path.read_text())
    done = [damage_tree(random, tree) for _ in range(random.choice([1, 1, 1, 2]))]
    if random.random() < 0.3:  # an optional one
        section = random.choice(list(tree)) if tree else "run"
        if isinstance(tree.get(section), dict):
            key = random.choice(sorted(_fields()))
            tree[section][key] = random.choice(VALUES)
            done.append(f"{section}.{key} given")
    try:
        path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    except (yaml.YAMLError, UnicodeError):
        path.write_text(json.dumps(tree))
    return Input(command, arguments, about="; ".join(done))


def _fields() -> set[str]:
    from torchtrain.config import Config

    return {
        name for section in Config.model_fields.values() for name in getattr(section.annotation, "model_fields", ())
    }


def override(random: random.Random, folder: Path) -> Input:
    """Overrides of any kind."""
    from parity_tests.gate.spec import GateConfig
    from ropestudy.spec import StudyConfig
    from torchtrain.config import Config

    command, arguments, schema = random.choice(
        [
            ("torchtrain", ["plan", "config.yaml"], Config),
            ("torchtrain", ["config", "config.yaml"], Config),
            ("torchtrain", ["train", "config.yaml"], Config),
            ("jaxref", ["study", "study.yaml", "--out", "out"], StudyConfig),
            ("parity", ["run", "gate.yaml"], GateConfig),
        ]
    )
    given = []
    for _ in range(random.choice([1, 1, 2])):
        kind, names = schema, []
        while hasattr(kind, "model_fields"):
            name = random.choice(list(kind.model_fields))
            names.append(name)
            annotation = kind.model_fields[name].annotation
            inner = [a for a in getattr(annotation, "__args__", ()) if hasattr(a, "model_fields")]
            kind = inner[0] if inner else annotation
            if str(annotation).startswith("list"):
                names.append(random.choice(["0", "0", "0", "1", "-1", "x"]))
        if random.random() < 0.1:
            names[random.randrange(len(names))] = random.choice(["", "x", "é", "0", "\ud800"])
        given.append(f"{'.'.join(names)}={value_text(random)}")
    if random.random() < 0.05:
        given.append(random.choice(["", "=", "x", ".=", "a.b", "\0=1", "." * 3000 + "=1"]))
    return Input(command, [*arguments, *given], about="overrides")
