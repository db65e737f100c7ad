"""Bugs that a whole run shows, from corpus and split to resume and export; RoPE's settings; padding inside a row."""

from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from parity_tests.zoo import Bug, bug
from parity_tests.zoo.bugs.attention import blocks_of
from parity_tests.zoo.patch import around, batches, documents, method, swap
from torchtrain.checkpoint.state import fill_masters
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.data.dataset import PackedRows, Split, split_documents, tag_ids
from torchtrain.data.packing import PackPlan, Span
from torchtrain.data.rows import build_row
from torchtrain.data.store import Documents
from torchtrain.data.streams import HELD_OUT, INTERLEAVE, SHUFFLE, random_stream
from torchtrain.marks import ANCHOR, IGNORED, PADDING
from torchtrain.modeling import rope, save
from torchtrain.modeling.load import load_for_training
from torchtrain.modeling.save import save_folder

# -- rows --------------------------------------------------------------------------------------------------------------


def _streams(change):
    """Draw from `random_stream(seed, *change(key))`."""
    return around(random_stream, lambda original, seed, *key: original(seed, *change(key)))


tags_without_their_domain = Bug(
    lambda: around(tag_ids, lambda make, *args: dict.fromkeys(tags := make(*args), next(iter(tags.values()), ())))
)

orders_of_one_epoch = Bug(lambda: _streams(lambda key: (SHUFFLE, 0) if key[0] == SHUFFLE else key))

interleaving_of_one_epoch = Bug(
    lambda: _streams(lambda key: (INTERLEAVE, 0, *key[2:]) if key[0] == INTERLEAVE else key)
)

rows_of_the_first_epoch = Bug(lambda: patch.object(PackedRows, "locate", lambda self, index: (0, index % len(self))))

rows_of_each_epoch_alike = Bug(
    lambda: patch.object(PackedRows, "locate", lambda self, index: divmod(index, self._rows_of(0)))
)
tags_left_out_of_the_count = Bug(
    lambda: patch.object(
        PackedRows, "_rows_of", lambda self, epoch: -(-int(self.lengths[self.documents].sum()) // self._capacity)
    )
)

last_row_left_out = Bug(lambda: patch.object(PackedRows, "_rows_of", lambda self, epoch: len(self.plan(epoch)) - 1))


@bug(method, PackPlan, "spans")
def cut_repeats_a_token(spans, self, row):
    return [Span(d, a - (0 < a < b - 1), b - (0 < a < b - 1)) for d, a, b in spans(self, row)]


@bug(method, Documents, "targets_of")
def answers_of_another_document(targets_of, self, index, start, stop):
    other = (index + 2) % len(self)
    found = targets_of(self, other, 0, int(self.lengths[other]))
    return None if found is None else np.resize(found, stop)[start:]


@bug(method, Documents, "targets_of")
def answers_mask_lost_at_a_cut(targets_of, self, index, start, stop):
    return targets_of(self, index, 0, stop - start)


@bug(around, build_row)
def anchor_labelled_in_intra(original, spans, pack, anchor_ids, *args, **rest):
    row = original(spans, pack, anchor_ids, *args, **rest)
    if len(anchor_ids) == 1 and not pack.base_variant.has_anchor and not pack.interleave and not pack.tag:
        row["shift_labels"][0] = row["input_ids"][1]
    return row


@bug(batches)
def first_column_not_counted(batch):
    labels = batch["shift_labels"].clone()
    labels[:, 0] = IGNORED
    return batch | {"shift_labels": labels}


# -- the split ---------------------------------------------------------------------------------------------------------


@bug(around, split_documents)
def held_out_trained_on(original, store, share, seed):
    found = original(store, share, seed)
    return Split(np.arange(len(store)), found.held_out, found.moved)


split_of_one_seed = Bug(lambda: _streams(lambda key: (HELD_OUT, 0) if key[0] == HELD_OUT else key))


# -- steps and resuming ------------------------------------------------------------------------------------------------


@bug(method, Checkpoints, "load")
def moments_lost_on_resuming(load, self, state, manifest, world):
    load(self, state, manifest, world)
    optimizer, masters = state._adamw()
    for master in masters:
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[master][name].zero_()


masters_of_rounded_weights = Bug(lambda: swap(fill_masters, lambda state, source: ""))


# -- loading and exporting ---------------------------------------------------------------------------------------------


@bug(around, load_for_training)
def ties_broken_on_loading(load, *args, **kwargs):
    model = load(*args, **kwargs)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@bug(around, save_folder)
def exported_in_half(save, model, tokenizer, folder, weights=None, *anchor):
    weights = model.state_dict() if weights is None else weights
    return save(model, tokenizer, folder, {name: x.bfloat16() for name, x in weights.items()}, *anchor)


@bug(method, save, "_add_older_names")
def exported_theta_is_old(add, written):
    add(written)
    written["rope_theta"] = written["rope_parameters"]["rope_theta"] = 10_000.0


@bug(around, rope.extend)
def held_length_stays(extend, config, *args):
    extended = extend(config, *args)
    extended.max_position_embeddings = config.max_position_embeddings
    return extended


# -- RoPE as it is set -------------------------------------------------------------------------------------------------


def _parameters(change):
    """Extend with `change(parameters, own)`, from what RoPE's parameters are to be and were."""
    return method(rope, "_parameters", lambda make, config, own, *more: change(make(config, own, *more), own))


def _without(*names):
    return lambda: _parameters(lambda made, _: {name: value for name, value in made.items() if name not in names})


yarn_betas_dropped = Bug(_without("beta_fast", "beta_slow"))
attention_factor_dropped = Bug(_without("attention_factor"))

llama3_factors_default = Bug(
    lambda: _parameters(
        lambda made, _: (
            made | {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if made["rope_type"] == "llama3" else made
        )
    )
)

theta_given_is_lost = Bug(
    lambda: _parameters(
        lambda made, own: made | {"rope_theta": own["rope_theta"]} if made["rope_type"] != "default" else made
    )
)


@bug(method, rope, "_parameters")
def ntk_from_the_old_theta(make, config, own, settings, *more):
    if settings.type == "ntk":
        settings = settings.model_copy(update={"theta": "keep"})
    return make(config, own, settings, *more)


dynamic_factor_stays = Bug(
    lambda: _parameters(lambda made, own: made | {n: own[n] for n in ("factor",) if own["rope_type"] == "dynamic"})
)

dynamic_factor_starts_anew = Bug(
    lambda: _parameters(
        lambda made, own: made | ({"factor": made["factor"] / own["factor"]} if own["rope_type"] == "dynamic" else {})
    )
)

second_extension_compounds = Bug(
    lambda: patch.object(rope, "_original_length", lambda config, own, answer: config.max_position_embeddings)
)


@bug(around, save_folder)
def exported_tokenizer_keeps_its_length(save, model, tokenizer, folder, *more, **how):
    length = tokenizer.model_max_length
    noted = save(model, tokenizer, folder, *more, **how)
    tokenizer.model_max_length = length
    tokenizer.save_pretrained(folder)
    return noted


# -- padding -----------------------------------------------------------------------------------------------------------


def see_padding_inside(ids: Tensor) -> Tensor:
    """Padding that a document's tokens follow belongs to the document before it."""
    T = ids.shape[1]
    last = torch.where(ids != PADDING, torch.arange(T, device=ids.device), 0).amax(1, keepdim=True)
    filled = ids.clone()
    for t in range(1, T):
        inside = (ids[:, t] == PADDING) & (t < last[:, 0])
        filled[:, t] = torch.where(inside, filled[:, t - 1], ids[:, t])
    return filled


padding_inside_is_seen = Bug(lambda: documents(see_padding_inside))
full_block_with_padding = Bug(lambda: blocks_of(see_padding_inside))


@bug(documents)
def padding_splits_a_document(ids: Tensor) -> Tensor:
    """A document that padding interrupts goes on as another."""
    breaks = ((ids[:, 1:] != PADDING) & (ids[:, :-1] == PADDING)).cumsum(1)
    part = torch.nn.functional.pad(breaks, (1, 0))
    return torch.where(ids > ANCHOR, ids + 1000 * part, ids)
