"""Evaluation of a model that is being trained, between two steps, without changing a bit of the training.

A second tree of modules on the same weights (`share_weights`) answers, with buffers, config and attention of its own.
lm-eval draws from the process's random generators, so their states are put back. A suite that cannot be measured is
refused before the training begins; a later fault (a full disk) is a line, and the next evaluation tries again.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from anchorline.errors import UserError, disk_fault, quoted, quoted_reason
from anchorline.files import resolve
from torchtrain.checkpoint import rng
from torchtrain.config import EvaluationConfig, PackConfig
from torchtrain.data import anchor_ids
from torchtrain.evaluation.evaluate import check_suite, check_tokenizer
from torchtrain.evaluation.measure import Checkpoint, EvaluatedModel, list_jobs, measure
from torchtrain.evaluation.results import Settings, Training
from torchtrain.evaluation.suite import load_suite
from torchtrain.evaluation.tasks.materials import Materials

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class TrainingEvaluation:
    """What a run with `evaluation.every` above 0 measures while it trains. Raises UserError: its suite does not fit."""

    def __init__(self, section: EvaluationConfig, pack: PackConfig, dtype: str, run_folder: str) -> None:
        self._suite = load_suite(section.suite, [] if section.samples is None else [f"samples={section.samples}"])
        lengths = sorted({*section.lengths} or {pack.sequence_length})
        self._where = f"evaluation (suite {section.suite}, lengths {', '.join(map(str, lengths))})"
        if lengths[-1] > pack.sequence_length:
            raise UserError(
                f"evaluation.lengths {lengths[-1]}: the model is trained for pack.sequence_length "
                f"{pack.sequence_length}; give no more"
            )
        if self._suite.device_map is not None:
            raise UserError("evaluation.suite: the model in training answers; remove device_map")
        if self._suite.dtype not in (None, dtype):
            raise UserError(f"evaluation.suite: its dtype is not model.dtype ({dtype}); remove it there")
        with self._name_the_section():
            self._tasks, self._materials = check_suite(self._suite, lengths), Materials(self._suite)
        self._cannot: dict[tuple[str, int], str] = {}  # why a task cannot run at a length
        self._every, self._dtype, self._pack = section.every, dtype, pack
        folder = resolve("run.folder", run_folder)
        self.out, self._source = folder.with_name(f"{folder.name}-on-the-way"), str(folder)

    def check_new(self) -> None:
        """Check that the folder of a new run's results is empty: `compare` would take another run's for its own."""
        if next(self.out.glob("*/*.json"), None) is not None:
            raise UserError(
                f"evaluation: {quoted(self.out)} holds results of another run; move them away, or choose another "
                "run.folder"
            )

    def check_fits(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", say: Callable[[str], None]
    ) -> None:
        """Make all samples before any step; say once what cannot be measured for want of a material or of room. Raises
        UserError: something cannot be measured for another reason, or nothing can be.
        """
        with _keep_generators(), self._name_the_section():
            check_tokenizer(tokenizer, model.name_or_path or "the model", self._suite.chat_template)
            evaluated = self._evaluated(model, tokenizer, 0)
            if not list_jobs(evaluated, self._tasks, self._materials, None, lambda line: None, cannot=self._cannot):
                (task, length), reason = next(iter(self._cannot.items()))
                raise UserError(
                    f"no task can run: {task} at {length:,}: {reason}; choose longer lengths or other tasks, or set "
                    "evaluation.every: 0"
                )
        for (task, length), reason in self._cannot.items():
            say(f"evaluation {task} {length:,}: not run: {reason}")

    @contextmanager
    def _name_the_section(self) -> Iterator[None]:
        """Say of a mistake which settings of the training it is in."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self._where}: {error}") from None

    def due(self, step: int, last: int) -> bool:
        """Whether a model is measured after so many steps: every so many, and after the last."""
        return step > 0 and (step % self._every == 0 or step == last)

    def measure(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerFast",
        step: int,
        say: Callable[[str], None],
        pulse: Callable[[], None],
        training: Training | None = None,
    ) -> None:
        """Measure a model as it is after a step. What was finished of it before is taken over. A fault is logged.

        model, tokenizer: of the training; they are left as they are.
        pulse: called between two batches of prompts; may end the run, by what it raises.
        training: how the model is trained, for its results.
        """
        ending: list[BaseException] = []

        def on_batch() -> None:
            own = rng.capture()
            put_back()  # who ends the run saves them
            try:
                pulse()
            except BaseException as error:
                ending.append(error)
                raise
            rng.restore(own)  # a task may sample its answers

        try:
            with _keep_generators() as put_back:
                evaluated = self._evaluated(model, tokenizer, step, training, state_digest(model))
                jobs = list_jobs(evaluated, self._tasks, self._materials, self.out, say, True, self._cannot)
                measure(evaluated, jobs, self._suite, self.out, say=say, pulse=on_batch)
        except Exception as error:
            if ending:
                raise
            rest = "training goes on, the next evaluation tries again"
            say(f"warning   evaluation after step {step:,} failed: {_format_fault(error)}; {rest}")
        if model.device.type == "cuda":  # an exception no longer holds memory either
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(model.device)  # the next step measures its own

    def _evaluated(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerFast",
        step: int,
        training: Training | None = None,
        weights: str = "",
    ) -> EvaluatedModel:
        checkpoint = Checkpoint(f"step-{step:08d}", step, self._source, training)
        anchor = anchor_ids(tokenizer, self._pack) if self._pack.base_variant.has_anchor else []
        settings = Settings(weights=weights, anchor=anchor, dtype=self._dtype)
        return EvaluatedModel(checkpoint, tokenizer, settings, lambda: share_weights(model))


def _format_fault(error: Exception) -> str:
    if isinstance(error, OSError):
        return disk_fault(error)
    if isinstance(error, UserError | MemoryError | torch.OutOfMemoryError):
        return quoted_reason(error).removeprefix("--out: ")  # which is a setting of `torchtrain evaluate`
    return f"{type(error).__name__}: {quoted_reason(error)} (a bug, please report it)"


@contextmanager
def _keep_generators() -> Iterator[Callable[[], None]]:
    """Put the states of all random generators back after the block; give what does so within it."""
    states = rng.capture()
    try:
        yield lambda: rng.restore(states)
    finally:
        rng.restore(states)


def share_weights(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a model of the same parameters, ready to generate; all else is its own."""
    shared = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    shared.set_attn_implementation("sdpa")
    shared.config.use_cache = True
    if shared.generation_config is not None:
        shared.generation_config.use_cache = True
    return shared.eval()


def state_digest(model: "PreTrainedModel") -> str:
    """Return the SHA-256 of a model's config and weights as they are in memory."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
