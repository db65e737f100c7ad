"""Makes and checks everything that a run needs, the cheapest first, before the run has a folder.

After each stage (source, tokens, model) a run that resumes is compared with how it began.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anchorline.background import in_background
from anchorline.errors import UserError
from anchorline.files import read_json
from torchtrain.attention import resolve_engine
from torchtrain.attention.engines.dense import check_tokens
from torchtrain.attention.masks import caps_scores
from torchtrain.checkpoint.identity import check_identity
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.config import Config, DataConfig, TrainConfig
from torchtrain.data import (
    PackedRows,
    PreparationProgress,
    Split,
    TokenStore,
    anchor_ids,
    check_store,
    check_tokenizer,
    pad_id,
    prepare,
    split_documents,
    tag_ids,
    tokenizer_digest,
)
from torchtrain.data import identity as data_identity
from torchtrain.data.rows import build_row
from torchtrain.data.streams import INTERLEAVE, random_stream
from torchtrain.data.weights import LossWeights
from torchtrain.distributed.cut import Cutter
from torchtrain.distributed.layout import check_heads
from torchtrain.distributed.threads import share_cores
from torchtrain.distributed.world import ALONE, World, read_ranks
from torchtrain.marks import IGNORED
from torchtrain.modeling.load import check_same_files, digest_weights, load_for_training
from torchtrain.modeling.recompute import check_can_keep
from torchtrain.modeling.rope import check_resets, extend
from torchtrain.modeling.smollm2 import ORIGIN
from torchtrain.modeling.source import check_config, open_config, open_tokenizer, resolve_source
from torchtrain.planning.memory import shape_of_model
from torchtrain.run.choices import choose_engine, choose_fused, choose_recomputation
from torchtrain.run.describe import describe_setup
from torchtrain.run.record import Corpus, RunRecord

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Start:
    """Where a run starts: at its beginning, or where an earlier process left it."""

    record: RunRecord | None = None  # of the run that resumes
    checkpoint: Manifest | None = None  # from which it resumes; None: it begins anew

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """What the run that resumes is made of."""
        if self.checkpoint is not None:
            return self.checkpoint.identity
        return None if self.record is None else self.record.identity

    def check(self, identity: Mapping[str, Any]) -> None:
        """Refuse to resume with another identity than the run's; `identity` may lack parts that are not known yet."""
        if self.identity is not None:
            check_identity(self.identity, identity)


@dataclass(frozen=True)
class Source:
    """A model that is not loaded yet, its tokenizer, and how it will be extended."""

    base: str  # where the model came from: a folder, or a hub id
    folder: str  # of the files that it is loaded from
    own_config: "PretrainedConfig"
    config: "PretrainedConfig"  # extended
    tokenizer: "PreTrainedTokenizerFast"

    @property
    def own_positions(self) -> int:
        """The positions that the model held before it was extended."""
        return self.own_config.max_position_embeddings


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to train, and what was chosen for this machine, in words."""

    model: "PreTrainedModel"
    engine: str
    recomputes: bool | str  # as `model.activation_checkpointing`, decided
    fused: str
    sha256: str  # of its weights
    words: dict[str, str]  # by the label of the line that says them


@dataclass(frozen=True)
class Setup:
    """A model and rows that fit each other, ready to train."""

    source: Source
    loaded: LoadedModel
    store: TokenStore
    split: Split
    rows: PackedRows
    held_out: list[dict[str, np.ndarray]]
    record: RunRecord

    @property
    def model(self) -> "PreTrainedModel":
        """The model."""
        return self.loaded.model


def set_up(
    config: Config,
    log: Callable[[str], None],
    on_progress: Callable[[PreparationProgress], None] = lambda progress: None,
    world: World = ALONE,
    start: Start = Start(),
) -> Setup:
    """Make and check everything. Writes only into `data.cache`, where ranks wait for the one that comes first.

    on_progress: passed to `torchtrain.data.prepare`.
    world: this rank's place; its device is where the model goes.
    start: what the run must be made of, and what was decided when it began.
    Raises UserError: anything that does not fit; see the functions that are called here.
    """
    began = start.record
    source, engine = open_source(config, world.device, log)
    identity = _identity_of(config.data, source)
    start.check(identity)
    fused = choose_fused(config.model, config.not_compiled, source.folder, source.config, world)

    store = prepare(config.data, source.tokenizer, on_progress)
    # Once on each machine, while the model is loaded: checks every byte of the tokens.
    verified = in_background(store.verify, "verify-tokens") if read_ranks()[2] == 0 else lambda: None
    split = split_documents(store, config.data.held_out_share, config.run.seed)
    identity |= {"tokens": _identity_of_tokens(store), "split": {"copies_moved": split.moved}}
    start.check(identity)
    check_store(store, source.config.vocab_size)
    rows, held_out = pack_rows(config, store, source.tokenizer, split)
    steps = count_steps(config.train, rows) if began is None else began.steps

    kept = began.engine if began is not None and config.model.attention == "auto" else None
    chosen = choose_engine(config, engine, kept, source.own_config, rows, world)
    log(f"loading {config.model.source}")
    loaded = load_model(config, source, chosen, fused, world)
    identity["weights"] = {"sha256": loaded.sha256}
    start.check(identity)
    verified()
    record = RunRecord(
        config=config.model_dump(mode="json"),
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        engine=loaded.engine,
        engine_measured=loaded.words["attention"],
        activation_checkpointing=loaded.recomputes,
        fused=loaded.fused,
        processes=world.size,
        steps=steps,
        identity=identity,
        model_origin=_origin(source.folder),
        corpus_fingerprint=store.header.fingerprint,
        corpus=Corpus(
            domains=[asdict(summary) for summary in store.header.summaries],
            sources=[asdict(count) for count in store.header.sources],
            made_of=store.header.made_of,
            dropped_tokens=rows.plan(0).dropped_tokens,
            copies=store.copies,
            copies_moved=split.moved,
        ),
    )
    setup = Setup(source, loaded, store, split, rows, held_out, record)
    describe_setup(config, setup, world, log)
    return setup


def open_source(config: Config, device: torch.device, log: Callable[[str], None]) -> tuple[Source, str]:
    """Open the model's config and tokenizer, extend the config, and check what a run asks of them. Return the source,
    and the engine of attention that `model.attention` stands for before any is measured. Raises UserError: something
    does not fit.
    """
    asked = config.model.attention, device, getattr(torch, config.model.dtype)
    resolve_engine(*asked)  # what cannot run here is refused before a hub is asked
    length, trusted = config.pack.sequence_length, config.model.trust_remote_code
    folder = resolve_source(config.model.source, config.data.cache, log, trust_remote_code=trusted)
    own_config = open_config(folder, trusted)
    engine = resolve_engine(*asked, capped=caps_scores(own_config))
    if engine == "dense":
        check_tokens(length)
    if config.model.recomputation == "keep_attention":
        check_can_keep(engine)
    check_config(own_config, length)
    check_heads(config.distributed, own_config)
    extended = extend(own_config, config.rope, length)
    if config.model.layer_chunk is not None or config.model.lora is not None:
        shape_of_model(extended, config.model)  # refuses other layers, and modules that do not exist
    if config.pack.base_variant.restarts:
        check_resets(extended, length, config.pack.variant)
    tokenizer = open_tokenizer(folder, trusted)
    if added := check_tokenizer(tokenizer, extended.vocab_size, folder):
        log(f"warning   {added}")
    anchor_ids(tokenizer, config.pack)
    here_already = config.model.source == "smollm2" or Path(config.model.source).is_dir()
    base = str(Path(folder).resolve()) if here_already else config.model.source
    return Source(base, folder, own_config, extended, tokenizer), engine


def load_model(
    config: Config, source: Source, engine: tuple[str, str], fused: tuple[str, str], world: World
) -> LoadedModel:
    """Load the model onto this rank's device, digesting its weights. engine, fused: of `choose_engine`, `choose_fused`.
    Raises UserError: the files differ between ranks, or cannot be read.
    """
    settings, recomputation = choose_recomputation(config, source.config, engine[0], world)
    settings = settings.model_copy(update={"fused": fused[0]})
    # ZeRO 3 cuts the model up while it is read, because no process has room for the whole of it.
    zero_3, dtype = config.distributed.zero_stage == 3, getattr(torch, config.model.dtype)
    cutter = Cutter(config.distributed, config.train, dtype, world) if zero_3 else None
    check_same_files(source.folder, world)  # each rank reads them itself
    # The files are read once: for their digest, and by the side of that into the model.
    digest = in_background(partial(digest_weights, source.folder), "digest-weights") if world.rank == 0 else lambda: ""
    seed = config.run.seed
    model = load_for_training(source.folder, source.config, settings, engine[0], world.device, cutter, seed)
    with world.together():
        sha256 = digest()
    threads = share_cores(config.distributed, world.device) or ""
    words = {"layers": recomputation, "fused": fused[1], "threads": threads, "attention": engine[1]}
    return LoadedModel(model, engine[0], settings.activation_checkpointing, fused[0], world.from_first(sha256), words)


def count_steps(train: TrainConfig, rows: PackedRows) -> int:
    """Return a new run's steps, as set or by `train.epochs`. Raises UserError: too few for the schedule."""
    if train.epochs is None:
        return train.steps
    steps = -(-rows.count(train.epochs) // train.sequences_per_step)
    train.with_steps(steps)
    return steps


def pack_rows(
    config: Config, store: TokenStore, tokenizer: "PreTrainedTokenizerFast", split: Split
) -> tuple[PackedRows, list[dict[str, np.ndarray]]]:
    """Return the training rows, and up to `held_out.sequences` held-out rows of each domain.

    A held-out row holds documents of one domain, or, with `held_out.together`, of each domain as many tokens: every
    domain is measured, however large it is.
    Raises UserError: no documents to train on; `data.held_out_share` holds none out; no row has a target; or the
        documents of a domain do not fit into its part of a row of `held_out.together`.
    """
    train, held = split.train, split.held_out

    anchor, pad, length = anchor_ids(tokenizer, config.pack), pad_id(tokenizer), config.pack.sequence_length
    tags = tag_ids(tokenizer, config.pack, store.domains)

    def pack_held_out(documents: np.ndarray, tokens: int) -> PackedRows:
        pack = config.pack.model_copy(update={"last": "pad", "sequence_length": tokens})
        return PackedRows(store, documents, pack, config.run.seed, anchor, tags, pad)

    per_step = config.train.sequences_per_step
    rows = PackedRows(store, train, config.pack, config.run.seed, anchor, tags, pad, per_step)
    if not any((rows[i]["shift_labels"] != IGNORED).any() for i in range(len(rows))):
        raise UserError(
            f"data.sources: no row has a token to train on: each of the {len(train):,} training documents is too short "
            "to have a next token; give longer documents"
        )
    if (settings := config.train.loss_weight) is not None:
        sample = range(min(settings.sample_rows, len(rows)))
        rows.loss_weights = LossWeights.measure(settings, (rows[i] for i in sample))
    if not len(held) and config.data.held_out_share:
        copies = f" ({store.copies} are copies of others)" if store.copies else ""
        raise UserError(
            f"data.held_out_share {config.data.held_out_share:g} of {len(store)} documents{copies} holds none out, so "
            "there is nothing to evaluate on; raise it or give more documents"
        )
    by_domain = [held[store.document_domains[held] == domain] for domain in range(len(store.domains))]
    by_domain = [documents for documents in by_domain if len(documents)]
    most = range(config.held_out.sequences)
    if not config.held_out.together or not by_domain:
        held_out_rows = [pack_held_out(documents, length) for documents in by_domain]
        return rows, [rows[i] for rows in held_out_rows for i in most[: len(rows)]]
    tokens = len(anchor) + (length - len(anchor)) // len(by_domain)
    try:
        parts = [pack_held_out(documents, tokens) for documents in by_domain]
    except UserError as error:
        raise UserError(
            f"held_out.together: leaves {tokens:,} tokens of a row to each of {len(by_domain)} domains: {error}; or "
            "set it to false"
        ) from None
    held_out = []
    for i in most[: max(map(len, parts))]:
        spans = [span for part in parts if i < len(part) for span in part.spans(i)]
        held_out.append(build_row(spans, config.pack, anchor, pad, random_stream(config.run.seed, INTERLEAVE, 0, i)))
    return rows, held_out


def _identity_of(data: DataConfig, source: Source) -> dict[str, Any]:
    """Return what decides the numbers and is not in the config itself."""
    tokenizer = source.tokenizer
    model = json.loads(source.config.to_json_string(use_diff=False))
    for transient in ("_name_or_path", "transformers_version"):
        model.pop(transient, None)
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {
        "tokenizer": {"encoding": tokenizer_digest(tokenizer), **ids},
        "model": model,
        "data": data_identity(data, tokenizer),
    }


def _identity_of_tokens(store: TokenStore) -> dict[str, Any]:
    """Return digests that change when a corpus gives other tokens, even if its files look the same."""
    places = hashlib.sha256(store.offsets.tobytes() + store.document_domains.tobytes()).hexdigest()
    return {
        "domains": store.domains,
        "documents": len(store),
        "tokens": store.token_count,
        "places": places,
        "sha256": store.header.sha256,
        "contents": hashlib.sha256(store.content_hashes.tobytes()).hexdigest(),
    }


def _origin(source: str) -> dict[str, Any]:
    path = Path(source) / ORIGIN
    return read_json(path, "model.source") if path.is_file() else {"source": source}
