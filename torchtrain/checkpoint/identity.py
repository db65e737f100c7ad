"""Checks that a resumed run has the config, model, tokenizer and data with which it began."""

from collections.abc import Iterator, Mapping
from typing import Any

from anchorline.errors import UserError, quoted
from anchorline.settings import validate
from torchtrain.checkpoint.manifest import Manifest, ProcessLayout, versions
from torchtrain.config import Config

# What may change on resume: paths, because the identity has digests of what lies there; what is written; and how a step
# is spread. Rows and their order stay the same. Some of these settings (micro-batches, chunks, ranks,
# `train.deterministic`) change the order of sums, and so the rounding.
FREE = (
    "run.folder",
    "data.cache",
    "data.prepared",
    "distributed",
    "evaluation",
    "held_out.every",
    "save",
    "log",
    "train.micro_batch",
    "train.loss_chunk",
    "train.deterministic",
    "train.skip_bad_steps",
    "train.loss_spike",
    "model.source",
    "model.activation_checkpointing",
    "model.layer_chunk",
    "model.trust_remote_code",
)
_ABSENT = "nothing"


def check_config(was: Mapping[str, Any], config: Config) -> None:
    """Check that only `FREE` settings changed since the beginning (`was`, JSON). Raises UserError: names another."""
    before = validate(Config, dict(was), "the run's config")
    changed = differences(before.model_dump(mode="json"), config.model_dump(mode="json"))
    if changes := [change for change in changed if not is_free(change[0])]:
        raise UserError(f"{_format_changes(changes)}; undo that, or train anew with a run.folder of its own")


def check_identity(was: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Check that model, tokenizer and data, as far as known, are the run's. Raises UserError: names what is not."""
    for part, advice in (
        ("tokenizer", "the tokenizer of model.source has changed; put back the one of the run"),
        ("model", "the config.json of model.source has changed; put back the one of the run"),
        ("data", "data.sources have changed; put back the data of the run"),
        ("tokens", "data.sources give other tokens; put back the data of the run"),
        (
            "weights",
            "the weights of model.source have changed; put back those of the run, or give their folder: "
            "model.source=FOLDER",
        ),
        ("split", "documents are divided otherwise into training and held out; put back the data of the run"),
    ):
        if part not in identity or (part == "weights" and part not in was):  # a run that began without their digest
            continue
        then, now = was.get(part, {}), identity[part]
        if part == "tokens":  # the same tokens may lie in other shards, whose digest is another
            then, now = ({name: value for name, value in one.items() if name != "sha256"} for one in (then, now))
        if changes := list(differences(then, now, part)):
            raise UserError(f"{advice} ({_format_changes(changes)})")


def describe_changes(manifest: Manifest, layout: ProcessLayout) -> str:
    """Return, in words, the changes since a checkpoint that move last digits; empty if there is none."""
    was, now = ({**one.model_dump(), **of} for one, of in ((manifest.layout, manifest.versions), (layout, versions())))
    return ", ".join(f"{name} {then} then, {here} now" for name, then, here in differences(was, now))


def is_free(name: str) -> bool:
    """Whether a setting, in dotted form, may differ when a run is resumed."""
    return any(name == one or name.startswith(one + ".") for one in FREE)


def differences(was: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, value then, value now) of everything that differs in two JSON trees."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            place = f"{name}.{key}" if name else str(key)
            yield from differences(was.get(key, _ABSENT), now.get(key, _ABSENT), place)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, pair in enumerate(zip(was, now, strict=True)):
            yield from differences(*pair, f"{name}.{index}")
    elif was != now:
        yield name, was, now


def _format_changes(changes: list[tuple[str, Any, Any]]) -> str:
    shown = "; ".join(f"{name}: {quoted(was, 60)} in the run, {quoted(now, 60)} now" for name, was, now in changes[:3])
    return shown + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")
