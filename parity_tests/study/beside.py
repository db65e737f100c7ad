"""Forward passes of a torch model side by side, compared layer by layer.

Legend: S shifts, side by side · P pairs of them · L layers · H query heads · K key/value heads · G = H / K · T tokens
of a row · Q queries of a block · D head_dim.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ropestudy.measures import Sums, weights


@dataclass(frozen=True)
class Attended:
    """One run at one layer, in the model's dtype and on its device: rotated q [H, T, D], k [K, T, D]; weights [H, T, T]
    where the implementation returns them."""

    q: Tensor
    k: Tensor
    weights: Tensor | None
    scale: float

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Probabilities, scaled logits of queries start..stop over keys 0..stop, float64 [H, Q, stop]; 0 if unseen."""
        H, _, D = self.q.shape
        q_KGQD = self.q[:, start:stop].double().reshape(len(self.k), -1, stop - start, D)
        k_K1TD = self.k[:, None, :stop].double()
        logits = (q_KGQD @ k_K1TD.transpose(-1, -2) * self.scale).reshape(H, stop - start, stop)
        index = torch.arange(stop, device=logits.device)
        unseen = index[start:, None] < index
        if self.weights is not None:
            return self.weights[:, start:stop, :stop].double(), logits.masked_fill(unseen, 0)
        return logits.masked_fill(unseen, -torch.inf).softmax(-1), logits.masked_fill(unseen, 0)


def side_by_side(
    model: Any, ids_T: np.ndarray, positions_ST: np.ndarray, at_layer: Callable[[int, list[Attended]], None]
) -> None:
    """A forward pass for each row of positions; `at_layer(layer, runs)` is called when all have attended in that layer.

    Each pass is a thread and a batch of its own. They take turns, so what a pass needs while it computes is there once;
    what stays is its hidden states and one layer's `Attended`. An error of a pass or of `at_layer` is raised here.
    """
    device = model.device
    ids = torch.from_numpy(ids_T)[None].to(device)
    turn, own, failed, layers = threading.Lock(), threading.local(), [], count()
    runs: list[Any] = [None] * len(positions_ST)

    def all_are_here() -> None:
        with torch.no_grad():
            at_layer(next(layers), runs)
        runs[:] = [None] * len(runs)

    meeting = threading.Barrier(len(runs), all_are_here)

    def take(found: Attended) -> None:
        runs[own.place] = found
        turn.release()
        try:
            meeting.wait()
        finally:
            turn.acquire()

    def forward(place: int) -> None:
        own.place = place
        positions = torch.from_numpy(positions_ST[place])[None].to(device)
        try:
            with turn, torch.no_grad():
                model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
        except threading.BrokenBarrierError:
            pass  # another pass failed, and says why
        except BaseException as error:  # whatever it is, the others must not wait for this one
            failed.append(error)
            meeting.abort()

    with _probe(model, take):
        threads = [threading.Thread(target=forward, args=(place,)) for place in range(len(runs))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # an interrupt: every pass stops at its next layer
            if any(thread.is_alive() for thread in threads):
                meeting.abort()
                for thread in threads:
                    thread.join()
    if failed:
        raise failed[0]


@contextmanager
def _probe(model: Any, take: Callable[[Attended], None]) -> Iterator[None]:
    """Show what goes into the model's attention function and the weights it returns; the model gets none back."""
    chosen = model.config._attn_implementation

    def probe(module: Any, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        if chosen == "eager":  # transformers keeps it in each model's own file
            attend = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attend = ALL_ATTENTION_FUNCTIONS[chosen]
        out, returned = attend(module, query, key, *rest, **named)
        scale = named.get("scaling", query.shape[-1] ** -0.5)
        take(Attended(query[0], key[0], None if returned is None else returned[0], scale))
        return out, None

    AttentionInterface.register("study_probe", probe)
    AttentionMaskInterface.register("study_probe", AttentionMaskInterface()[chosen])
    model.set_attn_implementation("study_probe")
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


class PairSums:
    """`Sums` of pairs of runs of a row under `full`, by layer and block of queries: what `engine.compare` sums."""

    def __init__(self, tokens: int, pairs: Sequence[tuple[int, int]], query_block: int, device: Any = "cpu"):
        """pairs: places of two runs each. Memory is S H query_block T, in float64."""
        self.pairs, self.query_block = pairs, query_block
        self._n_T = torch.from_numpy(weights(np.ones(tokens, np.int64))).to(device)
        parts = ("column", "logit", "row", "mass")
        self._of = {name: torch.zeros(len(pairs), tokens, dtype=torch.float64, device=device) for name in parts}
        self._square_P = torch.zeros(len(pairs), dtype=torch.float64, device=device)
        self._head_LPH: list[Tensor] = []

    def add(self, layer: int, runs: list[Attended]) -> None:
        """Add one layer."""
        assert layer == len(self._head_LPH)
        T, H = len(self._n_T), len(runs[0].q)
        head_PH = self._n_T.new_zeros(len(self.pairs), H)
        for start in range(0, T, self.query_block):
            stop = min(start + self.query_block, T)
            blocks = [run.block(start, stop) for run in runs]
            mass_ST = [probs.sum((0, 1)) for probs, _ in blocks]
            for place, (a, b) in enumerate(self.pairs):
                d_HQT, d_logit_HQT = ((blocks[a][i] - blocks[b][i]).abs_() for i in range(2))
                by_column_HT = d_HQT.sum(1)
                self._of["column"][place, :stop] += by_column_HT.sum(0)
                self._of["logit"][place, :stop] += d_logit_HQT.sum((0, 1))
                self._of["row"][place, start:stop] += d_HQT.sum((0, 2))
                self._of["mass"][place, :stop] += mass_ST[a]
                self._square_P[place] += d_logit_HQT.square_().sum()
                head_PH[place] += by_column_HT @ self._n_T[:stop]
        self._head_LPH.append(head_PH)

    def sums(self) -> list[Sums]:
        """Of each pair, over the layers that were added."""
        head_PLH = torch.stack(self._head_LPH, 1).cpu().numpy()
        parts = {name: x.cpu().numpy() for name, x in self._of.items()}
        return [
            Sums(
                *(parts[name][place] for name in ("column", "logit", "row", "mass")),
                head_LH=head_PLH[place],
                square=float(self._square_P[place]),
            )
            for place in range(len(self.pairs))
        ]
