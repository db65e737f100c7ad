"""The tasks of a preparation: which parts of which sources each one reads.

They depend on the config and on what the sources hold, never on who does the work: so neither tokens nor their order
do.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from torchtrain.config import Preparation, Source
from torchtrain.data.corpus import SourcePart, list_parts

FAILURES = "failures"  # in the folder of a preparation: a file for each task that failed, with the reason

# Bytes of source files that a task reads, at least one file. Each task leaves a shard.
TASK_BYTES = 2**28
# Of a data set the sizes of shards are not known before they are read, and each task asks the hub what there is.
_SHARDS_OF_A_DATASET = 16


@dataclass(frozen=True)
class Task:
    """Consecutive parts of a source, read by one process into one shard; no parts: all of it, which has none."""

    source: int  # in `data.sources`
    parts: tuple[SourcePart, ...] = ()


def list_tasks(preparation: Preparation) -> list[Task]:
    """Return what each task reads, in order: small files together, up to `TASK_BYTES`.

    A source with `max_documents` is read by one task, for where it ends is known only to who has read it so far.

    Raises:
        UserError: as `torchtrain.data.corpus.read`.
    """
    tasks: list[Task] = []
    for number, source in enumerate(preparation.data.sources):
        if source.demo is not None or source.max_documents is not None:
            tasks.append(Task(number))
            continue
        tasks += [Task(number, tuple(parts)) for parts in _group(source, TASK_BYTES)]
    return tasks


def _group(source: Source, most: int) -> list[list[SourcePart]]:
    groups: list[list[SourcePart]] = []
    room = 0
    for part in list_parts(source):
        size = most // _SHARDS_OF_A_DATASET if part.bytes is None else part.bytes
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(part)
        room -= size
    return groups


def digest_of(tasks: Sequence[Task]) -> str:
    """Return a digest of which task reads what, wherever files lie."""
    told = [(task.source, [(part.number, part.bytes) for part in task.parts]) for task in tasks]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
