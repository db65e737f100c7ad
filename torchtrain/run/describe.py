"""The lines that say what a run is made of, before its first step."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from torchtrain.config import Config, PackConfig
from torchtrain.data import Split, TokenStore
from torchtrain.data.answers import NO_END, trains_an_end
from torchtrain.distributed.layout import describe as describe_layout
from torchtrain.distributed.world import World
from torchtrain.modeling.rope import describe as describe_rope
from torchtrain.modeling.rope import warn_of_stretch
from torchtrain.modeling.weights import count_weights
from torchtrain.products import describe_products

if TYPE_CHECKING:
    from torchtrain.run.setup import Setup


def describe_setup(config: Config, setup: "Setup", world: World, log: Callable[[str], None]) -> None:
    """Log the model, its rows, and what a user may not expect of either."""
    source, loaded, store, rows, steps = setup.source, setup.loaded, setup.store, setup.rows, setup.record.steps
    model, words = loaded.model, loaded.words
    count = count_weights(model.parameters())
    log(f"model     {config.model.source}: {count:,} parameters in {config.model.dtype} on {world.device}")
    if getattr(source.own_config, "tie_word_embeddings", False) and not model.config.tie_word_embeddings:
        log("head      is not the embedding, as config.json says it is: both are trained, and exported as untied")
    if products := describe_products(model.dtype, world.device):
        log(f"products  {products}")
    if config.model.lora is not None:
        trained = count_weights(p for p in model.parameters() if p.requires_grad)
        log(f"lora      {trained:,} parameters are trained, {count - trained:,} stay as they are")
    if words["threads"]:
        log(f"threads   {words['threads']}")
    if world.size > 1:
        log(f"processes {world.size}: {describe_layout(config.distributed, config.train, world)}")
    if words["layers"]:
        log(f"layers    {words['layers']}")
    if loaded.fused == "compile":
        log("fused     by torch.compile, which makes the first step about a minute longer; attention is not fused")
    elif words["fused"]:
        log(f"fused     {words['fused']}")
    length, held = config.pack.sequence_length, source.own_positions
    log(f"attention {loaded.engine} · {length:,} tokens a row (the model held {held:,})")
    if words["attention"]:
        log(f"attention {words['attention']}")
    log(f"variant   {describe_variant(config.pack)}")
    log(f"rope      {describe_rope(source.config, source.own_config)}")
    if warning := warn_of_stretch(held, length):
        log(f"warning   {warning}")
    plan = rows.plan(0)
    log(f"data      {len(store.domains)} domains, {plan.tokens:,} training tokens in {len(rows):,} rows")
    log(f"packing   {config.pack.strategy}: {plan.cuts:,} cuts, {plan.padding_tokens:,} tokens of padding")
    if rows.loss_weights is not None:
        log(f"weights   by effective context: {rows.loss_weights}")
    if store.targets is not None:
        answers = sum(np.count_nonzero(shard) for shard in store.targets)
        log(f"answers   {answers:,} of the corpus's {store.token_count:,} tokens are targets")
        if not trains_an_end(store, setup.source.tokenizer):
            log(f"warning   {NO_END}")
    if missing := _left_out(store, plan.dropped_tokens, rows.too_long):
        log(f"left out  {missing}")
    if bare := _domains_without_held_out(store, setup.split):
        log(f"held out  no document of {', '.join(bare)}: all are copies of too many others")
    if store.copies:
        apart = f"; {setup.split.moved:,} changed sides, so that none trains whose copy is held out"
        held = f"{store.copies:,} of {len(store):,} documents hold the text of another"
        log(f"copies    {held}{apart if setup.split.moved else ''}")
    if special := sum(count.special_records for count in store.header.sources):
        meaning = "text" if config.data.special_tokens == "text" else "control tokens"
        records = sum(count.records for count in store.header.sources)
        log(f"special   {special:,} of {records:,} records spell a special token; it is read as {meaning}")
    per_step = config.train.sequences_per_step
    log(f"training  {steps:,} steps of {per_step} rows: {steps * per_step / len(rows):.2g} epochs")
    if not setup.held_out:
        log("held out  nothing (data.held_out_share 0): no loss of documents that were not trained on is measured")
    if per_step > len(rows):
        log(
            f"warning   train.sequences_per_step {per_step:,} is more than the {len(rows):,} rows that there are: "
            "a step takes some more than once; lower it, shorten pack.sequence_length, or add documents"
        )


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


def _domains_without_held_out(store: TokenStore, split: Split) -> list[str]:
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
