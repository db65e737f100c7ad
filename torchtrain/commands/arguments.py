"""Arguments of several verbs."""

from pathlib import Path
from typing import Annotated

import typer

MOST, MOST_PROCESSES = 2**31 - 1, 2**16

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML config, for example configs/demo.yaml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="override values of the file, for example train.steps=20"),
]
