"""The checkpoints of a run: saved whole or not at all, the last good ones kept, checked before one is used.

`checkpoints/step-00000010/`: `manifest.json`, `state-*.safetensors` (see `fragments`), `rng-*.safetensors`. Nothing in
it is pickled, and nothing is unpickled. `*.partial` and `*.deleted` are what an interruption leaves; they do not count
and go at the next opening. Only files with the names of a checkpoint's are ever removed: what a user lays beside them
stays.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anchorline.errors import UserError, disk_fault
from anchorline.files import DELETED, PARTIAL, FileEntry, commit, differs, remove, set_aside, write_file
from torchtrain.checkpoint import fragments, rng
from torchtrain.checkpoint.manifest import MANIFEST, DamageError, Manifest
from torchtrain.checkpoint.part import Part
from torchtrain.checkpoint.state import State
from torchtrain.distributed.world import ALONE, World
from torchtrain.errors import OtherRankFailed

STEP = re.compile(r"step-\d{8,19}")
# Files of a checkpoint.
OWN = re.compile(r"manifest\.json|state-\d{5,}-\d{3,}\.safetensors|rng-\d{5,}\.safetensors")
_LEFT = re.compile(rf"{STEP.pattern}(?:{re.escape(PARTIAL)}|{re.escape(DELETED)}(?:-\d+)?)")


class Checkpoints:
    """The folder of a run's checkpoints. Making the object touches nothing.

    Args:
        folder: `checkpoints` in the run's folder; every rank sees the same one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in their order, whatever the clock said when they were written.

        Raises:
            UserError: there is something in the folder's place, and it cannot be looked into.
        """
        return sorted(
            step_of(name) for name in self._names() if STEP.fullmatch(name) and name == self.path(step_of(name)).name
        )

    def give_up(self) -> None:
        """Where the checkpoints cannot be reached, rename what stands in the folder's place. Only for who begins anew.

        Raises:
            OSError: what the system says.
        """
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            set_aside(self.folder)

    def sweep(self) -> None:
        """Remove what interruptions left. Only for who holds the run's lock.

        Raises:
            OSError: what the system says.
        """
        for name in self._names():
            if _LEFT.fullmatch(name):
                _remove(self.folder / name)

    def save(
        self, part: Part, manifest: Callable[[dict[str, FileEntry]], Manifest], step: int, keep: int, world: World
    ) -> int:
        """Save a step's checkpoint, then remove all but the last `keep` good ones. All ranks call it, one save at a
        time; of a part that is staged a thread can, with a world of its own (`World.beside`).

        Args:
            part: what this rank writes.
            manifest: makes the manifest of the files that all ranks wrote.
            step: steps done.
            keep: how many to keep, this one among them.
            world: this rank's place.

        Returns:
            Bytes that all ranks wrote.

        Raises:
            UserError: it could not be written; the message says why, and which is the last good one. Nothing of it is
                left.
        """
        partial = self.path(step).with_name(self.path(step).name + PARTIAL)
        leads = world.rank == 0
        with self._tell_faults(step, partial, world):
            if leads:
                self.folder.mkdir(exist_ok=True)
                if partial.exists():
                    _remove(partial)
                partial.mkdir()
        with self._tell_faults(step, partial, world):
            entries = fragments.write(partial, part.fragments, world.rank)
            entries |= rng.write(partial, world.rank, part.generators)
        parts = world.gather((entries, fragments.elements(part.fragments)))
        with self._tell_faults(step, partial, world):
            files = {name: entry for of_rank, _ in parts for name, entry in of_rank.items()}
            if leads:
                fragments.check_whole(part.parameters, [counts for _, counts in parts])
                if unseen := [name for name in files if not (partial / name).is_file()]:
                    raise UserError(
                        f"{unseen[0]} of another node is not there: run.folder must be on a disk that all nodes share"
                    )
                write_file(partial / MANIFEST, manifest(files).dump())
                damaged = set_aside(self.path(step)) if os.path.lexists(self.path(step)) else None
                commit(partial, self.path(step))
                if damaged is not None:
                    _remove(damaged)
        with world.together():
            if leads:
                self.retain(keep, step)
        return sum(entry.bytes for entry in files.values())

    def retain(self, keep: int, new: int) -> None:
        """Remove what is older than the last `keep` good ones, never the one just saved or taken up. Damaged ones
        between them stay, for who wants to look. Only for who holds the run's lock.

        Raises:
            UserError: one cannot be removed.
        """
        good = [step for step in self.steps() if self.looks_good(step)]
        try:
            for step in self.steps():
                if len(good) >= keep and step < good[-keep] and step != new:
                    _discard(self.path(step))
        except OSError as error:
            raise UserError(
                f"{self.path(new)}: is saved, but an older checkpoint could not be removed: {disk_fault(error)}; "
                f"mend that, then: torchtrain resume {self.folder.parent}"
            ) from None

    def load(self, state: State, manifest: Manifest, world: World) -> None:
        """Give a strategy the state of a checkpoint that `verify` has checked. All ranks call it.

        The generators of random numbers are set where the checkpoint has this rank's.

        Raises:
            UserError: the model's parameters are others.
            DamageError: a file is not what the manifest promises.
        """
        path = self.path(manifest.progress.step)
        with world.together():
            if state.parameters != manifest.parameters:
                names = [
                    n
                    for n in {**manifest.parameters, **state.parameters}
                    if manifest.parameters.get(n) != state.parameters.get(n)
                ]
                raise UserError(
                    f"{path}: {names[0]} is {manifest.parameters.get(names[0])} in the checkpoint and "
                    f"{state.parameters.get(names[0])} in the model; put back the model of the run"
                )
            held = state.fragments()
            own_part = fragments.share(held, world.rank, world.size) if state.everywhere else held
            names = (name for name in manifest.files if name.startswith("state-"))
            ordered = fragments.nearest(names, manifest.layout.processes, world.rank, world.size)
            fragments.read([path / name for name in ordered], own_part)
            if (own := rng.rng_file(world.rank)) in manifest.files:
                rng.read(path / own)
        if state.everywhere:
            for rank in range(world.size):
                for fragment in fragments.share(held, rank, world.size):
                    for kind in fragments.KINDS:
                        world.give(fragment.tensors[kind], rank)
        state.updates = manifest.progress.updates
        state.weights_from_masters()

    def open(self, step: int | None = None, world: World = ALONE) -> Manifest | None:
        """Return the manifest of a checkpoint whose every byte was checked; the ranks share the work.

        Args:
            step: of which step; default: the last.
            world: this rank's place.

        Returns:
            None if there is none at all, and none was asked for.

        Raises:
            UserError: there is none of that step.
            DamageError: it is not what was written: names the file, and offers the last one that is good.
        """
        there = world.from_first(self.steps())
        if step is None:
            if not there:
                return None
            step = there[-1]
        with world.together():
            if step not in there:
                have = f"there are those of {', '.join(map(str, there))}" if there else "there is none at all"
                raise UserError(f"{self.folder}: has no checkpoint of step {step}; {have}")
        if (damage := self._damage(step, world)) is not None:
            offer = self._offer([other for other in there if other != step], world)
            if not damage:
                raise OtherRankFailed("another rank names the file")
            raise DamageError(f"{damage}; {offer}")
        return Manifest.read(self.path(step))

    def verify(self, step: int, world: World = ALONE) -> None:
        """Check this rank's share of a checkpoint's files: those that it will read, where as many ranks wrote them.

        Raises:
            DamageError: a file is missing, cut off, changed, or not ours: names it.
        """
        path = self.path(step)
        manifest = Manifest.read(path)
        if manifest.progress.step != step:
            raise DamageError(f"{path}: its manifest is that of step {manifest.progress.step}")
        if foreign := sorted(name for name in manifest.files if name == MANIFEST or not OWN.fullmatch(name)):
            raise DamageError(f"{path / MANIFEST}: {foreign[0]!r} is not a file of a checkpoint")
        known = {MANIFEST, *manifest.files}
        if strange := sorted(child.name for child in path.iterdir() if child.name not in known):
            raise DamageError(f"{path / strange[0]}: was not written by this run")
        by_writer = sorted(manifest.files, key=lambda name: (fragments.rank_of(name), name))
        for number, name in enumerate(by_writer):
            if number * world.size // len(by_writer) == world.rank:
                _check(path / name, manifest.files[name])

    def looks_good(self, step: int) -> bool:
        """Whether a checkpoint has its manifest and files of the right sizes; their content is not read."""
        try:
            for name, entry in Manifest.read(self.path(step)).files.items():
                _check(self.path(step) / name, entry, whole=False)
        except (DamageError, OSError):
            return False
        return True

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of all later steps: the run is taken up at this one, and theirs is another future.

        Only for who holds the run's lock. The last one goes first, so that an interruption leaves a run of the same
        past.
        """
        for later in reversed(self.steps()):
            if later > step:
                _discard(self.path(later))

    def _names(self) -> list[str]:
        """Return the names of all that the folder holds, nothing where there is none."""
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            if not self.folder.is_symlink():
                return []
            why = f"is a link to {os.readlink(self.folder)}, which is not there"
        except OSError as error:
            why = f"cannot be looked into: {str(error.strerror).lower()}"
        raise UserError(
            f"{self.folder}: {why}; mount its disk, or begin anew: torchtrain resume {self.folder.parent} --step 0"
        )

    def _damage(self, step: int, world: World) -> str | None:
        """Return what is wrong with a checkpoint, on the rank that is to say it, "" on the others; None of a good one.

        Every rank reads its share, and none goes on before all have: a rank that left would have torchrun stop the
        others.
        """
        try:
            with world.together():
                self.verify(step, world)
        except UserError as error:
            return str(error)
        except OtherRankFailed:
            return ""
        return None

    def _offer(self, others: list[int], world: World) -> str:
        """Return, in words, from where the run can go on instead. All ranks call it."""
        for step in reversed(others):
            if self._damage(step, world) is None:
                return (
                    f"the last good checkpoint is that of step {step}: "
                    f"torchtrain resume {self.folder.parent} --step {step}"
                )
        return f"there is no good one: torchtrain resume {self.folder.parent} --step 0 begins anew"

    @contextmanager
    def _tell_faults(self, step: int, partial: Path, world: World) -> Iterator[None]:
        """Let all ranks stop when one of them cannot write, the partial folder gone."""
        try:
            with world.together():
                yield
        except (UserError, OtherRankFailed) as error:
            if world.rank == 0:
                with suppress(OSError):
                    _remove(partial)
            if isinstance(error, OtherRankFailed):
                raise
            kept = [s for s in self.steps() if self.looks_good(s)]
            last = f"the last good one is that of step {kept[-1]}" if kept else "there is no earlier one"
            raise UserError(
                f"{self.path(step)}: the checkpoint could not be written: {error}; {last}; "
                f"mend that, then: torchtrain resume {self.folder.parent}"
            ) from None


def step_of(name: str) -> int:
    """Return the step of a folder's name that `STEP` fits."""
    return int(name.partition("-")[2])


def _check(path: Path, entry: FileEntry, whole: bool = True) -> None:
    if (fault := differs(path, entry, whole)) is not None:
        raise DamageError(f"{path}: {fault}")


def _discard(folder: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that a crash never leaves a part of it under that name."""
    _remove(set_aside(folder))


def _remove(folder: Path) -> None:
    """Remove a checkpoint's files and, where nothing else is in it, its folder. What a link leads to stays."""
    if not folder.is_symlink() and folder.is_dir():
        remove(folder, filter(OWN.fullmatch, os.listdir(folder)))
