"""What is measured of a run: held-out loss, and a suite while it trains."""

from pydantic import Field

from torchtrain.config.section import Count, CountOrZero, PathText, Section


class HeldOutConfig(Section):
    """Held-out loss, before and after training."""

    sequences: Count = Field(default=8, description="packed rows of held-out documents, at most, of each domain")


class EvaluationConfig(Section):
    """What a suite asks of the model while it trains; results lie beside the run's folder, in FOLDER-on-the-way.

    Nothing of the training changes by it. One process, without ZeRO.
    """

    every: CountOrZero = Field(
        default=0, description="steps between two evaluations; the last step has one too; 0: none"
    )
    suite: PathText = Field(default="configs/eval/ruler.yaml", description="as torchtrain evaluate --suite")
    lengths: list[Count] = Field(default=[], max_length=64, description="default: pack.sequence_length")
    samples: Count | None = Field(default=None, description="of each task and length; default: the suite's")
