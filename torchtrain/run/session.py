"""A run from the side of what it leaves: where it stands, its files, and how both are taken up again."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from anchorline.errors import UserError, disk_fault
from anchorline.files import FileEntry
from torchtrain.checkpoint.manifest import Manifest, ProcessLayout, RunProgress, versions
from torchtrain.checkpoint.state import state_of
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config, SaveConfig
from torchtrain.distributed.world import World
from torchtrain.modeling.finite import first_not_finite
from torchtrain.modeling.save import reader_notes
from torchtrain.run.export import export
from torchtrain.run.finite import check_finite
from torchtrain.run.folder import RunFolder
from torchtrain.run.setup import Setup
from torchtrain.training.events import MetricsFile
from torchtrain.training.guard import Guard
from torchtrain.training.held_out import HeldOut
from torchtrain.training.strategy import Strategy


class Session:
    """Saves a run between two steps and takes it up again.

    All ranks make one and call it alike; rank 0 writes what is common.

    Args:
        config: the run's.
        folder: the run's.
        setup: model and rows.
        strategy: holds the state.
        metrics, timing: the two files; the first is part of what is saved.
        say: takes one line at a time.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        setup: Setup,
        strategy: Strategy,
        metrics: MetricsFile,
        timing: MetricsFile,
        say: Callable[[str], None],
    ) -> None:
        self.setup, self.strategy = setup, strategy
        self._config, self._folder = config, folder
        self._metrics, self._timing, self._say = metrics, timing, say
        self._leads = strategy.world.rank == 0
        self.checkpoints = Checkpoints(folder.checkpoints)
        self.step, self.tokens_seen = 0, 0
        self.before: HeldOut | None = None
        self.guard = self._guard()
        self._saved: int | None = None

    def take_up(self, manifest: Manifest) -> None:
        """Give strategy, counters and generators what a checkpoint holds."""
        self.checkpoints.load(state_of(self.strategy), manifest, self.strategy.world)
        progress = manifest.progress
        self.step, self.tokens_seen = progress.step, progress.tokens_seen
        self._saved = progress.step
        with self.strategy.world.together():
            if self._leads:  # it may have been interrupted before it came to that
                self.checkpoints.retain(self._config.save.keep, progress.step)
        self.guard = self._guard(progress)
        self.before = HeldOut(self.setup.store.domains, self.setup.own_positions)
        for mean, (total, tokens) in zip(self.before.means(), progress.before, strict=True):
            mean.total, mean.tokens = total, tokens

    def note(self, step: int, tokens_seen: int) -> None:
        """Note that a step is done."""
        self.step, self.tokens_seen = step, tokens_seen

    @property
    def due(self) -> bool:
        """Whether this step saves.

        The last one does, so that nothing is lost while the model is evaluated and exported.
        """
        every, last = self._config.save.every, self._config.train.steps
        return bool(every) and self.step > 0 and (self.step % every == 0 or self.step == last)

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint of this step."""
        return self._saved == self.step

    def save(self) -> None:
        """Save a checkpoint of this step, unless it is the one that was taken up or saved last.

        Raises:
            UserError: it cannot be written; see `Checkpoints.save`. Or weights or moments are not finite: nothing comes
                of them.
        """
        if self.saved:
            return
        started = time.perf_counter()
        world = self.strategy.world
        state = state_of(self.strategy)
        self._check_finite()
        updates = state.updates

        def manifest(files: dict[str, FileEntry]) -> Manifest:
            assert self.before is not None
            return Manifest(
                progress=RunProgress(
                    step=self.step,
                    updates=updates,
                    tokens_seen=self.tokens_seen,
                    skipped_steps=self.guard.skipped,
                    recent_losses=list(self.guard.recent),
                    before=[(mean.total, mean.tokens) for mean in self.before.means()],
                    metrics=self._metrics.settle(),
                ),
                layout=layout_of(self._config, self.setup, world),
                config=self._config.model_dump(mode="json"),
                identity=self.setup.identity,
                versions=versions(),
                parameters=state.parameters,
                files=files,
            )

        size = self.checkpoints.save(state, manifest, self.step, self._config.save.keep, world)
        self._saved = self.step
        seconds = time.perf_counter() - started
        self._timing.write("save", {"step": self.step, "seconds": seconds, "bytes": size})
        self._say(f"saved     step {self.step:,}: {size / 2**20:,.1f} MiB in {seconds:.1f} s")

    def export(self, target: Path) -> None:
        """Leave the model as it is now in a folder, unless it is there already: a step always gives the same one.

        Raises:
            UserError: it cannot be written, something else has its name, or a weight is not finite. Nothing of it is
                left.
        """
        world = self.strategy.world
        with world.together():
            there = self._leads and self._folder.has_export(target)
        if world.from_first(there):
            return
        self._check_finite()
        started = time.perf_counter()
        weights = self.strategy.weights()
        with world.together():
            if self._leads:
                folder = self._folder
                if weights is not None and (name := first_not_finite(weights.items())) is not None:
                    raise UserError(
                        f"{name} is not finite after step {self.step}, so the model was not written to {target}"
                    )
                try:
                    partial = folder.begin_export(target)
                    export(self.setup.model, self.setup.tokenizer, partial, target, weights, folder.end_export)
                except (OSError, SafetensorError) as error:
                    with suppress(OSError, UserError):
                        folder.drop_export()
                    why = disk_fault(error) if isinstance(error, OSError) else str(error)
                    safe = f"step {self.step} is saved" if self.saved else "save.every is 0, so nothing is saved"
                    raise UserError(
                        f"{target}: the model could not be written: {why}; {safe}; "
                        f"mend that, then: torchtrain resume {self._folder.path}"
                    ) from None
                for note in reader_notes(self.setup.model.config):
                    self._say(f"readers   {note}")
        self._timing.write("export", {"step": self.step, "seconds": time.perf_counter() - started})

    def export_if_kept(self) -> None:
        """Export this step's model if it is one of the last that `save.last` keeps; the trained one comes later."""
        if self.step in exported_steps(self._config.save, self._config.train.steps):
            self.export(self._folder.exports / f"step-{self.step:08d}")

    def _check_finite(self) -> None:
        with self.strategy.world.together():
            check_finite(
                self.strategy,
                f"after step {self.step}",
                f"nothing of it was saved; lower train.learning_rate ({self._config.train.learning_rate}), warm up "
                "longer or set model.dtype: float32, and train anew",
            )

    def _guard(self, progress: RunProgress | None = None) -> Guard:
        so_far: Mapping[str, Any] = (
            {} if progress is None else {"skipped": progress.skipped_steps, "recent": progress.recent_losses}
        )
        return Guard(self._config.train, self.setup.rows, self._folder.bad_steps, self._leads, **so_far)


def layout_of(config: Config, setup: Setup, world: World) -> ProcessLayout:
    """Return on what a run is computed and how it is spread."""
    distributed, train = config.distributed, config.train
    return ProcessLayout(
        processes=world.size,
        sequence_parallel=distributed.sequence_parallel,
        zero_stage=distributed.zero_stage,
        offload=distributed.offload,
        micro_batch=train.micro_batch,
        loss_chunk=train.loss_chunk,
        device=setup.record["device"],
        attention=setup.engine,
        deterministic=train.deterministic and world.device.type == "cuda",
    )


def exported_steps(save: SaveConfig, steps: int) -> list[int]:
    """Return the steps whose models `save.last` keeps besides the trained one's: the last that save before the end."""
    before_the_end = range(save.every, steps, save.every) if save.every else range(0)
    return list(before_the_end)[len(before_the_end) - min(save.last - 1, len(before_the_end)) :]
