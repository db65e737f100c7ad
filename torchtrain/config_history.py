"""What configs said and meant before: a run that an earlier version began is read as that version read it.

A run's folder holds its resolved config, which names every setting that there was. So a setting that it lacks is
younger than the run.
"""

from collections.abc import Sequence
from pathlib import Path

from anchorline import settings
from torchtrain.config import EXAMPLE, Config, fill_empty_sections

# What a run did before a setting existed, only where today's default means something else.
BEFORE = {"data": {"special_tokens": "control"}, "save": {"asynchronous": False}}


def load_config_of_run(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """As `torchtrain.config.load_config`, of the resolved config that a run left; overrides go by today's names.

    Raises:
        UserError: see `anchorline.settings.load`.
    """
    return settings.load(Config, path, overrides, example=EXAMPLE, upgrade=rename_sections, prepare=restore_meaning)


def rename_sections(resolved: settings.Tree) -> settings.Tree:
    """Return a run's resolved config with today's names of sections.

    One that has both names is left as it is, to be refused.
    """
    now = {old: new for old, new in Config.FORMER_NAMES.items() if new not in resolved}
    return {now.get(name, name): section for name, section in resolved.items()}


def restore_meaning(resolved: settings.Tree) -> settings.Tree:
    """Return a run's resolved config by today's names, with what the run did wherever a setting is younger."""
    tree = fill_empty_sections(rename_sections(resolved))
    for name, values in BEFORE.items():
        if isinstance(tree.get(name), dict):
            tree[name] = values | tree[name]
    return tree
