"""The inputs of `benchmarks.fuzz`: valid files, and kinds of input. Each kind damages a copy and names a command."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from parity_tests.commands import load_apps

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 10**18, 10**400),
    *(0.0, 0.5, -1.5, 1e-9, 5e-324, 1e308, float("inf"), float("nan")),
    *("", " ", "x", "auto", "12:30", "é", "{domain}", "%s", "x" * 300, "a\nb", "\x1b[31m", "nul\0", "half \ud800"),
    *([], {}, [1], [[]], {"a": 1}, {"": 1}, ["x"] * 3000, {"rope_type": "yarn"}),
]
PATHS = [
    *("", ".", "..", "/dev/null/x", "/proc/self/mem", "/dev/zero", "~nobody-at-all", "no/such", "a//b/../c", "-x"),
    *("config.yaml", "loop", "pipe", "dangling", "model", "orbax", "a\0b", "a\ud800b", "a\nb", "x" * 300, "y/" * 2500),
]
TEXTS = [
    *("", "0", "1", "-1", "1e400", "nan", "-inf", "5e-324", "0x10", "1_0", "x", "é", "١", "9" * 25, "9" * 5000),
    *("a\0b", "\ud800", "\n", "a,b", ",", "1,-1", "1," * 3000 + "1", "anchor", "full+tag", "+", "yarn", "smollm2"),
    *("[", "{", "!!int ''", "!!python/name:os.system", "&a [*a]", "*a", "|", "'", "{[1]: 2}", "[" * 3000, "<<: 1"),
]
INSERTED = (b"\0", b"\xff", b"\n", b"[" * 3000, b'"', b"{", b"9" * 5000, b"\xed\xa0\x80")

CONFIGS = {
    "gate.yaml": """
title: t
seeds: [0]
matrix: [{model: llama, tokens: 48, dtype: float32, stages: [forward]}]
""",
    "study.yaml": """
title: t
model: {source: model}
text: {source: text.jsonl}
lengths: {contestants: [{condition: flash_bf16}], lengths: [8], sequences: 1}
""",
    "config.yaml": """
run: {folder: run, seed: 3}
model: {source: model, dtype: float32, attention: sdpa}
rope: {type: keep, theta: 50000.0}
data:
  sources: [{files: text.jsonl, domain_field: domain, max_documents: 40}]
  cache: cache
  held_out_share: 0.2
  min_tokens: 1
  bad_record_share: 0.1
pack: {sequence_length: 32, variant: anchor, anchor: auto, chunks: 2}
train: {steps: 1, sequences_per_step: 1, micro_batch: 1, learning_rate: 0.01, loss_chunk: 16, betas: [0.9, 0.95]}
distributed: {sequence_parallel: 1, zero_stage: 0, offload: none}
held_out: {sequences: 1}
save: {every: 1, keep: 2}
""",
}
# Commands that neither train nor compile.
QUICK = {
    *(("torchtrain", verb) for verb in ("plan", "config", "status", "verify")),
    *(("jaxref", verb) for verb in ("mask", "rope", "convert")),
    ("parity", "diff"),
}
STUDY, GATE = ("jaxref study study.yaml --out out", "parity run gate.yaml --out out")
TRAIN, PLAN, SHOW = (f"torchtrain {verb} config.yaml" for verb in ("train", "plan", "config"))
ON_A_RUN = [
    *("torchtrain status run", "torchtrain verify run", "torchtrain resume run", "torchtrain resume run --step 2"),
    *(f"{TRAIN} train.steps=2", f"{TRAIN} --replace"),
]
# A folder or file that is damaged, and the commands that read it.
DAMAGED = {
    "model": [PLAN, TRAIN, STUDY, "jaxref rope --config model/config.json", "jaxref convert model new"],
    "orbax": ["jaxref convert orbax new"],
    "text.jsonl": [TRAIN, f"{TRAIN} data.bad_record_share=1.0", STUDY],
    "text.parquet": [f"{TRAIN} data.sources.0.files=text.parquet", f"{STUDY} text.source=text.parquet"],
    "cache": [f"{TRAIN} run.folder=another", "torchtrain verify run"],
    "run": ON_A_RUN,
    "run/checkpoints": ON_A_RUN,
    "config.yaml": [SHOW, PLAN, TRAIN],
    "study.yaml": [STUDY],
    "gate.yaml": [GATE],
}
# Where a command takes a path.
PLACES = [
    *(f"{TRAIN} run.folder=@", f"{TRAIN} data.cache=@", f"{PLAN} model.source=@"),
    *("torchtrain train @", "torchtrain resume @", "torchtrain status @", "torchtrain verify @"),
    *("jaxref study study.yaml --out @", "jaxref rope --config @"),
    *("jaxref convert @ new", "jaxref convert model @", "parity run @", "parity run gate.yaml --out @"),
    *("parity diff @ @", "parity zoo @", "parity check @", "parity check @.py:f"),
]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "COLUMNS", "LANG", "HF_HOME")
Input = tuple[list[str], dict[str, str], str]  # the command line, variables of its environment, what was damaged


def make_files(folder: Path, run: Callable[[list[str]], None]) -> None:
    """Make a model, text and configurations; with `run`, which runs a command, an Orbax folder and a trained run."""
    import pyarrow
    import pyarrow.parquet

    from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

    tiny_model(num_hidden_layers=1).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    lines = [{"text": f"{n} " + "abcdefgh " * (n % 5 + 1), "domain": "ab"[n % 2], "meta": {"id": n}} for n in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), folder / "text.parquet")
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    run(["jaxref", "convert", "model", "orbax"])
    run([*TRAIN.split(), "train.steps=3", "save.last=2"])


def damaged(draw: random.Random, folder: Path) -> Input:
    """A damaged file or folder, or a damaged place of a configuration."""
    name = draw.choice(list(DAMAGED))
    path, command = folder / name, draw.choice(DAMAGED[name]).split()
    if name in CONFIGS and draw.random() < 0.75:
        tree = yaml.safe_load(path.read_text())
        change = damage_tree(draw, tree)
        try:
            path.write_text(yaml.safe_dump(tree))
        except (yaml.YAMLError, UnicodeError):
            path.write_text(json.dumps(tree))
        return command, {}, f"{name}: {change}"
    if path.is_dir():
        # A file, and sometimes a folder, that is in it.
        kind = Path.is_dir if draw.random() < 0.1 and any(map(Path.is_dir, path.rglob("*"))) else Path.is_file
        path = draw.choice(sorted(filter(kind, path.rglob("*"))))
    return command, {}, f"{path.name}: {damage_path(draw, path)}"


def damage_path(draw: random.Random, path: Path) -> str:
    """Damage a file: replace it by something else, or change its JSON or its bytes. A folder is replaced."""
    if path.is_dir() or draw.randrange(12) == 0:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        kind = draw.choice(["nothing", "a pipe", "a folder", "/no/such", path.name, "/dev/zero"])
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        elif kind != "nothing":
            path.symlink_to(kind)
        return f"replaced by {kind}"
    content = path.read_bytes()
    lines = content.split(b"\n") if path.suffix == ".jsonl" else [content]
    number = draw.randrange(len(lines))
    try:
        tree = {"whole": json.loads(lines[number])}
    except ValueError:
        tree = None
    if tree is not None and draw.random() < 0.7:
        change = damage_tree(draw, tree if draw.random() < 0.1 else tree["whole"])
        lines[number] = json.dumps(tree.get("whole")).encode()
        path.write_bytes(b"\n".join(lines))
        return change
    at, length = draw.randrange(len(content) + 1), draw.randrange(1, 200)
    before, after = content[:at], content[at:]
    ways = {
        "cut": before,
        "emptied": b"",
        "a bit flipped": before + bytes(b ^ (1 << draw.randrange(8)) for b in after[:1]) + after[1:],
        "bytes inserted": before + draw.choice(INSERTED) + after,
        "bytes removed": before + after[length:],
        "bytes twice": before + after[:length] + after,
        "random bytes": before + draw.randbytes(length) + after[length:],
    }
    way = draw.choice(list(ways))
    path.write_bytes(ways[way])
    return f"{way} at {at}"


def damage_tree(draw: random.Random, tree: Any) -> str:
    """Change one place of a tree of dicts and lists."""
    places: list[tuple[Any, Any, str]] = []

    def walk(node: Any, name: str) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            places.append((node, key, f"{name}.{key}"))
            if not (isinstance(value, list | dict) and len(value) > 40):  # else most draws would fall on a vocabulary
                walk(value, f"{name}.{key}")

    walk(tree, "")
    if not places:
        return "nothing changed"
    node, key, name = draw.choice(places)
    how, value, old = draw.randrange(8), draw.choice(VALUES), node[key]
    if how == 0:
        del node[key]
        return f"{name} removed"
    if how == 1 and isinstance(node, dict):
        node[draw.choice(["x", "", f"{key}_", "half \ud800"])] = node.pop(key)
        return f"{name} renamed"
    if how == 2 and isinstance(old, int | float):
        value = draw.choice([-old, old + 1, old * 1000, old - 1, old + 0.5, str(old), [old]])
    node[key] = value
    return f"{name} = {value!r:.80}"


def override(draw: random.Random, folder: Path) -> Input:
    """An override of a setting of any of the schemas."""
    from parity_tests.gate.spec import Gate
    from ropestudy.spec import StudyConfig
    from torchtrain.config import Config

    kind: Any
    command, kind = draw.choice([(PLAN, Config), (SHOW, Config), (TRAIN, Config), (STUDY, StudyConfig), (GATE, Gate)])
    names = list[str]()
    while hasattr(kind, "model_fields"):
        names.append(draw.choice([*kind.model_fields]))
        annotation = kind.model_fields[names[-1]].annotation
        kind = next((a for a in getattr(annotation, "__args__", ()) if hasattr(a, "model_fields")), annotation)
        if str(annotation).startswith("list"):
            names.append(draw.choice(["0", "0", "1", "-1", "x"]))
    value = draw.choice([*TEXTS, *PATHS, *(str(value) for value in VALUES)])
    return [*command.split(), f"{'.'.join(names)}={value}"], {}, "an override"


def option(draw: random.Random, folder: Path) -> Input:
    """An option of any verb."""
    import typer

    command = draw.choice(["torchtrain", "jaxref", "parity"])
    verbs: Any = typer.main.get_command(load_apps()[command])
    name = draw.choice(sorted(verbs.commands))
    file = {"torchtrain": "config.yaml", "jaxref": "study.yaml", "parity": "gate.yaml"}[command]
    given = {name: ["run"] for name in ("resume", "status", "verify")}
    given |= {"convert": ["model", "new"], "zoo": [file, "none"]}
    arguments = [command, name, *given.get(name, [file] if name in ("train", "plan", "config", "study") else [])]
    options = [one for one in verbs.commands[name].params if one.param_type_name == "option" and one.name != "help"]
    for parameter in draw.sample(options, min(len(options), 1)):
        arguments.append(draw.choice(parameter.opts))
        if not getattr(parameter, "is_flag", False):
            arguments.append(draw.choice([*TEXTS, *PATHS]))
    return arguments, {}, "an option"


def place(draw: random.Random, folder: Path) -> Input:
    """A path of any kind, wherever one is taken."""
    path = draw.choice(PATHS)
    words = draw.choice(PLACES).split()
    return [word.replace("@", json.dumps(path) if "=@" in word else path) for word in words], {}, "a path"


def environment(draw: random.Random, folder: Path) -> Input:
    """Variables that torchrun and others set."""
    words = [text[:200] for text in TEXTS if "\0" not in text and "\ud800" not in text] + ["no.such.invalid"]
    given = {name: draw.choice(words) for name in draw.sample(VARIABLES, draw.choice([1, 2, 3]))}
    given["MASTER_PORT"] = "x"  # with a right one the command would wait for processes that never come
    return draw.choice([TRAIN, PLAN, "jaxref mask", "parity run gate.yaml"]).split(), given, "environment"


KINDS = {"damaged": damaged, "override": override, "option": option, "place": place, "environment": environment}
