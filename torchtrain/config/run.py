"""The run: its folder, saves, evaluations and logs."""

import importlib.util
from typing import Literal, Self

from pydantic import Field, model_validator

from anchorline.errors import UserError
from torchtrain.config.section import Count, CountOrZero, Name, PathText, Section


class RunConfig(Section):
    """The run's folder and seed."""

    folder: PathText = Field(description="folder for everything that the run writes")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of packing, shuffling and torch")


class SaveConfig(Section):
    """What a run saves: checkpoints to resume from, and models to use."""

    every: CountOrZero = Field(
        default=100,
        description="steps between two checkpoints, for `torchtrain resume`; the last step saves too; 0: no "
        "checkpoints",
    )
    asynchronous: bool = Field(
        default=True,
        description="copy the state to host memory (12 bytes a weight) and write it while training goes on",
    )
    keep: Count = Field(default=2, description="number of checkpoints to keep")
    last: Count = Field(
        default=1, description="number of models to keep: the trained one, and earlier ones in exports/"
    )
    last_every: Count | None = Field(
        default=None, description="steps between two of these models; default: as checkpoints"
    )

    @model_validator(mode="after")
    def _saves_for_the_last(self) -> Self:
        if self.last > 1 and not self.every and self.last_every is None:
            raise ValueError(f"last {self.last} needs last_every where every is 0; change one")
        return self

    def before_last(self, steps: int) -> range:
        """Return the steps that save, of a run of `steps`, without the last one, which saves unless `every` is 0."""
        return range(self.every, steps, self.every) if self.every else range(0)

    def exports(self, steps: int) -> range:
        """Return the steps, of a run of `steps`, whose models are kept in exports/."""
        if self.last_every is None:
            saves = self.before_last(steps)
            return saves[max(0, len(saves) - self.last + 1) :]
        first = steps - min(self.last - 1, (steps - 1) // self.last_every) * self.last_every
        return range(first, steps, self.last_every)


class HeldOutConfig(Section):
    """Held-out loss, before and after training, and during it."""

    every: CountOrZero = Field(
        default=0, description="steps between two measurements during training; 0: only before and after it"
    )
    sequences: Count = Field(default=8, description="most packed rows of held-out documents per domain")
    together: bool = Field(
        default=False, description="a row holds documents of all domains, an equal part each; false: of one domain"
    )


class EvaluationConfig(Section):
    """Evaluation on a suite during training, with one process, without ZeRO. Results are in FOLDER-on-the-way."""

    every: CountOrZero = Field(
        default=0, description="steps between two evaluations; the last step is evaluated too; 0: no evaluation"
    )
    suite: PathText = Field(
        default="configs/eval/ruler.yaml", description="YAML file of tasks, as for torchtrain evaluate --suite"
    )
    lengths: list[Count] = Field(default=[], max_length=64, description="tokens; default: pack.sequence_length")
    samples: Count | None = Field(default=None, description="samples of each task and length; default: the suite's")


class LogConfig(Section):
    """Services that get the content of `metrics.jsonl` through accelerate's trackers. Their packages must be installed.

    A run's folder is one run there, however often it is resumed.
    """

    report_to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        default=[],
        max_length=4,
        description="any of tensorboard, wandb, mlflow, trackio; each takes its address and login in its own way",
    )
    project: Name = Field(default="anchorline", description="project there (MLflow: experiment); not of TensorBoard")

    def check_installed(self) -> None:
        """Check that the packages are installed. Raises UserError: one is not."""
        for name in (*self.report_to, *["accelerate"] * bool(self.report_to)):
            if importlib.util.find_spec(name) is None:
                raise UserError(
                    f"log.report_to {self.report_to}: the package {name} is not installed: pip install {name}, or "
                    "report to others"
                )
