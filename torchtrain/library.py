"""The library's calls around one's own training loop: RoPE for longer rows, documents to packed rows, rows to a batch.

    rows = torchtrain.pack(["a text", "another text"], tokenizer, sequence_length=4096)
    loader = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=torchtrain.collate)

Legend: B batch · T tokens of a row.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anchorline import settings
from anchorline.errors import UserError, quoted
from torchtrain.config import PackConfig, RopeConfig
from torchtrain.data import PackedRows, anchor_ids, pad_id, stack_rows, tag_ids
from torchtrain.data.answers import NO_END, Answered, AnswerEncoder, kind_of, trains_an_end
from torchtrain.data.encode import Encoder, special_id
from torchtrain.data.files import BadItemError
from torchtrain.data.store import Documents
from torchtrain.marks import IGNORED

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)
_AT_A_TIME = 1024  # documents that are tokenised together
_NEEDED = ("input_ids", "position_ids", "document_ids", "shift_labels")


def pack(
    documents: Iterable[Any],
    tokenizer: "PreTrainedTokenizerFast",
    sequence_length: int,
    variant: str = "anchor",
    *,
    text_field: str = "text",
    domain_field: str | None = None,
    append_eos: bool = True,
    seed: int = 0,
    **pack_settings: Any,
) -> PackedRows:
    """Tokenise documents and pack them into rows of five arrays, as the trainer does.

    All tokens are held in memory, 4 bytes each. A corpus that is too large for that is one for `torchtrain prepare`.

    documents: strings; lists (or arrays) of token ids; dicts with `text_field` or with `input_ids`; or a
        `datasets.Dataset` or `IterableDataset` of such dicts. A streamed data set is read to its end.
        Dicts with `messages`, with `prompt` and `completion`, or with `input_ids` and one of `labels`,
        `completion_mask` and `assistant_masks` have answers, and only these are targets (docs/fine-tuning.md).
    tokenizer: a fast tokenizer. A special token that is written in a text is tokenised as text.
    sequence_length: T, the tokens of a row.
    variant: full, intra, intra_reset or anchor, each with +tag and/or +interleave.
    text_field: the key of a dict's text.
    domain_field: the key of a dict's domain, which +tag writes and `domain_ids` number; None: one domain.
    append_eos: close each text, and each completion that is a text, with the tokenizer's EOS. Token ids and
        conversations are taken as they are.
    seed: of the order of documents.
    pack_settings: further settings (`torchtrain config --explain pack`), such as `strategy="best_fit"` (the default
        where documents have answers) and `longer="drop"`, which leaves out those longer than a row.
    Returns a map-style data set. A row is a dict of `input_ids`, `position_ids`, `document_ids`, `shift_labels` and
        `domain_ids`, int64 [T]. `.to_datasets()` makes a `datasets.Dataset` of it.
    Raises UserError: a setting, a document or the tokenizer does not fit; there is no document.
    """
    given = {"sequence_length": sequence_length, "variant": variant} | pack_settings
    config = settings.validate(PackConfig, given, "pack")
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"tokenizer: {type(tokenizer).__name__} is no fast tokenizer; load it with AutoTokenizer")
    if type(append_eos) is not bool:
        raise UserError(f"append_eos: {quoted(append_eos)}; give True or False")
    if type(seed) is not int or seed < 0:
        raise UserError(f"seed: {quoted(seed)}; give an integer of 0 or more")
    _check_documents(documents)
    tokenizer = copy.deepcopy(tokenizer)  # encoding changes how it truncates, pads, and reads special tokens
    anchor = anchor_ids(tokenizer, config)
    domains: dict[str, int] = {}
    tokens: list[np.ndarray] = []
    targets: list[np.ndarray | None] = []
    of_document: list[int] = []
    answers = AnswerEncoder(tokenizer, "text", append_eos)
    read = _read(documents, len(tokenizer), text_field, domain_field, answers)
    for domain, ids, of_ids in _tokenise(read, tokenizer, append_eos):
        tokens.append(ids)
        targets.append(of_ids)
        of_document.append(domains.setdefault(domain, len(domains)))
    if not tokens:
        raise UserError("documents: there is none with a token; give at least one")
    own = None
    if any(of_ids is not None for of_ids in targets):
        own = [np.ones(len(ids), bool) if of is None else of for ids, of in zip(tokens, targets, strict=True)]
        if "strategy" not in pack_settings:
            config = config.model_copy(update={"strategy": "best_fit"})
    held = Documents.of(tokens, of_document, list(domains), own)
    if not trains_an_end(held, tokenizer):
        logger.warning("pack: %s", NO_END)
    tags = tag_ids(tokenizer, config, held.domains)
    return PackedRows(held, np.arange(len(held)), config, seed, anchor, tags, pad_id(tokenizer))


def extend(config: "PretrainedConfig", sequence_length: int, **rope: Any) -> "PretrainedConfig":
    """Return a copy of a model's config that holds `sequence_length` positions, as `torchtrain train` sets RoPE.

        config = torchtrain.extend(AutoConfig.from_pretrained(name), 65536)
        model = torchtrain.attach(AutoModelForCausalLM.from_pretrained(name, config=config))

    Inverse frequencies are computed when a model is built, so a model that is loaded already cannot be extended.

    config: of the model.
    sequence_length: tokens of a row.
    rope: settings (`torchtrain config --explain rope`), such as `type="yarn"`; default: `type="ntk"`, or nothing
        where the model holds the length.
    Raises UserError: a setting does not fit, or the model cannot be extended so.
    """
    from torchtrain.modeling.rope import extend as extend_config

    if not hasattr(config, "max_position_embeddings"):
        raise UserError(
            f"config: {type(config).__name__} is not the config of a model; give model.config or AutoConfig's"
        )
    length = settings.validate(PackConfig, {"sequence_length": sequence_length}, "pack").sequence_length
    default = {} if length <= config.max_position_embeddings and not rope else {"type": "ntk"}
    return extend_config(config, settings.validate(RopeConfig, default | rope, "rope"), length)


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Stack packed rows into the arguments of a causal language model of transformers, after `torchtrain.attach`.

    The loss is taken from `shift_labels`, the target of each token. `labels` hold the same targets one place later:
    transformers computes a loss only where it is given them, and `Trainer` counts a step's targets there.

    rows: of `pack`, or of its `to_datasets()`.
    Returns LongTensors [B, T]: `input_ids`, `position_ids`, `document_ids`, `shift_labels`, `labels`.
    Raises UserError: rows lack an array, or there are none.
    """
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping) or not (rows := list(rows)):
        raise UserError("collate: there are no rows; give a list of rows of torchtrain.pack")
    first = _arrays_of(rows[0], "collate: rows[0]")
    batch = stack_rows([_arrays_of(row, f"collate: rows[{n}]", len(first["input_ids"])) for n, row in enumerate(rows)])
    targets_BT = batch["shift_labels"]
    first_B1 = torch.full_like(targets_BT[:, :1], IGNORED)
    return batch | {"labels": torch.cat([first_B1, targets_BT[:, :-1]], dim=1)}


def _arrays_of(row: Any, where: str, length: int | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a row, int64 [T]; T must be `length`."""
    for name in _NEEDED:
        if not isinstance(row, Mapping) or name not in row:
            raise UserError(
                f"{where}: a {type(row).__name__} with no {name}; give rows of torchtrain.pack, and set "
                "remove_unused_columns=False in TrainingArguments or SFTConfig, which would remove it"
            )
    if "weights" in row:
        raise UserError(f"{where}: has weights, which the loss of transformers does not take; remove them")
    arrays = {name: np.asarray(row[name]) for name in _NEEDED}
    for name, x_T in arrays.items():
        if x_T.shape != ((length or arrays["input_ids"].size) or 1,) or x_T.dtype.kind != "i":
            raise UserError(f"{where}: {name} is {x_T.dtype} {list(x_T.shape)}; give integers [T], T the same in all")
    return arrays


def _check_documents(documents: Any) -> None:
    if isinstance(documents, str | bytes):
        raise UserError("documents: is one text; give a list of texts")
    if isinstance(documents, Mapping):
        keys = ", ".join(map(str, islice(documents, 4)))
        raise UserError(f"documents: is a dict of {quoted(keys)}; give a list, or one split of a DatasetDict")
    if not isinstance(documents, Iterable):
        raise UserError(f"documents: is a {type(documents).__name__}; give a list of texts, or a data set")


def _read(
    documents: Iterable[Any], vocabulary: int, text_field: str, domain_field: str | None, answers: AnswerEncoder
) -> Iterator[tuple[str, Any]]:
    """Yield (domain, text or token ids or `Answered`) of each document."""
    for number, document in enumerate(documents):
        where, domain, content = f"documents[{number}]", "documents", document
        if isinstance(document, Mapping):
            if "shift_labels" in document:
                raise UserError(f"{where}: has shift_labels; pack shifts labels itself: give them as labels, unshifted")
            if (kind := kind_of(document)) == "weights":
                raise UserError(f"{where}: has weights, which the loss of transformers does not take; remove them")
            if kind:
                try:
                    content = answers.encode(document, kind)
                except BadItemError as why:
                    raise UserError(f"{where}: {why}") from None
            else:
                name = text_field if text_field in document else "input_ids"
                if name not in document:
                    keys = ", ".join(map(str, islice(document, 8)))
                    raise UserError(
                        f"{where}: has no {quoted(text_field)} and no 'input_ids', but {keys}; set text_field"
                    )
                content = document[name]
            if domain_field is not None:
                domain = document.get(domain_field)
                if not isinstance(domain, str) or not domain:
                    raise UserError(f"{where}: {quoted(domain_field)} is {quoted(domain)}; a domain is a string")
        elif domain_field is not None:
            raise UserError(
                f"{where}: domain_field {quoted(domain_field)} belongs to dicts; give dicts, or leave it out"
            )
        if isinstance(content, Answered):
            pass
        elif not isinstance(content, str):
            content = _as_tokens(content, vocabulary, where)
        elif not content.strip():
            raise UserError(f"{where}: the text is blank; remove it")
        elif any("\ud800" <= character <= "\udfff" for character in set(content)):
            raise UserError(f"{where}: the text has half of a surrogate pair; read it with errors='replace'")
        yield domain, content


def _as_tokens(content: Any, vocabulary: int, where: str) -> np.ndarray:
    """Return token ids, int32 [tokens]."""
    try:
        ids = np.asarray(content)
    except ValueError:
        ids = np.zeros(0)
    if ids.ndim == 1 and not len(ids):
        raise UserError(f"{where}: a {type(content).__name__} without a token id; remove it")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{where}: a {type(content).__name__} is no text and no list of token ids; remove it")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise UserError(f"{where}: the token ids go from {ids.min()} to {ids.max()}; give those of 0..{vocabulary - 1}")
    return ids.astype(np.int32)


def _tokenise(
    documents: Iterator[tuple[str, Any]], tokenizer: "PreTrainedTokenizerFast", append_eos: bool
) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """Yield domain, token ids and targets (None: all) of each document, in order; what has no token is left out."""
    encoder = Encoder(tokenizer, "text")
    eos = special_id(tokenizer, "eos") if append_eos else None
    ends = np.array([] if eos is None else [eos], np.int32)
    while batch := list(islice(documents, _AT_A_TIME)):
        encoded = encoder.encode([content for _, content in batch if isinstance(content, str)])
        for domain, content in batch:
            if isinstance(content, Answered):
                yield domain, content.tokens, content.targets
                continue
            ids = np.append(next(encoded), ends) if isinstance(content, str) else content
            if len(ids):
                yield domain, ids, None
