"""The state of a run between two steps: it is saved, resumed, and exported."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from anchorline.errors import UserError
from anchorline.files import FileEntry
from torchtrain.checkpoint.background import Background
from torchtrain.checkpoint.manifest import Manifest, ProcessLayout, RunProgress, versions
from torchtrain.checkpoint.state import RankState, State, state_of
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config, DistributedConfig, TrainConfig
from torchtrain.distributed.world import World
from torchtrain.errors import OtherRankFailed
from torchtrain.modeling.compilation import is_compiled
from torchtrain.modeling.head import head_of
from torchtrain.products import multiplies_in_float32
from torchtrain.run.export import export_step
from torchtrain.run.folder import RunFolder
from torchtrain.run.setup import Setup
from torchtrain.run.steps import check_finite
from torchtrain.training.events import MetricsFile
from torchtrain.training.guard import Guard
from torchtrain.training.held_out import HeldOut
from torchtrain.training.loss import default_chunk
from torchtrain.training.strategy import Strategy


class Session:
    """Saves, resumes and exports a run between two steps, on all ranks alike; rank 0 writes what is common."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        setup: Setup,
        strategy: Strategy,
        metrics: MetricsFile,
        timing: MetricsFile,
        log: Callable[[str], None],
    ) -> None:
        self.setup, self.strategy = setup, strategy
        self._config, self._folder = config, folder
        self._metrics, self._timing, self._log = metrics, timing, log
        self._leads = strategy.world.rank == 0
        self.checkpoints = Checkpoints(folder.checkpoints)
        self.step, self.tokens_seen = 0, 0  # that are done, and were trained on
        self.before: HeldOut | None = None
        self.guard = self._guard()
        self._background = Background()
        self._begun: int | None = None  # step of the last save, which may not be whole yet
        self.saved: int | None = None  # step of the last save that is known to be whole

    def resume(self, manifest: Manifest) -> None:
        """Load strategy, counters and generators from a checkpoint."""
        self.checkpoints.load(state_of(self.strategy), manifest, self.strategy.world)
        progress = manifest.progress
        self.step, self.tokens_seen = progress.step, progress.tokens_seen
        self._begun = self.saved = progress.step
        with self.strategy.world.together():
            if self._leads:  # the run may have been killed before it removed older ones
                self.checkpoints.retain(self._config.save.keep, progress.step)
        self.guard = self._guard(progress)
        self.before = HeldOut(self.setup.store.domains, self.setup.source.own_positions)
        self.before.blocks = progress.before_blocks
        # A checkpoint of an earlier version lacks the last mean.
        for mean, (total, tokens) in zip(self.before.means(), progress.before, strict=False):
            mean.total, mean.tokens = total, tokens

    @property
    def saves_now(self) -> bool:
        """Whether this step saves. The last one does: nothing is lost while the model is evaluated and exported."""
        save, steps = self._config.save, self._config.train.steps
        return self.step in save.before_last(steps) or (self.step == steps and save.every > 0)

    def save(self, wait: bool = False) -> None:
        """Save a checkpoint of this step, unless this step was resumed or saved last, or none was taken.

        With `save.asynchronous` the state is copied to host memory here, and written while training continues. An
        earlier save is waited for first. The checkpoint is sure to exist once `finish_saves` has returned, or with
        `wait`.
        Raises UserError: it, or the one before, cannot be written; see `Checkpoints.save`. Or weights or moments are
            not finite, and nothing is saved.
        """
        if self.step in (0, self._begun):
            if wait:
                self.finish_saves()
            return
        started = time.perf_counter()
        self.finish_saves()
        self._check_finite()
        world, state = self.strategy.world, state_of(self.strategy)
        own = RankState(state, world)
        with world.together():
            manifest = self._manifest(state)
        self._begun = self.step
        if wait or not self._config.save.asynchronous:
            self._write(self.step, own, manifest, world, started)
            self.saved = self.step
        else:
            own.stage()
            held = time.perf_counter() - started
            write = partial(self._write, self.step, own, manifest, world.for_threads(), started, held)
            self._background.begin(write)

    def _manifest(self, state: State) -> Callable[[dict[str, FileEntry]], Manifest]:
        """Return a function that makes the manifest of this step, given its files."""
        assert self.before is not None
        rest = Manifest(
            progress=RunProgress(
                step=self.step,
                updates=state.updates,
                tokens_seen=self.tokens_seen,
                skipped_steps=self.guard.skipped,
                recent_losses=list(self.guard.recent),
                before=[(mean.total, mean.tokens) for mean in self.before.means()],
                before_blocks=self.before.blocks,
                metrics=self._metrics.settle(),
            ),
            layout=read_layout(self._config.distributed, self._config.train, self.setup, self.strategy.world),
            config=self._config.model_dump(mode="json"),
            identity=self.setup.record.identity,
            versions=versions(),
            parameters=state.parameters,
            files={},
        )
        return lambda files: rest.model_copy(update={"files": files})

    def _write(
        self,
        step: int,
        state: RankState,
        manifest: Callable[[dict[str, FileEntry]], Manifest],
        world: World,
        started: float,
        held: float | None = None,
    ) -> None:
        """Write and log a step's checkpoint, here or in a thread. held: seconds that training waited; None: all."""
        size = self.checkpoints.save(state, manifest, step, self._config.save.keep, world)
        seconds = time.perf_counter() - started
        event = {"step": step, "seconds": seconds, "held": seconds if held is None else held, "bytes": size}
        self._timing.write("save", event)
        waited = "" if held is None else f", training waited {held:.1f} s"
        self._log(f"saved     step {step:,}: {size / 2**20:,.1f} MiB in {seconds:.1f} s{waited}")

    @property
    def written(self) -> bool:
        """Whether this rank has written its part of an unfinished save. Raises Exception: it failed here alone."""
        return self._background.has_ended()

    def finish_saves(self) -> None:
        """Wait, on all ranks, for the save that is being written. Raises UserError: as `Checkpoints.save`."""
        if self._background.busy:
            self._background.finish()
            self.saved = self._begun

    @contextmanager
    def finish_save_on_error(self) -> Iterator[None]:
        """Finish a save however the block ends; its failure replaces an error that only stopped the block."""
        try:
            yield
            self.finish_saves()
        except BaseException as error:
            fault: BaseException | None = None
            if self._background.busy:
                self._log(f"waiting   for the checkpoint of step {self._begun:,}")
                try:
                    self.finish_saves()
                except BaseException as failure:
                    fault = failure
            if isinstance(fault, UserError):
                if isinstance(error, UserError):
                    raise UserError(f"{error}; {fault}") from None
                if isinstance(error, KeyboardInterrupt | OtherRankFailed):
                    raise fault from None
                error.add_note(f"Besides: {fault}")
            raise

    def export(self, target: Path) -> None:
        """Leave the model in a folder unless it is there. Raises UserError: it cannot be, or a weight is not finite."""
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
                safe = "nothing is saved yet" if self.saved is None else f"step {self.saved} is saved"
                for note in export_step(self._folder, target, self.setup, self._config, self.step, weights, safe):
                    self._log(f"readers   {note}")
        self._timing.write("export", {"step": self.step, "seconds": time.perf_counter() - started})

    def export_if_kept(self) -> None:
        """Export this step's model if it is one of those that `save.last` keeps; the trained one comes later."""
        if self.step in self._config.save.exports(self._config.train.steps):
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


def read_layout(distributed: DistributedConfig, train: TrainConfig, setup: Setup, world: World) -> ProcessLayout:
    """Return the device of a run, and how it is spread over processes."""
    return ProcessLayout(
        processes=world.size,
        sequence_parallel=distributed.sequence_parallel,
        zero_stage=distributed.zero_stage,
        offload=distributed.offload,
        micro_batch=train.micro_batch,
        loss_chunk=train.loss_chunk or default_chunk(head_of(setup.model), world.device),
        device=setup.record.device,
        attention=setup.loaded.engine,
        deterministic=train.deterministic and world.device.type == "cuda",
        fused=is_compiled(setup.model),
        float32_products=multiplies_in_float32(setup.model.dtype, world.device),
    )
