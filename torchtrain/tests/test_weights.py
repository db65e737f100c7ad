"""Weights of targets: by effective context, of one's own, and what a step makes of them."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from rich.console import Console

import torchtrain
from anchorline.errors import UserError
from torchtrain.attention.rule import visible_BTT
from torchtrain.config import DataConfig, LossWeightConfig, PackConfig, Source, TrainConfig, load_config
from torchtrain.data import PackedRows, prepare, stack_rows
from torchtrain.data.answers import AnswerEncoder, kind_of
from torchtrain.data.files import BadItemError
from torchtrain.data.weights import LossWeights, effective_contexts
from torchtrain.marks import IGNORED
from torchtrain.run.recipe import train
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl
from torchtrain.tests.layouts import document_ids, named_batch
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer
from torchtrain.training.events import read_metrics
from torchtrain.training.step import accumulate, make_micro_batches
from torchtrain.training.strategy import Replicated


def row_of(documents: list[int], labels: list[int] | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a row, of other tokens at each place."""
    ids = np.array(documents)
    tokens = np.arange(len(ids)) % 7 + 3
    targets = np.roll(tokens, -1) if labels is None else np.array(labels)
    arrays = {"input_ids": tokens, "position_ids": np.arange(len(ids)), "document_ids": ids}
    return arrays | {"shift_labels": np.where(ids > 0, targets, IGNORED), "domain_ids": np.zeros_like(ids)}


# --- by effective context ---------------------------------------------------------------------------------------------


@given(document_ids())
def test_a_token_sees_what_the_rule_says(ids_BT):
    for rows in (ids_BT, named_batch()):
        for ids_T, seen_T in zip(rows, visible_BTT(rows).sum(2), strict=True):
            assert effective_contexts(ids_T.numpy()).tolist() == seen_T.tolist()


# An anchor and documents of 3, 6 and 14 tokens, which all predict. Their contexts begin at 2: those of 4 to 7 number
# 1 + 4 + 4, those of 8 to 15 number 8, all in the last document.
ROW = row_of([0] + [1] * 3 + [2] * 6 + [3] * 14 + [-1] * 8)
IN_BUCKETS = [6, 9, 8, 0, 0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1 + 17 / 18, 1 + 17 / 16, 11, 11]),
        ({"extra": 3.0}, [1, 1 + 51 / 18, 1 + 51 / 16, 11, 11]),
        ({"extra": 3.0, "most": 3.0}, [1, 1 + 51 / 18, 4, 4, 4]),
        ({"extra": 3.0, "share": "even"}, [1, 4, 4, 4, 4]),
        ({"extra": -1.0, "share": "even"}, [1, 0, 0, 0, 0]),
    ],
)
def test_buckets_have_the_weights_that_the_definition_gives(settings, expected):
    made = LossWeights.measure(LossWeightConfig(tail=4, **settings), [ROW])
    assert made.targets_K.tolist() == IN_BUCKETS
    np.testing.assert_allclose(made.weights_K, expected, rtol=2.0**-24)
    weights_T = made.weigh(ROW, np.random.default_rng())["weights"]
    assert weights_T.dtype == np.float32
    for seen, weight in zip(effective_contexts(ROW["document_ids"]).tolist(), weights_T.tolist(), strict=True):
        assert weight == made.weights_K[sum(seen >= start for start in (4, 8, 16, 32))]
    if settings == {}:
        extra = np.where(ROW["shift_labels"] == IGNORED, 0, weights_T.astype(float) - 1)
        assert extra.sum() / sum(IN_BUCKETS[1:]) == pytest.approx(1.0, rel=1e-6), "extra, in the mean of the tail"


def test_frequencies_are_those_of_the_first_rows_and_of_targets_alone():
    some = row_of([1] * 16, [5, IGNORED] * 8)
    assert LossWeights.measure(LossWeightConfig(tail=4), [some, some]).targets_K.tolist() == [4, 4, 8, 0]


def packed(**settings) -> PackedRows:
    texts = ["ab " * n for n in (3, 9, 14, 8, 9, 5, 12, 11, 7, 10, 9, 13, 6, 9)]
    rows = torchtrain.pack(texts, tiny_tokenizer(), 96, variant="anchor+interleave")
    rows.loss_weights = LossWeights.measure(LossWeightConfig(tail=8, **settings), list(rows))
    return rows


def test_a_placebo_gives_a_rows_weights_to_other_targets():
    own, given_away, moved = packed(), packed(shuffle=True), 0
    for a, b in zip(own, given_away, strict=True):
        is_target = a["shift_labels"] != IGNORED
        assert (b["shift_labels"] == a["shift_labels"]).all()
        assert sorted(a["weights"][is_target]) == sorted(b["weights"][is_target])
        assert (a["weights"] == b["weights"])[~is_target].all()
        moved += int((a["weights"] != b["weights"]).sum())
    assert moved > 0.25 * sum(int((row["shift_labels"] != IGNORED).sum()) for row in own)
    assert all((given_away[i]["weights"] == packed(shuffle=True)[i]["weights"]).all() for i in range(3))
    assert (given_away.row_at(len(own))["weights"] > 0).all(), "of the second epoch"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tail": 0}, "train.loss_weight.tail: 0"),
        ({}, "train.loss_weight.tail"),
        ({"tail": 8, "extra": -2.0, "share": "even"}, "train.loss_weight.extra: -2.0"),
        ({"tail": 8, "extra": 0.0}, "train.loss_weight: extra 0: inverse_frequency shares out more than 0"),
        ({"tail": 8, "share": "frequency"}, "train.loss_weight.share"),
        ({"tails": 8}, "train.loss_weight.tails: unknown key (did you mean train.loss_weight.tail"),
        ({"tail": 8192}, "train.loss_weight.tail 8192: a row of pack.sequence_length 128 has no target that sees so"),
    ],
)
def test_settings_that_weigh_nothing_are_one_line(tree, write_config, settings, told):
    tree["train"]["loss_weight"] = settings
    with pytest.raises(UserError) as error:
        load_config(write_config(tree))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"tail": 20},
            "train.loss_weight.tail 20: no target of the first rows of 32 tokens sees so many; the most is 15",
        ),
        ({"tail": 1, "extra": -1.0, "share": "even"}, "train.loss_weight.extra -1: every target weighs 0"),
    ],
)
def test_rows_without_a_weight_are_one_line(settings, told):
    with pytest.raises(UserError, match=told):
        LossWeights.measure(LossWeightConfig(**settings), [ROW])


# --- what a step makes of them ----------------------------------------------------------------------------------------


def gradients_of(
    model, rows: list[dict[str, np.ndarray]], micro_batch: int = 1
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradient of a step of these rows, and the loss that it reports."""
    strategy = Replicated(model, TrainConfig())
    batches = [stack_rows(rows[at : at + micro_batch]) for at in range(0, len(rows), micro_batch)]
    losses, _ = accumulate(strategy, make_micro_batches(batches, ["only"]), ["only"], chunk=5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pairs = zip(strategy.optimizer.parameters, strategy.optimizer.masters, strict=True)
    found = {names[id(parameter)]: master.grad.clone() for parameter, master in pairs}
    strategy.drop()
    return found, losses.overall.value


@pytest.fixture(scope="module")
def model():
    torchtrain.register()
    model = tiny_model("llama", dtype=torch.float64)
    model.set_attn_implementation("anchor_segments")
    return model.train()


def weighed(*weights: list[float]) -> list[dict[str, np.ndarray]]:
    return [row_of([0, 1, 1, 1, 1, 2, 2, 2]) | {"weights": np.array(own, dtype=np.float32)} for own in weights]


def test_a_step_is_the_weighted_sum_of_its_tokens_gradients(model):
    """A slow twin: the gradient of each token's loss alone. However a step's rows are split, and whatever they add up
    to."""
    rows = weighed([9, 0.1, 2, 0, 5, 0.5, 1, 9], [9, 0.2, 0, 0, 0.1, 0, 0.3, 9], [9, 0, 0, 0, 0, 0, 0, 9])
    total = sum(row["weights"][row["shift_labels"] != IGNORED].astype(np.float64).sum() for row in rows)
    twin: dict[str, torch.Tensor] = {}
    for row in rows:
        for place in np.flatnonzero(row["shift_labels"] != IGNORED):
            alone = row | {"shift_labels": np.where(np.arange(8) == place, row["shift_labels"], IGNORED)}
            del alone["weights"]
            for name, gradient in gradients_of(model, [alone])[0].items():
                added = gradient * float(row["weights"][place]) / total
                twin[name] = twin.get(name, 0) + added
    plain_loss = gradients_of(model, [{k: v for k, v in row.items() if k != "weights"} for row in rows])[1]
    for micro_batch in (1, 3):
        found, loss = gradients_of(model, rows, micro_batch)
        assert loss == pytest.approx(plain_loss, rel=1e-13), "the loss that is told has no weights"
        for name, gradient in found.items():
            # A sum of 18 tokens' gradients, each of which transformers' norms round to float32, five times a layer.
            bound = 18 * 5 * 2 * 2.0**-24 * twin[name].abs().max()
            assert (gradient - twin[name]).abs().max() <= bound, name


def test_a_target_of_weight_0_has_no_part_in_the_gradient(model):
    (row,) = weighed([9, 1, 0, 2, 0, 0, 3, 9])
    other = row | {"shift_labels": np.where(row["weights"] == 0, 200, row["shift_labels"])}
    other["shift_labels"][row["shift_labels"] == IGNORED] = IGNORED
    assert (other["shift_labels"] != row["shift_labels"]).sum() == 3
    one, two = gradients_of(model, [row])[0], gradients_of(model, [other])[0]
    assert all(torch.equal(one[name], two[name]) for name in one)
    heavier = row | {"weights": 8 * row["weights"]}
    assert all(torch.equal(x, one[name]) for name, x in gradients_of(model, [heavier])[0].items()), "only ratios count"
    nothing = gradients_of(model, [row | {"weights": 0 * row["weights"]}])[0]
    assert not any(gradient.any() for gradient in nothing.values())


# --- of one's own -----------------------------------------------------------------------------------------------------


def test_weights_of_records_are_those_of_the_tokens_that_they_stand_beside(tmp_path):
    random = np.random.default_rng(0)
    records = []
    for n in (5, 9, 1, 14, 3, 7):
        weights = np.round(random.random(n + 1) * 3) / 2
        records.append({"input_ids": random.integers(3, 20, n + 1).tolist(), "weights": [*weights[:-1].tolist(), 2]})
    path = write_jsonl(tmp_path / "a.jsonl", records)
    data = DataConfig(sources=[Source(files=str(path), records="weights")], cache=str(tmp_path / "cache"))
    store = prepare(data, word_tokenizer())
    store.verify()
    for variant in ("anchor", "intra_reset"):
        pack = PackConfig(sequence_length=24, variant=variant, strategy="best_fit")
        rows = PackedRows(store, np.arange(len(store)), pack, 0, [1], {}, 0)
        for row in rows:
            assert row["weights"].dtype == np.float32
            kept = row["shift_labels"] != IGNORED
            pairs = zip(row["shift_labels"][kept].tolist(), row["weights"][kept].tolist(), strict=True)
            assert all(weight > 0 for _, weight in pairs)
        found = sorted(
            (x, w)
            for row in rows
            for x, w in zip(row["shift_labels"].tolist(), row["weights"].tolist(), strict=True)
            if x != IGNORED
        )
        expected = [pair for record in records for pair in list(zip(*record.values(), strict=True))[1:] if pair[1] > 0]
        assert found == sorted(expected)
        rows.loss_weights = LossWeights.measure(LossWeightConfig(tail=4, share="even"), list(rows))
        plain = PackedRows(store, np.arange(len(store)), pack, 0, [1], {}, 0)
        for row, own in zip(rows, plain, strict=True):
            by_context = np.where(effective_contexts(row["document_ids"]) < 4, 1, 2)
            assert (row["weights"] == own["weights"] * by_context).all(), "both"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"weights": [1, 2]}, "weights: is no list of 3 numbers"),
        ({"weights": "abc"}, "weights: is no list of 3 numbers"),
        ({"weights": ["1", "2", "3"]}, "weights: is no list of 3 numbers"),
        ({"weights": [[1], [2, 3], 4]}, "weights: is no list of 3 numbers"),
        ({"weights": [0, -0.5, 1]}, r"weights\[1\] is -0.5; a weight goes from 0 to 1e\+06"),
        ({"weights": [0, 1, float("nan")]}, r"weights\[2\] is nan"),
        ({"weights": [0, 1, 1e39]}, r"weights\[2\] is 1e\+39"),
        ({"weights": [3, 0, 0]}, "no token is a target"),
        ({"weights": [1, 1, 1], "labels": [4, 5, 6]}, "has weights and labels; give weights alone"),
        ({"weights": [1, 1, 1], "input_ids": [4, 5, 999]}, "the token ids go from 4 to 999"),
    ],
)
def test_bad_weights_are_one_line(record, told):
    record = {"input_ids": [4, 5, 6]} | record
    assert kind_of(record) == "weights"
    with pytest.raises(BadItemError, match=told):
        AnswerEncoder(word_tokenizer(), "text", True).encode(record, "weights")
    with pytest.raises(UserError, match=r"documents\[0\]: has weights, which the loss of transformers does not take"):
        torchtrain.pack([record], tiny_tokenizer(), 32)


def test_weights_of_rows_are_not_lost_where_transformers_takes_the_loss():
    with pytest.raises(UserError, match=r"collate: rows\[0\]: has weights, which the loss of transformers does not"):
        torchtrain.collate([packed()[0]])


def test_a_run_weighs_its_targets_and_measures_without(tree, write_config, tmp_path):
    logs, runs = [], {}
    for name, overrides in (("plain", []), ("weighed", ["train.loss_weight.tail=16", "train.loss_weight.extra=3"])):
        folder = tmp_path / name
        console = Console(file=(folder.with_suffix(".log")).open("w"), width=200)
        train(load_config(write_config(tree), [f"run.folder={folder}", "train.steps=2", *overrides]), console=console)
        logs.append(folder.with_suffix(".log").read_text())
        runs[name] = read_metrics(folder / "metrics.jsonl")
    assert "weights   by effective context: from 0 on 1 (" in logs[1]
    plain, weighed = runs["plain"], runs["weighed"]
    assert plain[0] == weighed[0], "held-out loss before training"
    assert json.dumps(plain[0]["contexts"]) > "{"
    assert plain[1]["loss"] == weighed[1]["loss"]
    assert plain[1]["gradient_norm"] != weighed[1]["gradient_norm"]
    assert plain[-1]["loss"] != weighed[-1]["loss"]
