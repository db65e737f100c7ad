"""One place of a tree, of a file or of a folder is made wrong; each function says what it did."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

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


def damage_file(draw: random.Random, path: Path) -> str:
    """Damage a file: what it is, a place of the JSON that it holds, or its bytes."""
    how = draw.randrange(12)
    if how == 0:
        path.unlink()
        return f"{path.name}: {_put_something_else(draw, path)}"
    if how < 9:
        lines = path.read_bytes().split(b"\n") if path.suffix == ".jsonl" else [path.read_bytes()]
        number = draw.randrange(len(lines))
        try:
            box = {"whole": json.loads(lines[number])}
        except ValueError:
            box = {}
        if box:
            done = damage_tree(draw, box if draw.random() < 0.1 else box["whole"])
            lines[number] = json.dumps(box.get("whole")).encode()
            path.write_bytes(b"\n".join(lines))
            return f"{path.name}: {done}"
    content = path.read_bytes()
    at = draw.randrange(len(content) + 1)
    before, after, length = content[:at], content[at:], draw.randrange(1, 200)
    ways = {
        "cut": before,
        "emptied": b"",
        "a bit flipped": before + bytes(b ^ (1 << draw.randrange(8)) for b in after[:1]) + after[1:],
        "bytes inserted": before + draw.choice(INSERTED) + after,
        "bytes removed": before + after[length:],
        "bytes twice": before + after[:length] + after,
        "random bytes": before + draw.randbytes(length) + after[length:],
    }
    done = draw.choice(list(ways))
    path.write_bytes(ways[done])
    return f"{path.name}: {done} at {at}"


def damage_folder(draw: random.Random, folder: Path) -> str:
    """Damage one file of a folder, or put something else in the place of one of its folders."""
    inner = sorted(path for path in folder.rglob("*") if path.is_dir())
    if inner and draw.random() < 0.1:
        path = draw.choice(inner)
        shutil.rmtree(path)
        return f"{path.name}: {_put_something_else(draw, path)}"
    return damage_file(draw, draw.choice(sorted(path for path in folder.rglob("*") if path.is_file())))


def _put_something_else(draw: random.Random, path: Path) -> str:
    kind = draw.choice(["nothing", "a pipe", "a folder", "/no/such", path.name, "/dev/zero"])
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind != "nothing":
        path.symlink_to(kind)
    return f"replaced by {kind}"
