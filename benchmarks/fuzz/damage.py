"""One place of a tree, of a file or of a folder is made wrong; each function says what it did."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from benchmarks.fuzz.values import VALUES

INSERTED = (b"\0", b"\xff", b"\n", b"[" * 3000, b'"', b"{", b"9" * 5000, b"\xf0\x9f\x9a\x80", b"\xed\xa0\x80")
LINKS = {"a link to nothing": "/no/such", "a link to itself": None, "a link to /dev/zero": "/dev/zero"}


def damage_tree(random: random.Random, tree: Any) -> str:
    """Change one place of a tree of dicts and lists."""
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
    """Change bytes somewhere; return them too."""
    at = random.randrange(len(content) + 1)
    before, after = content[:at], content[at:]
    how = random.randrange(7)
    if how == 0:
        return before, f"cut at {at}"
    if how == 1:
        return b"", "emptied"
    if how == 2 and after:
        return before + bytes([after[0] ^ (1 << random.randrange(8))]) + after[1:], f"a bit flipped at {at}"
    if how == 3:
        inserted = random.choice(INSERTED)
        return before + inserted + after, f"{inserted[:8]!r} inserted at {at}"
    length = random.randrange(1, 200)
    if how == 4:
        return before + after[length:], f"{at} to {at + length} removed"
    if how == 5:
        return before + after[:length] + after, f"{at} to {at + length} twice"
    noise = random.randbytes(random.randrange(1, 64))
    return before + noise + after[len(noise) :], f"{len(noise)} random bytes at {at}"


def damage_file(random: random.Random, path: Path) -> str:
    """Damage a file: its content, or what it is."""
    how = random.randrange(12)
    if how == 0:
        path.unlink()
        return f"{path.name}: removed"
    if how == 1:
        return f"{path.name}: {_replace(random, path)}"
    if how < 9 and (tree := _read_tree(path)):
        box = {"whole": tree} if random.random() < 0.05 else tree
        done = damage_tree(random, box)
        path.write_text(json.dumps(box.get("whole") if box is not tree else tree))
        return f"{path.name}: {done}"
    if how < 9 and path.suffix == ".jsonl":
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


def damage_folder(random: random.Random, folder: Path) -> str:
    """Damage one file of a folder, or the whole of one of its folders."""
    inner = sorted(path for path in folder.rglob("*") if path.is_dir())
    if inner and random.random() < 0.1:
        path = random.choice(inner)
        shutil.rmtree(path)
        if random.random() < 0.5:
            return f"{path.name}: removed with all that it holds"
        path.touch()
        return f"{path.name}: {_replace(random, path)}"
    return damage_file(random, random.choice(sorted(path for path in folder.rglob("*") if path.is_file())))


def _replace(random: random.Random, path: Path) -> str:
    """Put something else where a file is."""
    path.unlink()
    kind = random.choice(["a pipe", "a folder", *LINKS])
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(LINKS[kind] or path.name)
    return kind


def _read_tree(path: Path) -> Any:
    """Return the dict or list in a file of JSON (Orbax gives its own no ending); None of any other file."""
    if path.suffix not in (".json", ""):
        return None
    try:
        tree = json.loads(path.read_bytes())
    except ValueError:
        return None
    return tree if isinstance(tree, dict | list) else None
