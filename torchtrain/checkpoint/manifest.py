"""`manifest.json` of a checkpoint: everything but the tensors. It is written last."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from anchorline import environment
from anchorline.errors import UserError, quoted
from anchorline.files import FileEntry, parse_json, read_file
from torchtrain import __version__
from torchtrain.config import Section

MANIFEST = "manifest.json"
_MOST_BYTES = 1 << 28


_Natural = Annotated[int, Field(ge=0)]
_FileName = Annotated[str, Field(pattern=r"^(state-[0-9]{5,}-[0-9]{3,}|rng-[0-9]{5,})\.safetensors$")]


class DamageError(UserError):
    """A checkpoint is not what was written: the message names the file."""


class RunProgress(Section):
    """The counters of a run between two steps."""

    step: _Natural  # steps done
    updates: _Natural  # of the optimizer: steps that were not skipped
    tokens_seen: _Natural
    skipped_steps: _Natural
    recent_losses: list[float]  # what `train.loss_spike` compares with
    before: list[tuple[float, int]]  # held-out losses before training, as `Losses.means`: sum and tokens of each
    # As `HeldOut.blocks`; a run that began before they were kept has none.
    before_blocks: list[float] = Field(default=[])
    metrics: FileEntry  # the beginning of `metrics.jsonl` that belongs to these steps


class ProcessLayout(Section):
    """The device of a step, and how the step was spread over processes. Another layout gives other last digits."""

    processes: Annotated[int, Field(ge=1)]
    sequence_parallel: int
    zero_stage: int
    offload: str
    micro_batch: int
    loss_chunk: int
    device: str
    attention: str  # the engine
    deterministic: bool = False  # on a GPU
    fused: bool = False  # layers are compiled
    float32_products: bool = False  # of a bfloat16 model on a CPU (`torchtrain.products`)


class Manifest(Section):
    """Everything but the tensors. `identity` is what the run is made of, `config` the resolved one."""

    progress: RunProgress
    layout: ProcessLayout
    config: dict[str, Any]
    identity: dict[str, Any]
    versions: dict[str, str]
    parameters: dict[str, list[int]]  # shapes
    files: dict[_FileName, FileEntry]  # empty until they are written

    def dump(self) -> bytes:
        """Return it as JSON that ends with a digest of itself."""
        content = self.model_dump(mode="json")
        return json.dumps(content | {"sha256": _digest(content)}, indent=1).encode()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a checkpoint's manifest. Raises DamageError: there is none, or it is not as it was written."""
        path = folder / MANIFEST
        try:
            content = parse_json(read_file(path, _MOST_BYTES))
            digest = content.pop("sha256", None)
            if digest != _digest(content):
                raise DamageError(f"{path}: is not as it was written (its SHA-256 differs)")
            manifest = cls.model_validate_json(json.dumps(content))
            states, generators = (sum(name.startswith(of) for name in manifest.files) for of in ("state", "rng"))
            if not states or generators != manifest.layout.processes:
                raise DamageError(
                    f"{path}: files: has {states} of states and {generators} of generators, and layout.processes is "
                    f"{manifest.layout.processes}"
                )
            return manifest
        except OSError as error:
            raise DamageError(f"{path}: {str(error.strerror).lower()}") from None
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise DamageError(f"{path}: {place}: {error.errors()[0]['msg']}") from None
        except ValueError as error:
            if isinstance(error, DamageError):
                raise
            raise DamageError(f"{path}: is not a manifest ({quoted(str(error))})") from None


def versions() -> dict[str, str]:
    """Return the versions that the last bits of a result depend on."""
    packages = ("torch", "transformers", "numpy", "safetensors", "deepspeed")
    return {"torchtrain": __version__} | environment.versions(packages)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
