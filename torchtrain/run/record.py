"""`run.json`: what a run was begun with, for resuming it and for people."""

import os
import platform
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from anchorline.settings import validate
from torchtrain.checkpoint.manifest import versions
from torchtrain.config import Config
from torchtrain.evaluation.results import Training

MADE_BY = "torchtrain train"


class Corpus(BaseModel):
    """What a run's documents were made into."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    domains: list[dict[str, Any]]
    sources: list[dict[str, Any]]
    made_of: dict[str, Any] | None
    dropped_tokens: int
    copies: int
    copies_moved: int


class RunRecord(BaseModel):
    """The content of `run.json`. What resuming reads: `config`, `identity`, `engine`, `steps`, `began_in`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    made_by: Literal["torchtrain train"] = MADE_BY
    machine: str = Field(default_factory=platform.machine)
    versions: dict[str, str] = Field(default_factory=versions)
    began_in: str = Field(default_factory=os.getcwd)
    config: dict[str, Any]
    device: str
    engine: str  # of attention; what `auto` chose stays, because another moves the last digits
    engine_measured: str
    activation_checkpointing: bool | str
    fused: str
    processes: int
    steps: Annotated[int, Field(gt=0, lt=2**63)]
    identity: dict[str, dict[str, Any]]  # what all of it is made of, as JSON: also in every checkpoint
    model_origin: dict[str, Any]
    corpus_fingerprint: str
    corpus: Corpus

    def training(self) -> Training:
        """Return how the run's models are trained. Raises UserError: `config` or `identity` is not a run's."""
        config = validate(Config, self.config, "the run's config")
        pack, data = config.pack, self.identity.get("data", {})
        found = {
            "model": config.model.source,
            "variant": pack.variant,
            "anchor": pack.anchor,
            "split": pack.split if pack.interleave else None,
            "sequence_length": pack.sequence_length,
            "rope": self.identity.get("model", {}).get("rope_parameters") or {},
            "steps": self.steps,
            "sequences_per_step": config.train.sequences_per_step,
            "data": (self.corpus.made_of or {}) if "prepared" in data else data,  # a store has its fingerprint alone
        }
        return validate(Training, found, "the run's identity")
