"""Records of a Hugging Face data set: a folder on this disk, or a hub id; the hub is asked once before the wait."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from anchorline.errors import UserError, one_line, quoted
from torchtrain.config import Source
from torchtrain.data.files import ROWS_AT_A_TIME, missing_datasets, rows_of

_SECONDS = 10.0  # the hub has to answer, once
_MOST_ID = 96  # characters of an id on the hub
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def count_shards(source: Source) -> int:
    """Return into how many pieces a `dataset` source can be cut: its files, as a rule.

    Raises:
        UserError: as `dataset_items`.
    """
    with _reads(source) as rows:
        return int(rows(streaming=True).num_shards)


def dataset_items(source: Source, shard: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (where it stands, item) of a `dataset` source in its order. No code of the data set is run.

    Args:
        source: which data set.
        shard: read only this one of `count_shards`.

    Raises:
        UserError: there is no such data set, it cannot be read on, or the package datasets is missing.
    """
    name = f"{source.dataset} [{source.split}]" + ("" if shard is None else f" shard {shard}")
    number = 0
    with _reads(source, lambda: number) as rows:
        found = rows(streaming=source.streaming or shard is not None)
        if shard is not None:
            found = found.shard(num_shards=found.num_shards, index=shard)
        # As Arrow has them: of a string that is not UTF-8, datasets' own rows would raise for all that follow it.
        tables = cast(Iterator[Any], found.with_format("arrow").iter(batch_size=ROWS_AT_A_TIME))
        for table in tables:
            for item in (item for batch in table.to_batches() for item in rows_of(batch)):
                number += 1
                yield f"{name} record {number}", item


@contextmanager
def _reads(source: Source, read: Callable[[], int] = lambda: 0) -> Iterator[Callable[..., Any]]:
    """Give what loads a data set; what it raises, then or later, is told in one line."""
    assert source.dataset is not None
    shown = f"data.sources: dataset {quoted(source.dataset)}"
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise missing_datasets(f"dataset {quoted(source.dataset)}") from None
    is_folder = _folder(source.dataset, shown)
    unreachable = None if is_folder else _ask_hub(source, shown)

    def load(streaming: bool) -> Any:
        if is_folder and (saved := _saved_folder(source)) is not None:
            rows = _load_saved(saved, source.split)
            return rows.to_iterable_dataset() if streaming else rows
        found: Any = datasets.load_dataset  # whose types want to know whether it streams
        return found(source.dataset, source.subset, split=source.split, streaming=streaming, revision=source.revision)

    try:
        with _from_cache() if unreachable else nullcontext():
            yield load
    # What a data set, however damaged, makes of its readers; not how a process ends (`torchtrain.errors`).
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RuntimeError,
        ImportError,
        DatasetsError,
    ) as error:
        if unreachable and not read():
            raise UserError(
                f"{shown}: {unreachable}; {_tell_where()}, nor does datasets' cache hold what was read of it before; "
                "give a folder, or try again"
            ) from None
        said = one_line(error)[:1000]
        if error.__cause__ is not None:  # datasets' last word is often only that it failed
            said += f" ({one_line(error.__cause__)[:1000]})"
        raise UserError(
            f"{shown} (subset {quoted(source.subset)}, split {quoted(source.split)}) "
            f"cannot be read after record {read()}: {said}"
        ) from None


def _folder(dataset: str, shown: str) -> bool:
    """Whether a data set is a folder of this disk; if not, its name can be one of the hub's."""
    path = Path(dataset)
    try:
        if path.is_dir():
            return True
        there = path.exists()
    except (OSError, ValueError):  # too long a name, or NUL in it
        there = False
    if there:
        raise UserError(f"{shown}: is a file; give it as files, or the folder it lies in")
    if not _ID.fullmatch(dataset) or len(dataset) > _MOST_ID:
        raise UserError(f"{shown}: {_tell_where()}, and a hub id is a name such as owner/set; mend the path")
    return False


def _saved_folder(source: Source) -> Path | None:
    """Return where `save_to_disk` left the data set, or its subset as a folder of it; None: it is another folder."""
    assert source.dataset is not None
    folder = Path(source.dataset, source.subset or "")
    left = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return folder if left and folder.resolve().is_relative_to(Path(source.dataset).resolve()) else None


def _load_saved(folder: Path, split: str) -> Any:
    """Return a split of what `save_to_disk` left; of a data set without splits its rows, if they are of this one.

    Raises:
        ValueError: it has no such split.
        OSError, ...: what `datasets` raises.
    """
    import datasets

    found = datasets.load_from_disk(str(folder))
    splits: dict[str, Any] = (
        {str(name): rows for name, rows in found.items()}
        if isinstance(found, datasets.DatasetDict)
        else {str(found.split or split): found}
    )
    if split not in splits:
        raise ValueError(f"it has no split {split!r}, but {', '.join(sorted(splits))}")
    return splits[split]


def _tell_where() -> str:
    return f"there is no such folder (from {Path.cwd()})"


def _ask_hub(source: Source, shown: str) -> str | None:
    """Ask the hub for a data set, once and with a limit; datasets would ask for minutes. None: it answers.

    Returns:
        Why the hub does not answer; what was read before may stand in datasets' cache.

    Raises:
        UserError: it answers that there is no such data set, or none for this user.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    assert source.dataset is not None
    try:
        huggingface_hub.HfApi().dataset_info(source.dataset, revision=source.revision, timeout=_SECONDS)
    except GatedRepoError:
        raise UserError(f"{shown}: the hub asks for its terms to be accepted; log in (hf auth login)") from None
    except RevisionNotFoundError:
        raise UserError(f"{shown}: the hub has no revision {quoted(source.revision)} of it") from None
    except RepositoryNotFoundError:
        raise UserError(f"{shown}: {_tell_where()}, and the hub has none of this name, or not for you") from None
    except _transport_errors() as error:
        if huggingface_hub.constants.is_offline_mode():
            return "the hub is not asked (HF_HUB_OFFLINE)"
        return f"the hub gave no answer within {_SECONDS:.0f} s ({one_line(error)[:200]})"
    return None


def _transport_errors() -> tuple[type[BaseException], ...]:
    """Return what the hub's client raises when there is no answer; its http package depends on its version."""
    from huggingface_hub.errors import HfHubHTTPError

    http = tuple(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return (OSError, ValueError, *http)


@contextmanager
def _from_cache() -> Iterator[None]:
    """Let datasets look into its cache only."""
    from datasets import config
    from huggingface_hub import constants

    places, name = (config, constants), "HF_HUB_OFFLINE"
    before = [getattr(place, name) for place in places]
    for place in places:
        setattr(place, name, True)
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(place, name, value)
