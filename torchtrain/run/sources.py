"""What of this machine's files a run is made of: none of it may stand in the run's folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from anchorline.files import expand
from torchtrain.config import Config
from torchtrain.data.corpus import source_files
from torchtrain.data.remote import is_url


def local_sources(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield each file or folder, with the field that names it."""
    yield from _with_links("model.source", expand(config.model.source))
    if config.data.prepared is not None:
        yield from _with_links("data.prepared", expand(config.data.prepared))
    for number, source in enumerate(config.data.sources):
        pattern, name = (source.files, "files") if source.files is not None else (source.texts, "texts")
        if pattern is not None and not is_url(pattern):
            yield from ((f"data.sources.{number}.{name}", Path(file.place)) for file in source_files(source))
        elif source.dataset is not None:
            yield from _with_links(f"data.sources.{number}.dataset", expand(source.dataset))


def _with_links(field: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a folder and what links lead out of it: a hub's cache holds nothing else."""
    yield field, folder
    for place, folders, names in os.walk(folder):
        yield from ((field, path) for name in (*folders, *names) if (path := Path(place, name)).is_symlink())
