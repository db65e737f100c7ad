"""Samples on disk: made once for a tokenizer, length, task and seed, named by what made them, digest checked."""

import errno
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorline.environment import versions
from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import FileEntry, build_folder, differs, expand, read_json, write_file
from torchtrain.data.prepare import tokenizer_identity
from torchtrain.evaluation.choices import make_choices, subject_group
from torchtrain.evaluation.longbench import group_name, make_prompts
from torchtrain.evaluation.materials import Materials
from torchtrain.evaluation.ruler import Sample, make_samples
from torchtrain.evaluation.suite import Suite, benchmark_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FORMAT = 2  # of what makes them: another one makes other samples
_SAMPLES, _MANIFEST = "samples.jsonl", "manifest.json"


@dataclass(frozen=True)
class SampleSet:
    """Samples of one task and length, and what they are made of.

    `identity` is what results record, and what two results must share to stand side by side; `sha256` is of the file.
    """

    samples: list[Sample]
    identity: dict[str, Any]
    sha256: str


def open_samples(
    task: str, length: int, count: int, tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> SampleSet:
    """Return samples, made now if they are not there.

    Args:
        task, length, count: as for `make_samples`, `make_prompts` and `make_choices`.
        tokenizer: of the model.
        materials: haystack and questions; the seed and the cache stand in their suite.

    Raises:
        MissingMaterialError: the task's material is not set.
        UserError: as `make_samples`; a file is not as it was written; or the cache cannot be written.
    """
    suite, benchmark = materials.suite, benchmark_of(task)
    identity = {
        "format": _FORMAT,
        "task": task,
        "length": length,
        "samples": count,
        **_settings(task, suite),
        "tokenizer": tokenizer_identity(tokenizer),
        "materials": materials.identity(task),
        "versions": versions(("lm_eval", "wonderwords", "nltk", "numpy") if benchmark == "ruler" else ("lm_eval",)),
    }
    folder = _place(identity, suite.cache)
    if not folder.is_dir():
        if benchmark == "ruler":
            made = make_samples(task, length, count, suite.seed, tokenizer, materials)
        else:
            make = make_prompts if benchmark == "longbench" else make_choices
            made = make(task, length, count, tokenizer, materials)
        _write(folder, made, identity)
    return _read(folder, identity)


def find_samples(identity: dict[str, Any], sha256: str, cache: str | Path) -> SampleSet | None:
    """Return the samples that a result is of, None where the cache has them no more, or others.

    Args:
        identity, sha256: as the result records them.
        cache: the suite's.

    Raises:
        UserError: a file is not as it was written.
    """
    folder = _place(identity, cache) if {"task", "length"} <= identity.keys() else None
    if folder is None or not folder.is_dir():
        return None
    found = _read(folder, identity)
    return found if found.sha256 == sha256 else None


def _place(identity: dict[str, Any], cache: str | Path) -> Path:
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    task, length = identity["task"], identity["length"]
    return expand(str(cache)) / benchmark_of(task) / f"{task}-{length}-{name}"


def _settings(task: str, suite: Suite) -> dict[str, Any]:
    """Return what of the suite decides a task's samples, and the group that the task belongs to."""
    if (benchmark := benchmark_of(task)) == "longbench":
        return {"group": group_name(task), "prompt": suite.longbench_prompt}
    if benchmark == "mmlu":
        return {"group": subject_group(task), "shots": suite.mmlu_shots}
    return {"seed": suite.seed} if benchmark == "ruler" else {}


def _write(folder: Path, samples: list[Sample], identity: dict[str, Any]) -> None:
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with build_folder(folder) as beside:
            beside.mkdir()
            entry = write_file(beside / _SAMPLES, lines.encode())
            manifest = identity | {"file": entry.model_dump()}
            write_file(beside / _MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not folder.is_dir():  # another process was first
            raise UserError(f"cache: {disk_fault(error)}; choose a folder that can be written") from None


def _read(folder: Path, identity: dict[str, Any]) -> SampleSet:
    manifest = read_json(folder / _MANIFEST, "samples")
    file, again = manifest.pop("file", None), f"remove {quoted(folder)}, and they are made again"
    try:
        entry = FileEntry.model_validate(file)
        fault = differs(folder / _SAMPLES, entry)
    except ValueError:
        raise UserError(f"samples: {quoted(folder / _MANIFEST)}: is damaged; {again}") from None
    except OSError as error:
        raise UserError(f"samples: {disk_fault(error)}; {again}") from None
    if fault is None and manifest != identity:
        fault = "was made otherwise than its name says"
    if fault is not None:
        raise UserError(f"samples: {quoted(folder / _SAMPLES)}: {fault}; {again}")
    lines = (folder / _SAMPLES).read_text(encoding="utf-8").split("\n")
    return SampleSet([json.loads(line) for line in lines if line], identity, entry.sha256)
