"""The checkpoints of a run: saved whole or not at all, the last good ones kept, checked before one is used.

`checkpoints/step-00000010/`: `manifest.json`, `state-*.safetensors` (see `fragments`), `rng-*.safetensors`. Nothing in
it is pickled, and nothing is unpickled. `*.partial` and `*.deleted` are what an interruption leaves; they do not count
and go at the next opening. Only files with the names of a checkpoint's are ever removed: what a user lays beside them
stays.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anchorline.errors import UserError
from anchorline.files import PARTIAL, FileEntry, commit, set_aside, write_file
from torchtrain.checkpoint import fragments, rng
from torchtrain.checkpoint.folder import OWN, CheckpointFolder, check_file, remove_checkpoint
from torchtrain.checkpoint.manifest import MANIFEST, DamageError, Manifest
from torchtrain.checkpoint.part import Part
from torchtrain.checkpoint.state import State
from torchtrain.distributed.world import ALONE, World
from torchtrain.errors import OtherRankFailed


class Checkpoints(CheckpointFolder):
    """The checkpoints of a run: what `CheckpointFolder` does, and writes and reads their tensors."""

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
                    remove_checkpoint(partial)
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
                    remove_checkpoint(damaged)
        with world.together():
            if leads:
                self.retain(keep, step)
        return sum(entry.bytes for entry in files.values())

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
                check_file(path / name, manifest.files[name])

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
                    remove_checkpoint(partial)
            if isinstance(error, OtherRankFailed):
                raise
            kept = [s for s in self.steps() if self.looks_good(s)]
            last = f"the last good one is that of step {kept[-1]}" if kept else "there is no earlier one"
            raise UserError(
                f"{self.path(step)}: the checkpoint could not be written: {error}; {last}; "
                f"mend that, then: torchtrain resume {self.folder.parent}"
            ) from None
