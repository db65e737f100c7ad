"""Damage of every kind to a checkpoint, and hostile files in it."""

import os
import pickle
from contextlib import contextmanager
from pathlib import Path

import pytest

from anchorline import files
from anchorline.files import entry_of
from torchtrain.checkpoint.manifest import MANIFEST, DamageError, Manifest
from torchtrain.checkpoint.state import state_of
from torchtrain.distributed.world import ALONE, World
from torchtrain.tests.checkpoint_fixtures import make_strategy, save


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {"bit flipped": flip, "cut off": cut_off, "missing": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["state-00000-000.safetensors", "rng-00000.safetensors", MANIFEST])
def test_a_damaged_file_is_named_and_the_last_good_checkpoint_offered(checkpoints, name, damage):
    strategy = make_strategy(updates=1)
    for step in (1, 2, 3):
        save(checkpoints, step, strategy)
    for step in (2, 3):
        DAMAGE[damage](checkpoints.path(step) / name)
    with pytest.raises(DamageError) as caught:
        checkpoints.open()
    message = str(caught.value)
    assert message.startswith(f"{checkpoints.path(3) / name}: ")
    assert message.endswith(
        f"the last good checkpoint is that of step 1: torchtrain resume {checkpoints.folder.parent} --step 1"
    )
    assert checkpoints.open(1) is not None
    DAMAGE[damage](checkpoints.path(1) / name)
    with pytest.raises(DamageError, match=r"there is no good one: torchtrain resume .* --step 0"):
        checkpoints.open()


class OneOf(World):
    """One rank of two; of the other nothing is known."""

    def from_first(self, value):
        return value

    @contextmanager
    def together(self):
        yield


def test_the_ranks_share_the_work_of_finding_the_last_good_one(checkpoints, monkeypatch):
    strategy = make_strategy(updates=0)
    for step in (1, 2):
        save(checkpoints, step, strategy)
    manifest = checkpoints.path(2) / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-1])
    read = []
    monkeypatch.setattr(files, "entry_of", lambda path: read.append(path.name) or entry_of(path))
    by_rank = []
    for rank in range(2):
        read.clear()
        with pytest.raises(DamageError, match="last good checkpoint is that of step 1"):
            checkpoints.open(world=OneOf(rank, 2))
        by_rank.append(list(read))
    assert all(by_rank)
    assert sorted(by_rank[0] + by_rank[1]) == sorted(Manifest.read(checkpoints.path(1)).files)


class Hostile:
    """What runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


def test_a_hostile_pickle_is_refused_and_does_not_run(checkpoints, tmp_path):
    witness = tmp_path / "it ran".replace(" ", "-")
    hostile = pickle.dumps(Hostile(witness))
    pickle.loads(hostile)
    assert witness.exists(), "the pickle is a real one"
    witness.unlink()

    strategy = make_strategy(updates=1)
    save(checkpoints, 1, strategy)
    folder = checkpoints.path(1)
    # In the place of ours, as the hash tells.
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.write_bytes(hostile)
        with pytest.raises(DamageError, match=path.name):
            checkpoints.open()
        path.write_bytes(content)
    # In the place of ours, with a manifest that agrees.
    for path in sorted(folder.glob("*.safetensors")):
        content, manifest = path.read_bytes(), (folder / MANIFEST).read_bytes()
        for disguise in (hostile, len(hostile).to_bytes(8, "little") + hostile):
            path.write_bytes(disguise)
            forged = Manifest.read(folder)
            forged = forged.model_copy(update={"files": {**forged.files, path.name: entry_of(path)}})
            (folder / MANIFEST).write_bytes(forged.dump())
            opened = checkpoints.open()
            assert opened is not None
            with pytest.raises(DamageError, match=f"{path.name}: is not "):
                checkpoints.load(state_of(strategy), opened, ALONE)
        path.write_bytes(content)
        (folder / MANIFEST).write_bytes(manifest)
    assert checkpoints.open() is not None
    assert not witness.exists()
