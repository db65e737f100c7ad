"""What is kept of a run."""

from typing import Self

from pydantic import Field, model_validator

from torchtrain.config.section import Count, CountOrZero, Section


class FinalSaves(Section):
    """The saves of a run's last steps, closer together than those before: models to average, say."""

    steps: Count = Field(description="how many steps before the end they begin")
    every: Count = Field(description="steps between two of them; they are counted back from the last step, which saves")

    @model_validator(mode="after")
    def _every_fits(self) -> Self:
        if self.every > self.steps:
            raise ValueError(f"every {self.every} is more than steps {self.steps}; lower it")
        return self


class SaveConfig(Section):
    """What is kept of a run: checkpoints to go on from, and models to use."""

    every: CountOrZero = Field(
        default=100, description="steps between two checkpoints, from which `torchtrain resume` goes on; 0 makes none"
    )
    final: FinalSaves | None = Field(
        default=None, description="other steps between two checkpoints for the end of the run, such as every 10 of 50"
    )
    asynchronous: bool = Field(
        default=True,
        description="copy the state to host memory (12 bytes a weight) and write it while training goes on: the same "
        "bits on the disk, whole or not there as ever, but a kill in the steps that it takes goes back one save more",
    )
    keep: Count = Field(default=2, description="checkpoints that are kept, the last ones")
    last: Count = Field(
        default=1,
        description="models that are kept: the trained one, and those of the last saves before it in exports/",
    )

    @model_validator(mode="after")
    def _saves_for_the_last(self) -> Self:
        if self.last > 1 and not self.every and self.final is None:
            raise ValueError(
                f"last {self.last} needs every above 0: models are kept of the steps that save; change one"
            )
        return self

    def schedule(self, steps: int) -> tuple[range, range]:
        """Return the steps of a run of `steps` that save: those by `every`, then those of the end, which `final` or the
        last step makes.
        """
        first = max(0, steps - self.final.steps) if self.final is not None else steps - 1
        every = range(self.every, first + 1, self.every) if self.every else range(0)
        if self.final is None:
            return every, range(steps, steps + (1 if self.every else 0))
        return every, range(
            steps - (steps - first - 1) // self.final.every * self.final.every, steps + 1, self.final.every
        )
