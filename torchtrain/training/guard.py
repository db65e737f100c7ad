"""Bad steps, which must not update the weights: the loss or gradient is not finite, or the loss jumps."""

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anchorline.errors import UserError
from anchorline.files import replace_file
from torchtrain.config import TrainConfig
from torchtrain.data import PackedRows
from torchtrain.training.events import finite

WINDOW = 16


class Guard:
    """Finds bad steps before they update the weights, writes their rows to a file each in `folder` (on the rank that
    `writes`), and counts them.

    skipped: the number of steps left out so far.
    recent: losses of the last steps, the oldest first.
    """

    def __init__(
        self,
        train: TrainConfig,
        rows: PackedRows,
        folder: Path,
        writes: bool,
        skipped: int = 0,
        recent: Iterable[float] = (),
    ) -> None:
        self._train, self._rows, self._folder, self._writes = train, rows, folder, writes
        self.skipped = skipped
        self.recent = deque(recent, maxlen=WINDOW)

    def fault_of_loss(self, loss: float | None) -> str | None:
        """Return what is wrong with a step's loss, or None. A loss of None means that the step had no label."""
        if loss is None:
            return None
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        spike = self._train.loss_spike
        if spike is not None and len(self.recent) == WINDOW:
            mean = sum(self.recent) / WINDOW
            if loss > spike * mean:
                return (
                    f"the loss is {loss:.4g}, above train.loss_spike {spike:g} x {mean:.4g}, the mean of {WINDOW} steps"
                )
        return None

    def fault_of_norm(self, norm: float) -> str | None:
        """Return what is wrong with a gradient's norm, or None."""
        return None if math.isfinite(norm) else f"the gradient's norm is {norm}"

    def note_good(self, loss: float | None) -> None:
        """Record the loss of a good step."""
        if loss is not None:
            self.recent.append(loss)

    def leave_out(self, step: int, fault: str, values: Mapping[str, Any]) -> None:
        """Record a bad step (from 1) and its fault. Raises UserError: more than `skip_bad_steps`. Raises OSError."""
        path = self._folder / f"step-{step:08d}.json"
        if self._writes:
            self._folder.mkdir(exist_ok=True)
            content = {"step": step, "fault": fault, **finite(values), "rows": self._rows_of(step)}
            replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
        if self.skipped < self._train.skip_bad_steps:
            self.skipped += 1
            return
        allowed = self._train.skip_bad_steps
        left_out = f" ({self.skipped} steps were left out before it)" if allowed else ""
        raise UserError(
            f"step {step}: {fault}{left_out}; nothing was updated; its rows are in {path}; lower train.learning_rate "
            f"({self._train.learning_rate}), warm up longer, set model.dtype: float32, or train.skip_bad_steps above "
            f"{allowed}"
        )

    def _rows_of(self, step: int) -> list[dict[str, Any]]:
        store, count = self._rows.store, self._train.sequences_per_step
        rows = []
        for number in range((step - 1) * count, step * count):
            epoch, row = self._rows.locate(number)
            spans = []
            for span in self._rows.plan(epoch).spans(row):
                document = int(self._rows.documents[span.document_index])
                domain = store.domains[int(store.document_domains[document])]
                spans.append({"document": document, "domain": domain, "start": int(span.start), "stop": int(span.stop)})
            rows.append({"row": number, "epoch": epoch, "spans": spans})
        return rows
