"""`torchtrain init`: a first config for the user's documents and model, checked before it is written."""

import glob
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from anchorline.errors import UserError, disk_fault, print, quoted, quoted_reason
from anchorline.files import expand, write_file
from torchtrain.config import Config, DataConfig, Source, load_config
from torchtrain.data import check_tokenizer
from torchtrain.data.answers import AnswerEncoder, Kind, kind_of
from torchtrain.data.corpus import BadRecord, Document, Record, read
from torchtrain.data.files import KINDS, BadItemError, is_url, items, list_disk, list_files
from torchtrain.distributed.free_memory import free_memory
from torchtrain.modeling.source import open_config, open_tokenizer, resolve_source
from torchtrain.planning import budget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SAMPLE = 200  # records to read
_TEXTS = (".txt", ".md")
_ROWS_A_STEP = 8
_MOST_STEPS = 1000
_FEW_STEPS = 100  # of an epoch; below, epochs say how long a run is
_LENGTH = 65_536  # largest default length of a row
_BAD_SHARE: float = DataConfig.model_fields["bad_record_share"].default
_MOST_KINDS = 8  # of bad records that are named
_SHORT = 1024  # tokens of a row, for a first run on a CPU
_GIB = 2**30
_RECORD = '{"text": "..."}'


def write_first_config(data: str, model: str, out: Path, length: int | None = None) -> None:
    """Write a commented config of at most 25 lines that trains `model` on longer rows of `data`; print what was seen.

    data: a .jsonl or .parquet file, a text file, or a folder of them; it exists.
    out: the file, which does not exist.
    length: tokens of a row; default: twice the model's positions, at most 65,536.
    Raises UserError: `data` has no documents, or the model does not fit. Nothing is written then.
    """
    for field, name in (("DATA", data), ("MODEL", model), ("--out", str(out))):
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise UserError(f"{field} {quoted(name)}: is not UTF-8, and a config is; rename it")
    section, size = _find_documents(data)
    records = list(itertools.islice(read(Source(**section)), _SAMPLE))
    if "records" not in section:
        documents, bad_share = _sample(records)
    folder = resolve_source(model, "cache", print, needs="tokenizer")
    own = open_config(folder)
    positions: int = own.max_position_embeddings
    tokenizer = open_tokenizer(folder)
    if added := check_tokenizer(tokenizer, own.vocab_size, folder):
        print(f"warning   {added}")
    if "records" in section:
        lengths, records = _measure_answers(records, section["records"], tokenizer)
        documents, bad_share = _sample(records)
        length = length or min(positions, max(_SHORT, 1 << max(lengths, default=0).bit_length()))
    else:
        lengths = [len(tokenizer(document.text, verbose=False)["input_ids"]) for document in documents]
        length = length or max(positions, min(2 * positions, _LENGTH))
    whole, sampled = len(records) < _SAMPLE, sum(lengths)
    read_bytes = sum(len((document.text or str(document.fields)).encode()) for document in documents)
    tokens = sampled if whole else int(size * sampled / max(1, read_bytes))
    packed = not whole and section.get("files", "").endswith((".gz", ".zst", ".parquet"))  # text to a tenth of its size
    if length > tokens * (10 if packed else 1):
        raise UserError(
            f"--length {length}: a row would be longer than all documents together, about {tokens} tokens; give more "
            f"documents, or a --length of at most {tokens}"
        )
    steps = max(1, min(_MOST_STEPS, round(0.95 * tokens / (length * _ROWS_A_STEP))))
    text = _yaml(section, bad_share, model, out, length, positions, tokens, steps)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, text.encode())
    except OSError as error:
        raise UserError(f"--out {quoted(out)}: {disk_fault(error)}; choose another") from None
    try:
        config = load_config(out)
        print(f"documents {size / 2**20:,.1f} MiB, about {tokens:,} tokens; the first {len(documents)} were read")
        if "records" in section:
            print(f"answers   records: {section['records']}; only answers are targets (docs/fine-tuning.md)")
        longer = f"{length:,} with this config" if length > positions else f"in rows of {length:,}"
        print(f"model     {model}: {positions:,} positions, {longer}")
        print(f"memory    {_memory_line(config)}")
        if length > _SHORT and not torch.cuda.is_available():
            print(f"pace      rows of {length:,} tokens are slow without a GPU; a first run: --length {_SHORT}")
    except BaseException:
        out.unlink(missing_ok=True)
        raise


def _find_documents(data: str) -> tuple[dict[str, Any], int]:
    """Return the entry of `data.sources` for the documents, and their bytes on the disk."""
    path = expand(data)
    every = ", ".join((*KINDS, *_TEXTS))
    if path.is_file():
        kind = "files" if path.name.endswith(KINDS) else "texts" if path.suffix in _TEXTS else None
        if kind is None:
            raise UserError(f"DATA {quoted(data)}: is not one of {every}; convert it")
        return _with_text_field({kind: _pattern(path)}), path.stat().st_size
    held = {ending: list_disk(_pattern(path, ending), ("",)) for ending in (*KINDS, *_TEXTS)}
    found = [ending for ending, files in held.items() if files]
    if not found:
        raise UserError(f"DATA {quoted(data)}: the folder holds none of {every}; give another")
    ending, *others = found
    if not Path(held[ending][0].place).is_relative_to(path):
        raise UserError(f"DATA {quoted(data)}: its pattern is the name of another folder; rename one of them")
    if others:
        left = ", ".join(f"{len(held[other]):,} {other}" for other in others)
        print(f"left out  {left} files beside {len(held[ending]):,} {ending}; add a source to data.sources for them")
    kind = "files" if ending in KINDS else "texts"
    return _with_text_field({kind: _pattern(path, ending)}), sum(file.bytes for file in held[ending])


def _pattern(path: Path, ending: str = "") -> str:
    """Return a pattern that matches this file alone, or the files of a folder with this ending."""
    pattern = glob.escape(str(path)) + (f"/**/*{ending}" if ending else "")
    return f"./{pattern}" if is_url(pattern) else pattern


def _with_text_field(section: dict[str, Any]) -> dict[str, Any]:
    """Add what records hold: `text`, else answers of their own, else the field with the longest string."""
    if "texts" in section:
        return section
    place = list_files(section["files"])[0].place
    if place.endswith(".parquet"):
        import pyarrow.parquet as parquet

        fields = {name: 0 for name in parquet.read_schema(place).names}
        if "text" not in fields and (kind := kind_of(fields)) is not None:
            return section | {"records": kind}
        records = [] if "text" in fields else list(items(place, {name: name for name in fields}))[:_SAMPLE]
    else:
        fields, records = {}, list(itertools.islice(items(place, {}), _SAMPLE))
    if not fields and not records:
        raise UserError(f"DATA {quoted(place)}: holds no record; give documents")
    for _, record in records:
        for name, value in record.items() if isinstance(record, dict) else ():
            fields[name] = max(fields.get(name, 0), len(value) if isinstance(value, str) else 0)
    if "text" in fields:
        return section
    kinds = [kind_of(record) for _, record in records if isinstance(record, dict)]
    if kinds and (kind := max(kinds, key=kinds.count)) is not None:
        return section | {"records": kind}
    if not any(fields.values()):
        for where, record in records:
            if isinstance(record, BadItemError):
                raise UserError(f"DATA {quoted(Path(where))}: {quoted_reason(record)}; correct the line")
            if not isinstance(record, dict):
                raise UserError(f"DATA {quoted(Path(where))}: is no object; write one such as {_RECORD}")
        raise UserError(f"DATA {quoted(place)}: no record has a field that holds text; write records such as {_RECORD}")
    return section | {"text_field": max(fields, key=lambda name: fields[name])}


def _measure_answers(
    records: Sequence[Record], kind: Kind, tokenizer: "PreTrainedTokenizerFast"
) -> tuple[list[int], list[Record]]:
    """Return the tokens of each document with answers, and the records, bad ones among them."""
    encoder = AnswerEncoder(tokenizer, "text", append_eos=True)
    lengths, judged = [], list[Record]()
    for record in records:
        if isinstance(record, Document):
            try:
                lengths.append(len(encoder.encode(record.fields or {}, kind).tokens))
            except BadItemError as why:
                record = BadRecord(record.where, str(why), record.domain)
        judged.append(record)
    return lengths, judged


def _sample(records: Sequence[Record]) -> tuple[list[Document], float]:
    """Return the documents among the first records, and the `data.bad_record_share` for the others."""
    texts = [record for record in records if isinstance(record, Document)]
    reasons: dict[str, list[BadRecord]] = {}
    for record in records:
        if isinstance(record, BadRecord):
            reasons.setdefault(record.reason, []).append(record)
    kinds = [f"{alike[0]}{f' ({len(alike)} such)' if alike[1:] else ''}" for alike in reasons.values()]
    more = f"; and {len(kinds) - _MOST_KINDS} more kinds" if len(kinds) > _MOST_KINDS else ""
    bad = len(records) - len(texts)
    said = f"{bad} of the first {len(records)} records hold no document: {'; '.join(kinds[:_MOST_KINDS])}{more}"
    if not texts or 2 * bad >= len(records):
        raise UserError(f"DATA: {said if records else 'holds no record'}; correct or remove them")
    share = _BAD_SHARE
    if bad > share * len(records):
        share = min(1.0, math.ceil(200 * bad / len(records)) / 100)
        said += f"; the config allows twice as many (data.bad_record_share: {share:g})"
    if bad:
        print(f"left out  {said}")
    return texts, share


def _memory_line(config: Config) -> str:
    """Return a run's memory by `torchtrain plan`, this machine's, and what to change if it is too little."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = free_memory(device)
    shapes = budget.Shapes(budget.model_config(config))
    least = config.model.model_copy(update={"activation_checkpointing": True})
    needed = budget.count_memory(config.model_copy(update={"model": least}), shapes, 1)
    size = needed.gpu if device.type == "cuda" else needed.gpu + needed.host
    said = f"{size / _GIB:.1f} GiB at least, {free / _GIB:.1f} GiB are free on {device.type}"
    if free and size > free:
        said += ": too much; give a smaller --length, or see `torchtrain plan` for more than one GPU"
    return said


def _yaml(
    section: dict[str, Any],
    bad_share: float,
    model: str,
    out: Path,
    length: int,
    positions: int,
    tokens: int,
    steps: int,
) -> str:
    def plain(value: str) -> str:
        seen = value.isprintable()
        style = None if seen else '"'  # on one line
        return yaml.safe_dump(value, default_style=style, width=1 << 20, allow_unicode=seen).split("\n")[0]

    answers, few = "records" in section, steps < _FEW_STEPS
    per_step = f"{_ROWS_A_STEP * length:,} tokens; the documents hold about {tokens:,}"
    first, *others = (f"{name}: {plain(value)}" for name, value in section.items())
    longer = length > positions
    lines = [
        "# Written by `torchtrain init`. `torchtrain config --explain` lists all settings, with a KEY one of them.",
        "run:",
        f"  folder: {plain(f'runs/{out.stem}')} # checkpoints, losses and the trained model",
        "model:",
        f"  source: {plain(model)}",
        "  dtype: bfloat16",
        "  activation_checkpointing: auto # recomputes layers where memory is short",
        *(["rope:", f"  type: ntk # from {positions:,} positions to {length:,}, by a larger theta"] if longer else []),
        "data:",
        "  sources:",
        f"    - {first}",
        *(f"      {other}" for other in others),
        *([f"  bad_record_share: {bad_share:g}"] if bad_share > _BAD_SHARE else []),
        "  held_out_share: 0.05 # of the documents; their loss is measured before and after",
        "pack:",
        f"  sequence_length: {length}",
        "  variant: anchor # a token sees its own document and one shared first token",
        *(
            ["  strategy: best_fit # whole conversations in a row", "  longer: drop # those longer than a row"]
            * answers
        ),
        "train:",
        f"  epochs: {3 if answers else 1} # steps of {per_step}"
        if few or answers
        else f"  steps: {steps} # of {per_step}",
        f"  sequences_per_step: {_ROWS_A_STEP}",
        f"  learning_rate: {'1.0' if answers else '2.0'}e-5",
    ]
    return "\n".join(lines) + "\n"
