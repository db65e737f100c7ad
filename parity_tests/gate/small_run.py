"""The candidate's side of a whole run: `torchtrain train` on a small corpus, interrupted, resumed and exported.

The run is the trainer's own from the files of text to the exported folder. Nothing but `take_step` is watched.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml

from anchorline.terminal import Console
from parity_tests.gate import corpus as small
from parity_tests.gate.case import CHUNKS, RUN_STEPS, GateCase, rope_settings
from parity_tests.oracle import Arrays
from torchtrain.config import Config, load_config
from torchtrain.run import recipe, steps

_INPUTS = ("input_ids", "position_ids", "document_ids", "shift_labels", "domain_ids")


@contextlib.contextmanager
def infinite_gradient(model: Any, is_so: bool) -> Iterator[None]:
    """Make the gradient of the last norm infinite in every backward pass, if `is_so`."""
    hook = model.model.norm.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    if not is_so:
        hook.remove()
    yield
    hook.remove()


class _Watch:
    """Replaces `take_step`: records the arguments and results of each step, and interrupts one step once."""

    def __init__(self, infinite_step: int) -> None:
        self._take_step, self._interrupts, self._infinite_step = steps.take_step, True, infinite_step
        self.steps: dict[int, dict[str, Any]] = {}
        self.masters: dict[str, np.ndarray] = {}  # after the last step

    def __call__(self, strategy: Any, batches: Any, domains: Any, step: int, train: Any, fault: Any, note: Any) -> Any:
        if self._interrupts and step == small.RESUMED_AFTER + 1:
            self._interrupts = False
            raise KeyboardInterrupt
        losses: list[np.ndarray] = []

        def read(each_Bt: torch.Tensor, part: Any) -> None:
            losses.append(each_Bt.detach().to("cpu", torch.float32, copy=True).numpy())
            note(each_Bt, part)

        with infinite_gradient(strategy.model, step + 1 == self._infinite_step):
            result = self._take_step(strategy, batches, domains, step, train, fault, read)
        trained = [name for name, p in strategy.model.named_parameters() if p.requires_grad]
        self.masters = {
            name: master.detach().cpu().numpy().copy()
            for name, master in zip(trained, strategy.optimizer.masters, strict=True)
        }
        inputs = {name: np.concatenate([batch.part[name].numpy() for batch in batches]) for name in _INPUTS}
        rate_and_norm = result.learning_rate, result.gradient_norm
        self.steps[step] = inputs | {"losses": np.concatenate(losses), "rate_and_norm": np.array(rate_and_norm)}
        return result


def run_side(case: GateCase, model: Any, capture: Any) -> Arrays:
    """The arrays of a run, by the oracle's names (`_RoundedOracle`).

    case: what is run.
    model: what the run begins with, in float32.
    capture: from a folder and the arrays of held-out rows to the taps of the model in it.
    """
    with TemporaryDirectory() as written:
        folder, quiet = Path(written), Console(quiet=True)
        config = _write(case, folder, model)
        watch = _Watch(case.spec.infinite_step)
        with patch.object(steps, "take_step", watch):
            with contextlib.suppress(KeyboardInterrupt):
                recipe.train(config, console=quiet)
            result = recipe.resume(config, console=quiet)
        assert result is not None, "the resumed run says that it is finished"
        arrays = {
            f"run.inputs.{name}": np.concatenate([watch.steps[n][name] for n in range(RUN_STEPS)]) for name in _INPUTS
        }
        arrays |= {f"run.losses.{n}": watch.steps[n]["losses"] for n in range(RUN_STEPS)}
        arrays |= {
            f"run.{name}": np.array([watch.steps[n]["rate_and_norm"][i] for n in range(RUN_STEPS)])
            for i, name in enumerate(("rates", "norms"))
        }
        for name, held_out in (("before", result.before), ("after", result.after)):
            means = {"": held_out.overall, ".new_positions": held_out.new_positions}
            means |= {f".{domain}": mean for domain, mean in held_out.by_domain.items()}
            arrays |= {f"run.held_out.{name}{of}": np.array([mean.value]) for of, mean in means.items() if mean.tokens}
        lengths = {"config.json": "max_position_embeddings", "tokenizer_config.json": "model_max_length"}
        read = [json.loads((result.model / file).read_text(encoding="utf-8"))[name] for file, name in lengths.items()]
        arrays["run.lengths"] = np.minimum(read, 2**53).astype(np.int64)  # 1e30 says: none
        taps = capture(str(result.model))
    arrays |= {f"run.masters.{name}": master for name, master in watch.masters.items()}
    return arrays | {f"run.exported.{name}": tap for name, tap in taps.items()}


def _write(case: GateCase, folder: Path, model: Any) -> Config:
    """Write model, tokenizer, corpus and config."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spec, corpus = case.spec, small.draw_corpus(case.spec)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(small.WORDS)}, unk_token=small.PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # transformers opens every tokenizer of a Qwen 2 with a class that knows added tokens alone.
    backend.add_tokens([AddedToken(word, lstrip=True, normalized=False) for word in small.WORDS])
    special: dict[str, Any] = {"pad_token": small.PAD, "eos_token": small.EOS, "bos_token": small.BOS}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder / "source")
    model.save_pretrained(folder / "source")
    if spec.answers:
        pairs = zip(corpus.documents, corpus.targets, strict=True)
        records = [{"input_ids": ids.tolist(), "completion_mask": of.astype(int).tolist()} for ids, of in pairs]
    else:
        records = [{"text": " ".join(small.WORDS[i] for i in ids[:-1])} for ids in corpus.documents]
    lines = [
        json.dumps(record | {"domain": small.DOMAINS[domain]})
        for record, domain in zip(records, corpus.domains, strict=True)
    ]
    source = {"files": str(folder / "corpus.jsonl"), "domain_field": "domain"}
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tree = {
        "run": {"folder": str(folder / "run"), "seed": corpus.seed},
        "model": {"source": str(folder / "source"), "dtype": spec.dtype, "attention": spec.engine},
        "rope": {"type": spec.rope, **rope_settings(spec, case.decoder_config.rope.head_dim // 2)},
        "data": {
            "sources": [source | ({"records": "tokens"} if spec.answers else {})],
            "cache": str(folder / "cache"),
            "held_out_share": small.HELD_OUT_SHARE,
        },
        "pack": {
            "sequence_length": spec.tokens,
            "strategy": "best_fit" if spec.answers else "sequential",
            "variant": spec.variant,
            "anchor": small.anchor_ids(spec).tolist(),
            "tag_template": f"{small.TAG_WORD} {{domain}}",
            "chunks": CHUNKS,
        },
        "train": case.run.model_dump(mode="json"),
        "held_out": {"sequences": small.HELD_OUT_ROWS},
        "save": {"every": small.RESUMED_AFTER, "asynchronous": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_config(folder / "config.yaml", [])
