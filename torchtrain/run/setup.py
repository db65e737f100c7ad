"""Makes and checks everything that a run needs, the cheapest first, before the run has a folder."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from anchorline.background import in_background
from anchorline.errors import UserError
from anchorline.files import read_json
from torchtrain.attention import make_plan, resolve_engine
from torchtrain.attention.engines import measure
from torchtrain.attention.engines.dense import check_tokens
from torchtrain.attention.masks import caps_scores, layer_windows
from torchtrain.config import Config, ModelConfig, PackConfig, Recomputation
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
    tokenizer_identity,
)
from torchtrain.data import identity as data_identity
from torchtrain.distributed.cut import Cutter
from torchtrain.distributed.free_memory import free_memory
from torchtrain.distributed.layout import check_heads
from torchtrain.distributed.layout import describe as describe_layout
from torchtrain.distributed.threads import share_cores
from torchtrain.distributed.world import ALONE, World, read_ranks
from torchtrain.marks import IGNORED
from torchtrain.modeling.compilation import check_compiler, has_layers
from torchtrain.modeling.load import check_same_files, digest_weights, load_for_training, without_weights
from torchtrain.modeling.recompute import can_keep, check_can_keep
from torchtrain.modeling.rope import check_resets, extend, warn_of_stretch
from torchtrain.modeling.rope import describe as describe_rope
from torchtrain.modeling.smollm2 import ORIGIN
from torchtrain.modeling.source import check_config, open_config, open_tokenizer, resolve_source
from torchtrain.modeling.weights import whole_shape
from torchtrain.planning.memory import shape_of_model
from torchtrain.products import describe_products

# Share of the free memory that `auto` fills. The rest is for what `torchtrain.planning` does not count: Python and its
# packages, a kernel's own buffers, and fragments.
_SHARE = 0.85
_GIB = 2**30

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


class Kept(NamedTuple):
    """What stays as it was when a run began: the engine that `model.attention: auto` chose, and the steps."""

    engine: str | None = None
    steps: int | None = None


NEW = Kept()


@dataclass(frozen=True)
class Setup:
    """A model and rows that fit each other, ready to train."""

    engine: str
    base: str  # where the model came from: a folder, or a hub id
    weights: str  # folder of the files that the model was loaded from
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerFast"
    own_positions: int  # what the model held before it was extended
    steps: int  # of the whole run
    store: TokenStore
    rows: PackedRows
    held_out: list[dict[str, np.ndarray]]
    identity: dict[str, Any]  # what all of it is made of, as JSON: for `run.json` and every checkpoint
    record: dict[str, Any]  # for `run.json`


def set_up(
    config: Config,
    log: Callable[[str], None],
    on_progress: Callable[[PreparationProgress], None] | None = None,
    world: World = ALONE,
    check: Callable[[dict[str, Any]], None] = lambda identity: None,
    kept: Kept = NEW,
) -> Setup:
    """Make and check everything. Writes only into `data.cache`, where ranks wait for the one that comes first.

    Args:
        config: the run's.
        log: takes one line at a time.
        on_progress: passed to `torchtrain.data.prepare`.
        world: this rank's place; its device is where the model goes.
        check: called with the identity of model, tokenizer and data before anything is tokenised or loaded, again with
            the identity of the tokens, and again with that of the weights.
        kept: what was decided when the run that resumes began.

    Raises:
        UserError: anything that does not fit; see the functions that are called here.
    """
    device = world.device
    asked = config.model.attention, device, getattr(torch, config.model.dtype)
    resolve_engine(*asked)  # what cannot run here is refused before a hub is asked
    length = config.pack.sequence_length
    trusted = config.model.trust_remote_code
    source = resolve_source(config.model.source, config.data.cache, log, trust_remote_code=trusted)
    own_config = open_config(source, trusted)
    engine = resolve_engine(*asked, capped=caps_scores(own_config))
    if engine == "dense":
        check_tokens(length)
    if config.model.recomputation == "keep_attention":
        check_can_keep(engine)
    check_config(own_config, length)
    check_heads(config, own_config)
    own_positions: int = own_config.max_position_embeddings
    model_config = extend(own_config, config.rope, length)
    if config.model.layer_chunk is not None or config.model.lora is not None:
        shape_of_model(model_config, config.model)  # refuses other layers, and modules that do not exist
    if config.pack.base_variant.restarts:
        check_resets(model_config, length, config.pack.variant)
    tokenizer = open_tokenizer(source, trusted)
    if added := check_tokenizer(tokenizer, model_config.vocab_size, source):
        log(f"warning   {added}")
    anchor_ids(tokenizer, config.pack)

    identity = _identity_of(config, model_config, tokenizer)
    check(identity)
    fused, not_fused = choose_fused(config, source, model_config, world)
    store = prepare(config.data, tokenizer, on_progress)
    # Once on each machine, while the model is loaded: checks every byte of the tokens.
    verified = in_background(store.verify, "verify-tokens") if read_ranks()[2] == 0 else lambda: None
    split = split_documents(store, config.data.held_out_share, config.run.seed)
    identity["tokens"] = _identity_of_tokens(store)
    identity["split"] = {"copies_moved": split.moved}
    check(identity)
    check_store(store, model_config.vocab_size)
    rows, held_out = pack_rows(config, store, tokenizer, split)
    train = config.train
    steps = kept.steps or train.steps
    if train.epochs is not None and kept.steps is None:
        steps = -(-rows.count(train.epochs) // train.sequences_per_step)
        train.with_steps(steps)

    engine, measured = choose_engine(config, engine, kept.engine, own_config, rows, world)
    settings, recomputation = choose_recomputation(config, model_config, engine, world)
    settings = settings.model_copy(update={"fused": fused})
    log(f"loading {config.model.source}")
    # ZeRO 3 cuts the model up while it is read, because no process has room for the whole of it.
    cutter = Cutter(config, world) if config.distributed.zero_stage == 3 else None
    check_same_files(source, world)  # each rank reads them itself
    # The files are read once: for their digest, and by the side of that into the model.
    digest = in_background(partial(digest_weights, source), "digest-weights") if world.rank == 0 else lambda: ""
    model = load_for_training(source, model_config, settings, engine, device, cutter, config.run.seed)
    with world.together():
        sha256 = digest()
    identity["weights"] = {"sha256": world.from_first(sha256)}
    check(identity)
    count = _count(model.parameters())
    log(f"model     {config.model.source}: {count:,} parameters in {config.model.dtype} on {device}")
    if getattr(own_config, "tie_word_embeddings", False) and not model.config.tie_word_embeddings:
        log("head      is not the embedding, as config.json says it is: both are trained, and exported as untied")
    if products := describe_products(model.dtype, device):
        log(f"products  {products}")
    if config.model.lora is not None:
        trained = _count(p for p in model.parameters() if p.requires_grad)
        log(f"lora      {trained:,} parameters are trained, {count - trained:,} stay as they are")
    if threads := share_cores(config.distributed, device):
        log(f"threads   {threads}")
    if world.size > 1:
        log(f"processes {world.size}: {describe_layout(config, world)}")
    if recomputation:
        log(f"layers    {recomputation}")
    if fused == "compile":
        log("fused     by torch.compile, which makes the first step about a minute longer; attention is not fused")
    elif not_fused:
        log(f"fused     {not_fused}")
    log(f"attention {engine} · {length:,} tokens a row (the model held {own_positions:,})")
    if measured:
        log(f"attention {measured}")
    log(f"variant   {describe_variant(config.pack)}")
    log(f"rope      {describe_rope(model_config, own_config)}")
    if warning := warn_of_stretch(own_positions, length):
        log(f"warning   {warning}")
    plan = rows.plan(0)
    log(f"data      {len(store.domains)} domains, {plan.tokens:,} training tokens in {len(rows):,} rows")
    log(f"packing   {config.pack.strategy}: {plan.cuts:,} cuts, {plan.padding_tokens:,} tokens of padding")
    if store.targets is not None:
        answers = sum(int(shard.sum()) for shard in store.targets)
        log(f"answers   {answers:,} of the corpus's {store.token_count:,} tokens are targets")
    dropped = plan.dropped_tokens
    if missing := _left_out(store, dropped, rows.too_long):
        log(f"left out  {missing}")
    if bare := _domains_without_held_out(store, split):
        log(f"held out  no document of {', '.join(bare)}: all are copies of too many others")
    if store.copies:
        log(f"copies    {_copies(store, split)}")
    if special := sum(count.special_records for count in store.header.sources):
        meaning = "text" if config.data.special_tokens == "text" else "control tokens"
        log(
            f"special   {special:,} records hold what looks like a special token, read as {meaning} "
            "(data.special_tokens)"
        )
    per_step = config.train.sequences_per_step
    log(f"training  {steps:,} steps of {per_step} rows: {steps * per_step / len(rows):.2g} epochs")
    if not held_out:
        log("held out  nothing (data.held_out_share 0): no loss of documents that were not trained on is measured")
    if per_step > len(rows):
        log(
            f"warning   train.sequences_per_step {per_step:,} is more than the {len(rows):,} rows that there are: "
            "a step takes some more than once; lower it, shorten pack.sequence_length, or add documents"
        )
    verified()
    record = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "engine": engine,
        "engine_measured": measured,
        "activation_checkpointing": settings.activation_checkpointing,
        "fused": fused,
        "processes": world.size,
        "steps": steps,
        "identity": identity,
        "model_origin": _origin(source),
        "corpus_fingerprint": store.header.fingerprint,
        "corpus": {
            "domains": [asdict(summary) for summary in store.header.summaries],
            "sources": [asdict(count) for count in store.header.sources],
            "made_of": store.header.made_of,
            "dropped_tokens": dropped,
            "copies": store.copies,
            "copies_moved": split.moved,
        },
    }
    here_already = config.model.source == "smollm2" or Path(config.model.source).is_dir()
    base = str(Path(source).resolve()) if here_already else config.model.source
    return Setup(engine, base, source, model, tokenizer, own_positions, steps, store, rows, held_out, identity, record)


def choose_recomputation(
    config: Config, model_config: "PretrainedConfig", engine: str, world: World
) -> tuple[ModelConfig, str]:
    """Return the model's settings with `activation_checkpointing: auto` decided, and the choice in words.

    Args:
        config: the run's.
        model_config: what `torchtrain.modeling.rope.extend` returned.
        engine: of attention.
        world: this rank's place.

    Returns:
        An empty text where there was nothing to decide.
    """
    if config.model.activation_checkpointing != "auto":
        return config.model, ""
    from torchtrain.planning import budget

    shapes, free = budget.Shapes(model_config), free_memory(world.device)

    def bytes_with(recomputation: Recomputation) -> int:
        model = config.model.model_copy(update={"activation_checkpointing": recomputation})
        needed = budget.count_memory(config.model_copy(update={"model": model}), shapes, world.size)
        return needed.gpu if world.device.type == "cuda" else needed.gpu + needed.host // world.size

    def fits(recomputation: Recomputation) -> bool:
        (fitting,) = world.sum([float(bytes_with(recomputation) <= _SHARE * free)])
        return fitting == world.size

    chosen, words = True, "recomputed in the backward pass"
    if fits(False):
        chosen, words = False, "none recomputed"
    elif can_keep(engine) and fits("keep_attention"):
        chosen, words = "keep_attention", "recomputed in the backward pass, but for attention"
    room = f"{free / _GIB:.1f} GiB are free" if free else "the free memory is not known"
    words += f": keeping them takes {bytes_with(False) / _GIB:.1f} GiB, {room}"
    return config.model.model_copy(update={"activation_checkpointing": chosen}), words


def choose_fused(
    config: Config, source: str, model_config: "PretrainedConfig", world: World
) -> tuple[Literal["compile", "none"], str]:
    """Return whether the layers run compiled, `compile` or `none`, and why `auto` leaves them as they are.

    All ranks must call it, and choose alike.

    Args:
        config: the run's.
        source: what `resolve_source` returned.
        model_config: what `torchtrain.modeling.rope.extend` returned.
        world: this rank's place.

    Raises:
        UserError: `model.fused` is `compile`, and torch cannot compile here.
    """
    if config.model.fused == "compile":
        check_compiler(world.device)
    if config.model.fused != "auto" or world.device.type != "cuda":
        return "compile" if config.model.fused == "compile" else "none", ""
    why = config.not_compiled.partition(",")[0]
    if not why and not has_layers(without_weights(source, model_config, config.model.trust_remote_code)):
        why = f"{model_config.model_type}, which has no decoder layers that can be compiled one by one"
    if not why:
        try:
            check_compiler(world.device)
        except UserError as error:
            why = str(error).removeprefix("model.fused compile: ")
    (able,) = world.sum([float(not why)])
    if able == world.size:
        return "compile", ""
    return "none", f"not compiled: {why or 'another process cannot compile'}"


def choose_engine(
    config: Config,
    engine: str,
    kept: str | None,
    model_config: "PretrainedConfig",
    rows: PackedRows,
    world: World,
) -> tuple[str, str]:
    """Return the engine of the run, and what was measured, in words. All ranks must call it; rank 0 decides.

    On a GPU the numbers of the engine are checked. `auto` measures the engines there, unless layers have windows or a
    soft cap, which not every engine computes.

    Args:
        config: the run's.
        engine: what `resolve_engine` returned.
        kept: what `auto` chose when the run that resumes began; it stays, because another moves the last digits.
        model_config: of the model.
        rows: of the run; the second is the one that counts.
        world: this rank's place.

    Raises:
        UserError: the engine's numbers are wrong here, or none can be chosen.
    """
    if world.device.type != "cuda":
        return engine, ""
    text = model_config.get_text_config(decoder=True)
    plain = set(layer_windows(model_config)) == {None} and not caps_scores(model_config)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if not plain or getattr(text, "kv_lora_rank", None):  # nor heads whose keys are wider than their values
        return engine, ""
    shared = config.distributed.sequence_parallel if config.distributed.share == "heads" else 1
    keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    queries, keys = (max(1, count // shared) for count in (text.num_attention_heads, keys))
    heads = measure.Heads(queries, keys, width, getattr(torch, config.model.dtype), world.device)
    chosen, words = engine, ""
    with world.together():
        if world.rank == 0:
            if config.model.attention == "auto" and kept is None:
                plans = [make_plan(torch.from_numpy(rows.row_at(i)["document_ids"])[None]) for i in range(2)]
                found = measure.measure_engines(measure.CANDIDATES, plans, heads)
                if not (times := {name: x for name, x in found.items() if isinstance(x, float)}):
                    raise UserError(f"model.attention auto: no engine can run: {'; '.join(map(str, found.values()))}")
                chosen = min(times, key=lambda name: times[name])
                words = measure.describe(found, chosen)
            else:
                chosen = engine if kept is None else kept
                measure.check_engine(chosen, heads)
    return world.from_first((chosen, words))


def pack_rows(
    config: Config, store: TokenStore, tokenizer: "PreTrainedTokenizerFast", split: Split
) -> tuple[PackedRows, list[dict[str, np.ndarray]]]:
    """Return the training rows, and up to `held_out.sequences` held-out rows of each domain.

    A held-out row holds documents of one domain, so that every domain is measured, however large it is.

    Raises:
        UserError: no documents to train on, or none held out; or no row has a target.
    """
    train, held = split.train, split.held_out

    def pack_documents(documents: np.ndarray, last: str, together: int = 1) -> PackedRows:
        return PackedRows(
            store,
            documents,
            config.pack.model_copy(update={"last": last}),
            config.run.seed,
            anchor_ids(tokenizer, config.pack),
            tag_ids(tokenizer, config.pack, store.domains),
            pad_id(tokenizer),
            together,
        )

    rows = pack_documents(train, config.pack.last)
    if not any((rows[i]["shift_labels"] != IGNORED).any() for i in range(len(rows))):
        raise UserError(
            f"data.sources: no row has a token to train on: each of the {len(train):,} training documents is too short "
            "to have a next token; give longer documents"
        )
    if not len(held) and config.data.held_out_share:
        copies = f" ({store.copies} are copies of others)" if store.copies else ""
        raise UserError(
            f"data.held_out_share {config.data.held_out_share:g} of {len(store)} documents{copies} holds none out, so "
            "there is nothing to evaluate on; raise it or give more documents"
        )
    by_domain = (held[store.document_domains[held] == domain] for domain in range(len(store.domains)))
    held_out_rows = [pack_documents(documents, "pad") for documents in by_domain if len(documents)]
    held_out = [rows[i] for rows in held_out_rows for i in range(min(config.held_out.sequences, len(rows)))]
    return rows, held_out


def describe_variant(pack: PackConfig) -> str:
    """Return a sentence on the rows of this variant, for people."""
    text = f"{pack.variant}: {pack.base_variant.meaning}"
    if pack.tag:
        text += "; each document begins with a tag, which is never a target"
    if pack.interleave and pack.base_variant.restarts:
        text += "; +interleave changes nothing, because positions restart in each document"
    elif pack.interleave:
        pieces = "2 or 3" if pack.split == "authors" else f"{pack.chunks}"
        text += f"; documents are cut into {pieces} chunks that take the positions of a random merge"
    return text


def _identity_of(
    config: Config, model_config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerFast"
) -> dict[str, Any]:
    """Return what decides the numbers and is not in the config itself."""
    model = json.loads(model_config.to_json_string(use_diff=False))
    for transient in ("_name_or_path", "transformers_version"):
        model.pop(transient, None)
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {
        "tokenizer": {"encoding": tokenizer_identity(tokenizer), **ids},
        "model": model,
        "data": data_identity(config.data, tokenizer),
    }


def _identity_of_tokens(store: TokenStore) -> dict[str, Any]:
    """Return digests that change when a corpus gives other tokens, even if its files look the same."""
    places = hashlib.sha256(store.offsets.tobytes() + store.document_domains.tobytes()).hexdigest()
    identity = {
        "domains": store.domains,
        "documents": len(store),
        "tokens": store.token_count,
        "places": places,
        "sha256": store.header.sha256,
        "contents": hashlib.sha256(store.content_hashes.tobytes()).hexdigest(),
    }
    return identity


def _domains_without_held_out(store: TokenStore, split: Split) -> list[str]:
    """Return the domains of two documents or more of which none is held out."""
    if not len(split.held_out):
        return []
    counts, held = (
        np.bincount(domains, minlength=len(store.domains))
        for domains in (store.document_domains, store.document_domains[split.held_out])
    )
    return [name for name, count, out in zip(store.domains, counts, held, strict=True) if count > 1 and not out]


def _left_out(store: TokenStore, dropped: int, too_long: int) -> str:
    """Return, in words, which parts of the sources are in no row; empty if all are."""
    parts = []
    if bad := [count for count in store.header.sources if count.bad_records]:
        total = sum(count.bad_records for count in bad)
        parts.append(f"{total:,} bad records (first {bad[0].first_bad}; all in {store.bad_records})")
    if short := sum(summary.short_documents for summary in store.header.summaries):
        tokens = sum(summary.short_tokens for summary in store.header.summaries)
        parts.append(f"{short:,} short documents ({tokens:,} tokens)")
    if dropped:
        parts.append(f"{dropped:,} tokens dropped with the last row")
    if too_long:
        parts.append(f"{too_long:,} documents with answers that are longer than a row (pack.longer)")
    return ", ".join(parts)


def _copies(store: TokenStore, split: Split) -> str:
    """Return, in words, how many documents have the same text, and what was done about it."""
    moved = f"; {split.moved:,} changed sides, so that none trains whose copy is held out" if split.moved else ""
    return f"{store.copies:,} of {len(store):,} documents hold the text of another{moved}"


def _count(parameters: Iterable["torch.nn.Parameter"]) -> int:
    return sum(whole_shape(parameter).numel() for parameter in parameters)


def _origin(source: str) -> dict[str, Any]:
    path = Path(source) / ORIGIN
    return read_json(path, "model.source") if path.is_file() else {"source": source}
