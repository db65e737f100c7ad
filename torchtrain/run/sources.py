"""What of this machine's files a run is made of: none of it may stand in the run's folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from anchorline.files import expand
from torchtrain.config import Config
from torchtrain.data.files import find_files


def local_sources(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield each file or folder, with the field that names it."""
    yield from _with_links("model.source", expand(config.model.source))
    for number, source in enumerate(config.data.sources):
        if source.files is not None:
            yield from ((f"data.sources.{number}.files", path) for path in find_files(source.files))
        elif source.dataset is not None:
            yield from _with_links(f"data.sources.{number}.dataset", expand(source.dataset))


def _with_links(field: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a folder and what links lead out of it: a hub's cache holds nothing else."""
    yield field, folder
    for place, folders, names in os.walk(folder):
        yield from ((field, path) for name in (*folders, *names) if (path := Path(place, name)).is_symlink())
