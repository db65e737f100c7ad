"""YAML in, a config out, and back."""

from collections.abc import Sequence
from pathlib import Path

from anchorline import settings
from torchtrain.config.preparation import Preparation, TokenizerConfig
from torchtrain.config.whole import Config

EXAMPLE = "train.steps=20"  # of an override, for messages


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, validate: all in `anchorline.settings.load`.

    Raises:
        UserError: see `anchorline.settings.load`.
    """
    return settings.load(Config, path, overrides, example=EXAMPLE, prepare=fill_empty_sections)


def load_preparation(path: str | Path, overrides: Sequence[str] = ()) -> Preparation:
    """As `load_config`, of what is to be prepared; of a run's config, what it would train on is.

    Raises:
        UserError: see `anchorline.settings.load`.
    """
    return settings.load(Preparation, path, overrides, example="prepare.workers=8", prepare=_preparation_of)


def _preparation_of(tree: settings.Tree) -> settings.Tree:
    tree = fill_empty_sections(tree)
    model, data = tree.get("model"), tree.get("data")
    if isinstance(model, dict) and "tokenizer" not in tree:
        tokenizer = {name: model[name] for name in TokenizerConfig.model_fields if name in model}
        tree = {"tokenizer": tokenizer} | {name: tree[name] for name in ("data", "prepare") if name in tree}
        if isinstance(data, dict):
            tree["data"] = {name: value for name, value in data.items() if name != "prepared"}
    return tree


def dump_config(config: Config) -> str:
    """Return the resolved config, every default written out, as YAML that `load_config` reads back to an equal one."""
    return settings.dump(config.model_dump(mode="json"))


def fill_empty_sections(tree: settings.Tree) -> settings.Tree:
    """Return the tree with an empty section for one under which nothing stands, such as a bare `train:`."""
    return {name: {} if section is None else section for name, section in tree.items()}
