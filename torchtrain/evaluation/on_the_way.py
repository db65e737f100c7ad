"""Evaluation of a model that is being trained, between two steps, without changing a bit of the training.

What answers is a second tree of modules on the same weights (`share_weights`): with its own buffers, its own config,
transformers' own attention and a KV cache. Of the training's model nothing is touched, not even RoPE's frequencies,
which some types change as they meet longer rows. Greedy answers draw nothing; but lm-eval does, when it is imported
and when it makes samples, so the generators' states are put back.

A suite that cannot be measured is refused before the training begins: settings, samples, a model that it does not fit.
What fails later is of the moment (a full disk, no memory left, a cache that was removed) or a bug of ours, and no
reason to lose a training: a line says it, and the next evaluation tries again.
"""

import copy
import hashlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anchorline.errors import UserError, disk_fault, quoted, quoted_reason
from anchorline.files import resolve
from torchtrain.checkpoint import rng
from torchtrain.config import Config
from torchtrain.evaluation.engines import TorchEngine
from torchtrain.evaluation.evaluate import Checkpoint, EvaluatedModel, check_samples, check_suite, measure
from torchtrain.evaluation.materials import Materials
from torchtrain.evaluation.perplexity import check_logits
from torchtrain.evaluation.prompt_tokens import check_tokenizer
from torchtrain.evaluation.results import Training
from torchtrain.evaluation.suite import Suite, load_suite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class TrainingEvaluation:
    """What a run measures on its way.

    Args:
        config: the run's; `evaluation.every` is above 0.

    Raises:
        UserError: the suite cannot be read, or asks for what a training cannot give.
    """

    def __init__(self, config: Config) -> None:
        section = config.evaluation
        overrides = [] if section.samples is None else [f"samples={section.samples}"]
        self._suite: Suite = load_suite(section.suite, overrides)
        self._source_of_suite = section.suite
        self._lengths = sorted({*section.lengths} or {config.pack.sequence_length})
        if self._lengths[-1] > config.pack.sequence_length:
            raise UserError(
                f"evaluation.lengths {self._lengths[-1]}: the model is trained for pack.sequence_length "
                f"{config.pack.sequence_length}; give no more"
            )
        if self._suite.backend != "torch":
            raise UserError("evaluation.suite: on the way the model itself answers; set backend: torch in it")
        if self._suite.device_map is not None:
            raise UserError("evaluation.suite: on the way the model lies where it is trained; remove device_map there")
        if self._suite.dtype not in (None, config.model.dtype):
            raise UserError(f"evaluation.suite: its dtype is not model.dtype ({config.model.dtype}); remove it there")
        with self._name_the_section():
            check_suite(self._suite, self._lengths)
        self._every, self._last, self._dtype = section.every, config.train.steps, config.model.dtype
        folder = resolve("run.folder", config.run.folder)
        self.out, self._source = folder.with_name(f"{folder.name}-on-the-way"), str(folder)
        self._materials = Materials(self._suite)

    def check_new(self) -> None:
        """Check that no results stand where a new run's will.

        Raises:
            UserError: some do, of another run: `compare` would take them for this one's.
        """
        if next(self.out.glob("*/*.json"), None) is not None:
            raise UserError(
                f"evaluation: {quoted(self.out)} holds results of another run; move them away, or choose another "
                "run.folder"
            )

    def check_fits(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast") -> None:
        """Make all samples, and look at the model, so that nothing of the suite is found wrong after steps were taken.

        Raises:
            UserError: what cannot be measured, and not for want of a material.
        """
        with _keep_generators(), self._name_the_section():
            check_tokenizer(tokenizer, model.name_or_path or "the model")
            check_samples(self._suite, self._lengths, tokenizer, self._materials)
            if self._suite.perplexity is not None:
                check_logits(share_weights(model))

    @contextmanager
    def _name_the_section(self) -> Iterator[None]:
        """Say of a mistake which settings of the training it is in."""
        try:
            yield
        except UserError as error:
            lengths = ", ".join(map(str, self._lengths))
            raise UserError(f"evaluation (suite {self._source_of_suite}, lengths {lengths}): {error}") from None

    def due(self, step: int) -> bool:
        """Whether a model is measured after so many steps: every so many, and after the last."""
        return step > 0 and (step % self._every == 0 or step == self._last)

    def measure(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerFast",
        step: int,
        say: Callable[[str], None],
        pulse: Callable[[], None],
        training: Training | None = None,
    ) -> None:
        """Measure a model as it is after a step; what was finished of it before is taken over. What fails is told.

        Args:
            model: the one that is trained; it is left as it is.
            tokenizer: of the model.
            step: steps done.
            say: takes lines of progress.
            pulse: called between two batches of prompts; may end the run, by what it raises.
            training: how the model is trained, for its results.
        """
        ending: list[BaseException] = []

        def end_or_go_on() -> None:
            try:
                pulse()
            except BaseException as error:
                ending.append(error)
                raise

        try:
            self._measure(model, tokenizer, step, say, end_or_go_on, training)
        except Exception as error:
            if ending:
                raise
            rest = "training goes on, the next evaluation tries again"
            say(f"warning   evaluation after step {step:,} failed: {_tell(error)}; {rest}")
        if model.device.type == "cuda":  # no longer held by an exception either
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(model.device)  # the next step tells its own

    def _measure(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerFast",
        step: int,
        say: Callable[[str], None],
        pulse: Callable[[], None],
        training: Training | None,
    ) -> None:
        with _keep_generators() as put_back:

            def on_batch() -> None:
                put_back()  # who ends the run saves them
                pulse()

            engine = TorchEngine(lambda: share_weights(model), self._suite, tokenizer)
            checkpoint = Checkpoint(f"step-{step:08d}", step, self._source, training)
            evaluated = EvaluatedModel(checkpoint, tokenizer, engine, state_digest(model), self._dtype)
            arguments = (evaluated, self._suite, self._lengths, self.out, self._materials)
            measure(*arguments, replace=True, say=say, pulse=on_batch)


def _tell(error: Exception) -> str:
    """Return what failed, on one line; of what nobody foresaw, where."""
    if isinstance(error, UserError):
        return str(error).removeprefix("--out: ")  # which is a setting of `torchtrain evaluate`
    if isinstance(error, OSError):
        return disk_fault(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return quoted_reason(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}, line {where.lineno}"
    return f"{type(error).__name__}: {quoted_reason(error)} ({place}; a bug, please report it)"


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
