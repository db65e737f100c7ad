"""TensorBoard and Weights & Biases: told what `metrics.jsonl` holds, where the config asks for them."""

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from anchorline.errors import UserError
from torchtrain.config import Config


def check_writers(config: Config) -> None:
    """Check that what `log` asks for is installed.

    Raises:
        UserError: it is not.
    """
    for name, asked in (("tensorboard", config.log.tensorboard), ("wandb", config.log.wandb is not None)):
        if asked and importlib.util.find_spec(name) is None:
            raise UserError(f"log.{name}: the package {name} is not installed: pip install {name}, or take the key out")


class Writers:
    """Passes events on, a context manager.

    Args:
        config: the run's; `check_writers` has passed.
        folder: the run's; TensorBoard's files stand in `tensorboard/`, those of Weights & Biases in `wandb/`.
        first: steps done so far. TensorBoard replaces what it knows of later ones, from before an interruption; Weights
            & Biases keeps it, and takes nothing new of these steps.

    Raises:
        UserError: Weights & Biases does not begin.
    """

    def __init__(self, config: Config, folder: Path, first: int) -> None:
        self._tensorboard = self._wandb = None
        if config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1 if first else None)
        if config.log.wandb is not None:
            import wandb  # pyright: ignore[reportMissingImports]

            # One run there for one folder here, however often it is resumed.
            name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
            try:
                self._wandb = wandb.init(
                    project=config.log.wandb,
                    id=name,
                    name=folder.name,
                    dir=str(folder),
                    resume="allow",
                    config=config.model_dump(mode="json"),
                )
            except Exception as error:  # no login, no network, no such project: each of its releases has other classes
                raise UserError(f"log.wandb {config.log.wandb!r}: {error}; mend that, or take the key out") from error

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind is None else 1)

    def write(self, name: str, step: int, event: Mapping[str, Any]) -> None:
        """Pass one event on: its numbers, by dotted names under the event's."""
        numbers = dict(_numbers(event, name))
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)


def _numbers(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        place = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, place)
        elif isinstance(value, int | float) and key != "step":
            yield place, value
