"""Damage what a user gives to the commands, thousands of times, and count tracebacks and hangs: both must be zero.

Each input is drawn from (seed, number) alone: valid files are made once, one of them (or an option, an override, a variable of
the environment) is damaged, and a command runs on it in a forked process with a time limit. `benchmarks/fuzz.sh` says how to
run it; its exit code is 1 if anything was found.
"""

import argparse
import collections
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from parity_tests.commands import load_apps

SECONDS = 120.0  # for one input; the slowest that is right takes ten on an idle machine
GIBIBYTES = 16  # of addresses, so that a size that was not bounded fails and not the machine
GOOD_CODES = {0, 1, 2}  # done, a verdict of "no", a mistake


@dataclass
class Input:
    """One command on damaged files: what `run` needs, and what a person needs to see."""

    command: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    about: str = ""


Make = Callable[[random.Random, Path], Input]

# -- values -------------------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        "",
        " ",
        "x",
        "auto",
        "keep",
        "12:30",
        "é",
        "\U0001f680",
        "a\nb",
        "\x85",
        "\x1b[31m",
        "{domain}",
        "%s",
    ),
    *(0, 1, -1, 2, 3, 7, 1000, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 10**15, 10**18, 10**25, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-9, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")),
    *([], {}, [1], [[]], ["x"], {"a": 1}, {"": 1}, [1.5] * 40, ["x"] * 3000, {"rope_type": "yarn"}, {"rope_type": "x"}),
    *("x" * 300, "x" * 5000, "nul\0", "half \ud800"),
]
PATHS = [
    *(
        "",
        ".",
        "..",
        "/proc/x",
        "/dev/null/x",
        "/sys/x",
        "/proc/self/mem",
        "/dev/zero",
        "~nobody-at-all",
        "no/such",
        "a//b/../c",
    ),
    *(
        "x" * 300,
        "y/" * 2500,
        "a\0b",
        "a\ud800b",
        "a\nb",
        "é",
        "-x",
        "--x",
        "config.yaml",
        "loop",
        "pipe",
        "dangling",
        "model",
    ),
]
TEXTS = [
    *(
        "",
        "0",
        "1",
        "-1",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "5e-324",
        "1e308",
        "9" * 25,
        "9" * 5000,
        "0x10",
        "1_0",
        "x",
        "é",
        "١",
    ),
    *(
        "a,b",
        ",",
        "1,2",
        "1,",
        "1,-1",
        "0,0",
        "1," * 3000 + "1",
        "99999999999999999999",
        "anchor",
        "full+tag",
        "+",
        "x" * 5000,
    ),
    *(
        "yarn",
        "llama3",
        "longrope",
        "linear",
        "ntk",
        "dynamic",
        "a\0b",
        "\ud800",
        "\n",
        "paper-32k",
        "smollm2",
        "bfloat16",
    ),
]
YAML_TEXTS = [
    *(
        "[",
        "{",
        "!!int ''",
        "!!timestamp abc",
        "!!python/name:os.system",
        "&a [*a]",
        "*a",
        "{[1]: 2}",
        "{a: 1, a: 2}",
        "|",
        ">",
    ),
    *(
        "2026-11-30",
        "12:30",
        "0x_",
        "09",
        ".inf",
        "-.inf",
        ".nan",
        "~",
        "<<: 1",
        "[" * 3000,
        "'",
        '"\\ud800"',
        '"\\0"',
        "%x",
        "@",
    ),
]


def damage_tree(random: random.Random, tree: Any) -> str:
    """Change one place of a tree of dicts and lists; return what was done."""
    places: list[tuple[Any, Any, str]] = []

    def walk(node: Any, name: str) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            places.append((node, key, f"{name}.{key}"))
            if not (isinstance(value, list | dict) and len(value) > 40):  # a vocabulary would be all that is ever drawn
                walk(value, f"{name}.{key}")

    walk(tree, "")
    node, key, name = random.choice(places)
    how = random.randrange(8)
    if how == 0:
        del node[key]
        return f"{name} removed"
    if how == 1 and isinstance(node, dict):
        node[random.choice(["x", "", "é", f"{key}_", str(key).upper(), "half \ud800"])] = node.pop(key)
        return f"{name} renamed"
    value = random.choice(VALUES)
    old = node[key]
    if how == 2 and isinstance(old, int | float):
        value = random.choice([-old, old + 1, old * 2, old * 1000, old - 1, old + 0.5, str(old), [old]])
    node[key] = value
    return f"{name} = {value!r:.80}"


def damage_bytes(random: random.Random, content: bytes) -> tuple[bytes, str]:
    """Change bytes somewhere."""
    at = random.randrange(len(content) + 1)
    how = random.randrange(7)
    if how == 0:
        return content[:at], f"cut at {at}"
    if how == 1:
        return b"", "emptied"
    if how == 2 and content:
        at = min(at, len(content) - 1)
        return content[:at] + bytes([content[at] ^ (1 << random.randrange(8))]) + content[
            at + 1 :
        ], f"a bit flipped at {at}"
    if how == 3:
        inserted = random.choice(
            [b"\0", b"\xff", b"\n", b"[" * 3000, b'"', b"{", b"9" * 5000, b"\xf0\x9f\x9a\x80", b"\xed\xa0\x80"]
        )
        return content[:at] + inserted + content[at:], f"{inserted[:8]!r} inserted at {at}"
    if how == 4:
        end = min(len(content), at + random.randrange(1, 200))
        return content[:at] + content[end:], f"{at} to {end} removed"
    if how == 5:
        end = min(len(content), at + random.randrange(1, 200))
        return content[:end] + content[at:], f"{at} to {end} twice"
    noise = random.randbytes(random.randrange(1, 64))
    return content[:at] + noise + content[at + len(noise) :], f"{len(noise)} random bytes at {at}"


def damage_file(random: random.Random, path: Path) -> str:
    """Damage a file: its content, or what it is."""
    how = random.randrange(12)
    if how == 0:
        path.unlink()
        return f"{path.name}: removed"
    if how == 1:
        path.unlink()
        kind = random.choice(["a pipe", "a folder", "a link to nothing", "a link to itself", "a link to /dev/zero"])
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        else:
            path.symlink_to(
                {"nothing": "/no/such", "itself": path.name, "/dev/zero": "/dev/zero"}[kind.split(" to ")[1]]
            )
        return f"{path.name}: {kind}"
    if path.suffix == ".json" and how < 9:
        tree = json.loads(path.read_text())
        box = {"whole": tree} if random.random() < 0.05 else tree
        if isinstance(box, dict | list) and box:
            done = damage_tree(random, box)
            path.write_text(json.dumps(box["whole"] if box is not tree else tree))
            return f"{path.name}: {done}"
    if path.suffix == ".jsonl" and how < 9:
        lines = path.read_text().splitlines()
        number = random.randrange(len(lines))
        tree = json.loads(lines[number])
        done = damage_tree(random, tree)
        lines[number] = json.dumps(random.choice([tree, tree, tree, [tree], None, 5]))
        path.write_text("\n".join(lines) + "\n")
        return f"{path.name}:{number + 1}: {done}"
    content, done = damage_bytes(random, path.read_bytes())
    path.write_bytes(content)
    return f"{path.name}: {done}"


def value_text(random: random.Random) -> str:
    """Return a value as YAML, or what is none."""
    if random.random() < 0.3:
        return random.choice(YAML_TEXTS)
    if random.random() < 0.3:
        return random.choice(PATHS)
    value = random.choice(VALUES)
    try:
        return yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n...\n").strip()
    except yaml.YAMLError:
        return str(value)


# -- valid files --------------------------------------------------------------------------------------------------------------

GATE = {
    "title": "t",
    "seeds": [0],
    "matrix": [{"model": "llama", "tokens": 48, "dtype": "float32", "stages": ["forward"]}],
}
STUDY = {
    "title": "t",
    "model": {"source": "model"},
    "text": {"source": "text.jsonl"},
    "lengths": {"contestants": [{"condition": "flash_bf16"}], "lengths": [8], "sequences": 1, "columns": [0]},
}
TRAIN = {
    "run": {"folder": "run", "seed": 3},
    "model": {"source": "model", "dtype": "float32", "attention": "sdpa"},
    "rope": {"type": "keep", "theta": 50_000.0},
    "data": {
        "sources": [{"files": "text.jsonl", "domain_field": "domain", "max_documents": 40}],
        "cache": "cache",
        "held_out_share": 0.2,
        "min_tokens": 1,
        "bad_record_share": 0.1,
    },
    "pack": {"sequence_length": 32, "variant": "anchor", "anchor": "auto", "chunks": 2},
    "train": {
        "steps": 1,
        "sequences_per_step": 1,
        "micro_batch": 1,
        "learning_rate": 0.01,
        "loss_chunk": 16,
        "betas": [0.9, 0.95],
    },
    "distributed": {"sequence_parallel": 1, "zero_stage": 0, "offload": "none"},
    "held_out": {"sequences": 1},
    "save": {"every": 1, "keep": 2},
}


def make_files(folder: Path, kinds: set[str]) -> None:
    """Make what the inputs start from: a model, text, configurations; a run with a checkpoint and tokens where asked for."""
    from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

    tiny_model(num_hidden_layers=1).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    lines = [{"text": f"{n} " + "abcdefgh " * (n % 5 + 1), "domain": "ab"[n % 2], "meta": {"id": n}} for n in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, tree in (("config.yaml", TRAIN), ("gate.yaml", GATE), ("study.yaml", STUDY)):
        (folder / name).write_text(yaml.safe_dump(tree, sort_keys=False))
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    if "records" in kinds:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), folder / "text.parquet")
    if kinds & {"store", "run", "checkpoint"}:
        ended = run(Input("torchtrain", ["train", "config.yaml", "train.steps=3", "save.last=2"]), folder, 10 * SECONDS)
        assert ended.good, ended.said


# -- kinds of inputs: each damages a copy of the valid files, and names the command -------------------------------------------


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
        **{verb: ["run"] for verb in ("resume", "status")},
        "run": [],
        "diff": ["a.json", "b.json"],
        "check": ["examples.check:f"],
        "ring": ["--model", "model", "--tokens", "16", "--ranks", "1,2", "--text", "text.jsonl"],
    }
    arguments = [name, *first.get(name, [])]
    if name == "run" and random.random() < 0.7:
        arguments += ["--tokens", "48"]
    if name == "zoo":
        arguments += ["no_such_bug"]  # one that runs takes minutes
    options = [
        parameter for parameter in verb.params if parameter.param_type_name == "option" and parameter.name != "help"
    ]
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
            ("jaxref", ["study", "study.yaml", "--out", path]),
            ("jaxref", ["study", "study.yaml", f"model.source={written}"]),
            ("jaxref", ["study", "study.yaml", f"text.source={written}"]),
            ("jaxref", ["mask", "--png", path]),
            ("jaxref", ["rope", "--config", path]),
            ("jaxref", ["ring", "--model", path]),
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


def model(random: random.Random, folder: Path) -> Input:
    """A damaged folder of a model."""
    files = sorted(path for path in (folder / "model").iterdir() if path.is_file())
    weights = folder / "model" / "model.safetensors"
    if random.random() < 0.15:  # in shards
        weights.rename(folder / "model" / "model-00001-of-00001.safetensors")
        from safetensors import safe_open

        with safe_open(folder / "model" / "model-00001-of-00001.safetensors", framework="np") as opened:
            names = dict.fromkeys(opened.keys(), "model-00001-of-00001.safetensors")
        index = folder / "model" / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
        files = [index]
    elif random.random() < 0.05:
        weights.rename(folder / "model" / "pytorch_model.bin")
        files = [folder / "model" / "pytorch_model.bin"]
    by_name = {"config.json": 5, "tokenizer.json": 2, "tokenizer_config.json": 2}
    path = random.choices(files, [by_name.get(path.name, 1) for path in files])[0]
    done = damage_file(random, path)
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


def records(random: random.Random, folder: Path) -> Input:
    """Damaged text."""
    name = random.choice(["text.jsonl", "text.parquet"])
    done = damage_file(random, folder / name)
    command, arguments = random.choice(
        [
            ("torchtrain", ["train", "config.yaml", f"data.sources.0.files={name}"]),
            ("torchtrain", ["train", "config.yaml", f"data.sources.0.files={name}", "data.bad_record_share=1.0"]),
            ("jaxref", ["study", "study.yaml", f"text.source={name}", "--out", "out"]),
        ]
    )
    return Input(command, arguments, about=done)


def store(random: random.Random, folder: Path) -> Input:
    """Damaged tokens."""
    files = sorted(path for path in (folder / "cache").rglob("*") if path.is_file())
    done = damage_file(random, random.choice(files))
    return Input("torchtrain", ["train", "config.yaml", "run.folder=another"], about=done)


def run_folder(random: random.Random, folder: Path) -> Input:
    """A damaged folder of a run."""
    top = [path for path in (folder / "run").iterdir() if path.is_file()]
    files = sorted(random.choice([top, [path for path in (folder / "run").rglob("*") if path.is_file()]]))
    done = damage_file(random, random.choice(files))
    if random.random() < 0.5:
        (folder / "run" / "loss.png").unlink(missing_ok=True)
        done += "; loss.png removed"
    return Input("torchtrain", random.choice(_ON_A_RUN), about=done)


def checkpoint(random: random.Random, folder: Path) -> Input:
    """A damaged checkpoint, of a run that was interrupted."""
    (folder / "run" / "loss.png").unlink(missing_ok=True)
    files = sorted(path for path in (folder / "run" / "checkpoints").rglob("*") if path.is_file())
    done = damage_file(random, random.choice(files))
    return Input("torchtrain", random.choice(_ON_A_RUN), about=done)


_ON_A_RUN = [
    ["status", "run"],
    ["status", "run"],
    ["resume", "run"],
    ["resume", "run", "--step", "2"],
    ["train", "config.yaml", "train.steps=2"],
    ["train", "config.yaml", "--replace"],
    ["plan", "config.yaml", "--measured", "run"],
]


def environment(random: random.Random, folder: Path) -> Input:
    """Variables that torchrun and others set."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "COLUMNS",
        "TERM",
        "LANG",
        "HF_HOME",
    )
    values = [
        text
        for text in (*TEXTS, "256.1.1.1", "no.such.invalid", "127.0.0.1")
        if "\0" not in text and "\ud800" not in text
    ]
    given = {name: random.choice(values)[:200] for name in random.sample(names, random.choice([1, 2, 3]))}
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


KINDS: dict[str, Make] = {
    "config": config,
    "override": override,
    "option": option,
    "place": place,
    "model": model,
    "records": records,
    "store": store,
    "run": run_folder,
    "checkpoint": checkpoint,
    "environment": environment,
}


# -- running ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How an input ended."""

    why: str  # empty if it ended as it should
    said: str
    seconds: float

    @property
    def good(self) -> bool:
        """Whether it ended as it should."""
        return not self.why


def run(given: Input, folder: Path, seconds: float) -> Ended:
    """Run a command in a process of its own, which dies with all it started after so many seconds."""
    started, log = time.monotonic(), folder.parent / "said"
    child = os.fork()
    if not child:
        _be_the_command(given, folder, log)
    code = None
    while code is None and time.monotonic() - started < seconds:
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        if code is None:
            time.sleep(0.01)
    if code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = log.read_text(errors="backslashreplace")
    why = ""
    if code is None:
        why = f"hangs: no end after {seconds:g} s"
    elif code not in GOOD_CODES:
        why = f"exit code {code}"
    elif "Traceback (most recent call last)" in said:
        why = "a traceback"
    elif (
        code == 2
        and not any(line.startswith(f"{given.command}: ") for line in said.splitlines())
        and "Usage" not in said
    ):
        why = "exit code 2 without a line that says why"
    elif len(said) > 20_000:
        why = f"{len(said):,} characters of output"
    return Ended(why, said, time.monotonic() - started)


def _be_the_command(given: Input, folder: Path, log: Path) -> None:
    code = 99
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.chdir(folder)
        os.environ.update(given.environment)
        limit = GIBIBYTES * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
        try:
            load_apps()[given.command](args=given.arguments)
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 98
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def try_one(
    seed: int, number: int, kinds: list[str], valid: Path, seconds: float, quick: bool
) -> tuple[Input, Ended, Path]:
    """Draw an input from (seed, number) and run it in a copy of the valid files."""
    drawn = random.Random(f"{seed} {number}")
    while True:
        kind = drawn.choice(kinds)
        # Deep enough that what climbs out of it stays in what is thrown away.
        folder = Path(tempfile.mkdtemp(dir=valid.parent)) / "a" / "b" / "work"
        shutil.copytree(valid, folder, symlinks=True, copy_function=_copy)
        given = KINDS[kind](drawn, folder)
        given.about = f"{kind}: {given.about}"
        if not quick or not given.arguments or (given.command, given.arguments[0]) in _QUICK:
            return given, run(given, folder, seconds), folder
        shutil.rmtree(folder.parents[2])


_QUICK = {("torchtrain", verb) for verb in ("plan", "config", "status")} | {
    ("jaxref", "mask"),
    ("jaxref", "rope"),
    ("parity", "diff"),
}


def _copy(source: str, target: str) -> None:
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy2(source, target)


_IMPORTED = (
    *("transformers", "jaxref.mask_figure", "jaxref.ring", "ropestudy.report", "ropestudy.run"),
    *("parity_tests.check", "parity_tests.gate.run", "parity_tests.gate.weights", "parity_tests.zoo.run"),
    *("torchtrain.run.recipe", "torchtrain.planning.budget", "torchtrain.run.status"),
)


def main() -> int:
    """Run the inputs; return 1 if one of them found a fault."""
    parser = argparse.ArgumentParser(description="Count tracebacks and hangs on damaged inputs.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--only", type=int, default=None, help="number of a single input, whose folder is kept")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one input")
    parser.add_argument("--quick", action="store_true", help="only commands that neither train nor compile")
    parser.add_argument("--slow", type=float, default=60.0, help="inputs that take longer are named")
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }

    # What children need is imported once. None of it may start threads before a fork.
    import torch

    torch.set_num_threads(1)
    load_apps()
    for name in _IMPORTED:
        importlib.import_module(name)

    top = Path(tempfile.mkdtemp(prefix="fuzz-"))
    valid = top / "valid"
    valid.mkdir()
    make_files(valid, set(kinds))
    counts: collections.Counter[str] = collections.Counter()
    numbers = [given.only] if given.only is not None else range(given.first, given.first + given.count)
    started = time.monotonic()
    try:
        for number in numbers:
            drawn, ended, folder = try_one(given.seed, number, kinds, valid, given.seconds, given.quick)
            counts["inputs"] += 1
            counts[drawn.about.partition(":")[0]] += 1
            if given.only is not None or not ended.good or ended.seconds > given.slow:
                again = f"benchmarks/fuzz.sh --seed {given.seed} --only {number}"
                again += " --quick" if given.quick else ""
                again += "" if given.kinds == ",".join(KINDS) else f" --kinds {given.kinds}"
                print(f"{number}: {ended.why or 'right'} ({ended.seconds:.1f} s)\n  {again}\n  {drawn.about}")
                print(
                    f"  {drawn.environment or ''} {drawn.command} {' '.join(repr(argument)[:300] for argument in drawn.arguments)}"
                )
                print("".join(f"    {line[:300]}\n" for line in ended.said.splitlines()[-8:]), end="", flush=True)
            counts["faults"] += not ended.good
            if given.only is not None:
                print(f"  kept in {folder}")
                return int(not ended.good)
            shutil.rmtree(folder.parents[2])
            if counts["inputs"] % 100 == 0:
                print(f"{number}: {counts['faults']} faults in {time.monotonic() - started:.0f} s", flush=True)
    finally:
        if given.only is None:
            shutil.rmtree(top, ignore_errors=True)
    print(f"{dict(counts)} in {time.monotonic() - started:.0f} s")
    return int(counts["faults"] > 0)


if __name__ == "__main__":
    sys.exit(main())
