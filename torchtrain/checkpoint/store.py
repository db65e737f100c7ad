"""The checkpoints of a run: each is saved whole or not at all, and checked before it is used.

`checkpoints/step-00000010/` holds `manifest.json`, `state-*.safetensors` (see `fragments`) and `rng-*.safetensors`.
Nothing in it is pickled. An interruption leaves `*.partial` and `*.deleted`; the next start removes them.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anchorline.errors import UserError
from anchorline.files import PARTIAL, FileEntry, commit, remove_tree, set_aside, write_file
from torchtrain.checkpoint import fragments, rng
from torchtrain.checkpoint.folder import CheckpointFolder, check_file
from torchtrain.checkpoint.manifest import MANIFEST, DamageError, Manifest
from torchtrain.checkpoint.state import RankState, State
from torchtrain.distributed.world import ALONE, World
from torchtrain.errors import OtherRankFailed


class Checkpoints(CheckpointFolder):
    """The checkpoints of a run: `CheckpointFolder`, with their tensors."""

    def save(
        self, state: RankState, manifest: Callable[[dict[str, FileEntry]], Manifest], step: int, keep: int, world: World
    ) -> int:
        """Save a step's checkpoint, then remove all but the last `keep` whole ones.

        All ranks call it, one save at a time. A thread may save a staged state, with a world of its own
        (`World.for_threads`).

        manifest: makes the manifest, given the files that all ranks wrote.
        Returns bytes that all ranks wrote.
        Raises UserError: it could not be written; the message says why, and which is the last good one. Nothing of it
            is left.
        """
        partial = self.path(step).with_name(self.path(step).name + PARTIAL)
        leads = world.rank == 0
        with self._remove_on_fault(step, partial, world):
            if leads:
                self.folder.mkdir(exist_ok=True)
                remove_tree(partial)
                partial.mkdir()
        with self._remove_on_fault(step, partial, world):
            entries = fragments.write(partial, state.fragments, world.rank)
            entries |= rng.write(partial, world.rank, state.generators)
        ranks = world.gather((entries, fragments.elements(state.fragments)))
        files = {name: entry for of_rank, _ in ranks for name, entry in of_rank.items()}
        with self._remove_on_fault(step, partial, world):
            if leads:
                fragments.check_whole(state.parameters, [counts for _, counts in ranks])
                if unseen := [name for name in files if not (partial / name).is_file()]:
                    raise UserError(
                        f"{unseen[0]} of another node is not there: run.folder must be on a disk that all nodes share"
                    )
                write_file(partial / MANIFEST, manifest(files).dump())
                damaged = set_aside(self.path(step)) if os.path.lexists(self.path(step)) else None
                commit(partial, self.path(step))
                if damaged is not None:
                    remove_tree(damaged)
        with world.together():
            if leads:
                self.retain(keep, step)
        return sum(entry.bytes for entry in files.values())

    def load(self, state: State, manifest: Manifest, world: World) -> None:
        """Give a strategy the state of a checkpoint that `open` returned. All ranks call it.

        The generators of random numbers are set where the checkpoint has this rank's. Raises UserError: the model's
        parameters are others. Raises DamageError: a file is not what the manifest promises.
        """
        path = self.path(manifest.progress.step)
        with world.together():
            for name in {**manifest.parameters, **state.parameters}:
                was, now = manifest.parameters.get(name), state.parameters.get(name)
                if was != now:
                    raise UserError(
                        f"{path}: {name} is {was} in the checkpoint and {now} in the model; put back the model of the "
                        "run"
                    )
            held = state.fragments()
            own = fragments.share(held, world.rank, world.size) if state.everywhere else held
            names = (name for name in manifest.files if name.startswith("state-"))
            ordered = fragments.nearest(names, manifest.layout.processes, world.rank, world.size)
            fragments.read([path / name for name in ordered], own)
            if (generators := rng.rng_file(world.rank)) in manifest.files:
                rng.read(path / generators)
        if state.everywhere:
            for rank in range(world.size):
                for fragment in fragments.share(held, rank, world.size):
                    for kind in fragments.KINDS:
                        world.give(fragment.tensors[kind], rank)
        state.updates = manifest.progress.updates
        state.weights_from_masters()

    def open(self, step: int | None = None, world: World = ALONE) -> Manifest | None:
        """Return the manifest of a checkpoint after every byte was checked. The ranks share the work.

        step: of which step; default: the last.
        Returns None if there is none at all, and none was asked for.
        Raises UserError: there is none of that step.
        Raises DamageError: it is not what was written: names the file, and offers the last one that is good.
        """
        steps = world.from_first(self.steps())
        if step is None and not steps:
            return None
        step = steps[-1] if step is None else step
        with world.together():
            if step not in steps:
                have = f"there are those of {', '.join(map(str, steps))}" if steps else "there is none at all"
                raise UserError(f"{self.folder}: has no checkpoint of step {step}; {have}")
        if (damage := self._find_damage(step, world)) is not None:
            good = next((s for s in reversed(steps) if s != step and self._find_damage(s, world) is None), None)
            if not damage:
                raise OtherRankFailed("another rank names the file")
            offer = "there is no good one" if good is None else f"the last good checkpoint is that of step {good}"
            raise DamageError(f"{damage}; {offer}: torchtrain resume {self.folder.parent} --step {good or 0}")
        return Manifest.read(self.path(step))

    def verify(self, step: int, world: World = ALONE) -> None:
        """Check this rank's share of a checkpoint's files: those that it will read, where as many ranks wrote them.
        Raises DamageError: a file is missing, cut off or changed: names it.
        """
        path = self.path(step)
        manifest = Manifest.read(path)
        if manifest.progress.step != step:
            raise DamageError(f"{path}: its manifest is that of step {manifest.progress.step}")
        by_writer = sorted(manifest.files, key=lambda name: (fragments.rank_of(name), name))
        for number, name in enumerate(by_writer):
            if number * world.size // len(by_writer) == world.rank:
                check_file(path / name, manifest.files[name])

    def _find_damage(self, step: int, world: World) -> str | None:
        """Return what is wrong, on the rank that reports it, "" on others, None of a good one; ranks wait for all."""
        try:
            with world.together():
                self.verify(step, world)
        except UserError as error:
            return str(error)
        except OtherRankFailed:
            return ""
        return None

    @contextmanager
    def _remove_on_fault(self, step: int, partial: Path, world: World) -> Iterator[None]:
        """Stop all ranks when one of them cannot write, and remove the partial folder."""
        try:
            with world.together():
                yield
        except (UserError, OtherRankFailed) as error:
            if world.rank == 0:
                with suppress(OSError):
                    remove_tree(partial)
            if isinstance(error, OtherRankFailed):
                raise
            whole = [s for s in self.steps() if self.looks_whole(s)]
            last = f"the last good one is that of step {whole[-1]}" if whole else "there is no earlier one"
            raise UserError(
                f"{self.path(step)}: the checkpoint could not be written: {error}; {last}; "
                f"correct that, then: torchtrain resume {self.folder.parent}"
            ) from None
