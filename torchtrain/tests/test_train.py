"""Training end to end on tiny models, and the arithmetic of a step against naive twins in float64."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchtrain
from anchorline.errors import UserError
from torchtrain.attention.rule import visible_BTT
from torchtrain.config import RopeConfig, TrainConfig, load_config
from torchtrain.data import prepare, split_documents, stack_rows, tag_ids
from torchtrain.marks import IGNORED
from torchtrain.modeling.rope import extend
from torchtrain.run.recipe import resume, train
from torchtrain.run.setup import pack_rows
from torchtrain.tests.runs import assert_same
from torchtrain.tests.tiny import (
    FAMILIES,
    MORE_FAMILIES,
    POSITIONS,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from torchtrain.training.events import read_metrics
from torchtrain.training.held_out import HeldOut, measure_held_out
from torchtrain.training.optimizer import Optimizer
from torchtrain.training.step import accumulate, make_micro_batches, step_batches
from torchtrain.training.strategy import Replicated

EPS = torch.finfo(torch.float64).eps
QUIET = Console(quiet=True)


@pytest.fixture
def run(tree, write_config):
    """Return a function that trains the tree with overrides."""
    return lambda *overrides: train(load_config(write_config(tree), overrides), console=QUIET)


def events(result) -> list[dict]:
    return read_metrics(result.model.parent / "metrics.jsonl")


# --- end to end -------------------------------------------------------------------------------------------------------

CASES = [
    ("llama", "anchor", ()),
    ("mistral", "full", ("rope.type=yarn", "rope.theta=keep")),
    ("qwen3", "anchor+tag", ("rope.type=ntk", "rope.theta=keep", "train.schedule=cosine")),
    ("llama", "intra+interleave", ("model.dtype=bfloat16", "model.activation_checkpointing=true")),
]


@pytest.mark.parametrize(("family", "variant", "overrides"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_loss_falls_and_the_export_loads(run, model_folder, family, variant, overrides):
    source = model_folder(family)
    result = run(f"model.source={source}", f"pack.variant={variant}", *overrides)
    for domain, before in result.before.by_domain.items():
        assert result.after.by_domain[domain].value < before.value - 0.5, domain
    assert result.after.overall.value < result.before.overall.value - 0.5
    if "reset" not in variant:  # there no token stands at a position that is new
        assert result.after.new_positions.value < result.before.new_positions.value - 0.5

    model = AutoModelForCausalLM.from_pretrained(result.model)
    assert model.config.max_position_embeddings == 2 * POSITIONS
    assert model.config.model_type == family
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    assert tokenizer.model_max_length == 2 * POSITIONS


@pytest.mark.one_of(3)
@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_a_family_trains_resumes_exports_and_reloads(run, tmp_path, model_folder, family):
    theta = "keep" if family == "nemotron_h" else "5e6"  # attention without RoPE
    result = run(
        f"model.source={model_folder(family)}", f"rope.theta={theta}", "train.steps=4", "save.every=2", "save.keep=2"
    )
    assert result.after.overall.value < result.before.overall.value
    straight, again = result.model.parent, tmp_path / "again"
    shutil.copytree(straight, again)
    resume(load_config(again / "config.yaml", [f"run.folder={again}"]), step=2, console=QUIET)
    assert_same(again, straight)

    # The export computes a row of one document as transformers does by itself, with windows, caps, sinks and all.
    ids = torch.randint(256, (1, 2 * POSITIONS), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(again / "model", attn_implementation="eager").eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped kernels have no float64
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        torchtrain.attach(model)
        found = model(ids, document_ids=torch.ones_like(ids), use_cache=False).logits
        model.set_attn_implementation("eager")
        truth = model.double()(ids, use_cache=False).logits
    # Attention errs no more than twice as far from float64 as transformers' own does, plus one rounding.
    one_rounding = torch.finfo(torch.float32).eps * truth.abs().max()
    assert (found - truth).abs().max() <= 2 * (plain - truth).abs().max() + one_rounding


def test_what_a_run_leaves(run, tree):
    result = run()
    folder = result.model.parent
    left = {
        "model",
        "metrics.jsonl",
        "timing.jsonl",
        "loss.png",
        "config.yaml",
        "run.json",
        "outputs.json",
        "checkpoints",
        ".lock",
    }
    assert {path.name for path in folder.iterdir()} == left
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert resolved["train"]["betas"] == [0.9, 0.95]
    record = json.loads((folder / "run.json").read_text())
    assert record["engine"] == "sdpa"
    assert record["versions"]["torch"] == torch.__version__

    first, *steps, last = events(result)
    assert (first["event"], first["step"], last["event"], last["step"]) == ("evaluation", 0, "evaluation", 12)
    assert [event["step"] for event in steps] == list(range(1, 13))
    assert steps[-1]["tokens_seen"] == last["tokens_seen"] == result.tokens_seen
    for event in [first, *steps, last]:
        parts = event["domains"].values()
        assert sum(part["labelled_tokens"] for part in parts) == event["labelled_tokens"]
        total = sum(part["loss"] * part["labelled_tokens"] for part in parts)
        assert total / event["labelled_tokens"] == pytest.approx(event["loss"], rel=8 * EPS)
    timings = read_metrics(folder / "timing.jsonl")
    assert [event["step"] for event in timings if event["event"] == "step"] == list(range(1, 13))
    start, first, *_ = timings
    assert (start["event"], start["step"]) == ("begin", 0)
    assert "mfu" not in first
    assert first["since_start"] > first["seconds"]


def test_held_out_documents_are_not_trained_on(tree, write_config):
    _, rows, held_out, store = packed(tree, write_config)

    def seen(arrays):
        text = "".join(chr(33 + i) for row in arrays for i in row["input_ids"].tolist())
        return {i for i in range(len(store)) if "".join(chr(33 + t) for t in store.document(i).tolist()) in text}

    # 20 rows a domain: all that is held out. A document that a row's end cuts is found in neither.
    trained, held = seen([rows[i] for i in range(len(rows))]), seen(held_out)
    assert held
    assert not trained & held
    assert {store.document_domains[i] for i in held} == {0, 1}


@pytest.mark.parametrize("variant", ["anchor", "full", "intra_reset+tag", "anchor+tag+interleave"])
def test_a_held_out_row_holds_as_much_of_each_domain(tree, write_config, variant):
    given = f"pack.variant={variant}", "held_out.sequences=2", "data.held_out_share=0.5", "held_out.together=true"
    config, _, together, store = packed(tree, write_config, *given)
    tags = tag_ids(tiny_tokenizer(), config.pack, store.domains)
    assert len(together) == 2
    for row in together:
        length = len(row["input_ids"])
        for domain in range(2):  # room for a tag alone stays empty; the anchor is one token
            room = (length - 1) // 2 - (row["domain_ids"] == domain).sum()
            assert 0 <= room <= len(tags.get(domain, ()))
        assert sorted(row["position_ids"]) == list(range(length)) or "reset" in variant
        if config.pack.base_variant.separates:
            owners = set(zip(row["document_ids"], row["domain_ids"], strict=True))
            assert len({document for document, domain in owners if domain >= 0}) == sum(d >= 0 for _, d in owners)


def test_a_diverging_run_says_so(run):
    with pytest.raises(UserError, match=r"step \d+: the (loss|gradient's norm) is .*lower train\.learning_rate"):
        run("train.learning_rate=1e30", "train.clip_norm=null", "train.warmup_steps=0")


# --- one step, against naive twins ------------------------------------------------------------------------------------


def packed(tree, write_config, *overrides: str):
    config = load_config(write_config(tree), ("held_out.sequences=20", *overrides))
    store = prepare(config.data, tiny_tokenizer())
    split = split_documents(store, config.data.held_out_share, config.run.seed)
    return config, *pack_rows(config, store, tiny_tokenizer(), split), store


def test_a_run_packs_the_rows_of_a_step_alike_and_may_hold_nothing_out(tree, write_config):
    nothing = ("held_out.together=true", "data.held_out_share=0")
    alike = ("pack.strategy=by_length", "train.sequences_per_step=4")
    _, rows, held_out, _ = packed(tree, write_config, *nothing, *alike)
    lengths = [sum(len(span.tokens) ** 2 for span in rows.spans(row)) for row in range(len(rows) // 4 * 4)]
    steps = sorted(sorted(lengths[first : first + 4]) for first in range(0, len(lengths), 4))
    assert held_out == []
    assert len(steps) > 3
    assert all(one[-1] <= other[0] for one, other in itertools.pairwise(steps)), "no step lies across another"
    tag = f"pack.tag_template='{{domain}}{'ab' * (POSITIONS // 2)}'"  # fits into a row, and not into half of one
    with pytest.raises(UserError, match=r"^held_out\.together: leaves \d+ tokens of a row to each of 2 domains: "):
        packed(tree, write_config, "held_out.together=true", "pack.variant=anchor+tag", tag)


@pytest.fixture
def model():
    """A tiny Llama in float64 that trains through our attention."""
    torchtrain.register()
    model = tiny_model("llama", dtype=torch.float64, max_position_embeddings=2 * POSITIONS)
    model.set_attn_implementation("anchor_segments")
    return model.train()


def gradients(model) -> list[Tensor]:
    taken = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return taken


def test_a_step_is_the_same_however_it_is_cut_into_micro_batches(tree, write_config):
    _, rows, _, store = packed(tree, write_config)
    settings = TrainConfig(sequences_per_step=4, epsilon=1e-3)
    rate, trained = 1e-2, []
    for micro_batch in (1, 2, 4):
        torchtrain.register()
        model = tiny_model("llama", dtype=torch.float64, max_position_embeddings=2 * POSITIONS)
        model.set_attn_implementation("anchor_segments")
        cut = settings.model_copy(update={"micro_batch": micro_batch})
        batches = step_batches(rows, 0, cut, store.domains)
        assert [len(batch.part["input_ids"]) for batch in batches] == [micro_batch] * (4 // micro_batch)
        losses, pairs = accumulate(Replicated(model, None), batches, store.domains, chunk=37)
        taken = [p.grad.clone() for p in model.parameters()]
        Optimizer(model, cut).step(rate)
        trained.append((losses, pairs, taken, [p.detach() for p in model.parameters()]))

    (losses, pairs, taken, weights), *others = trained
    n = losses.overall.tokens
    for other_losses, other_pairs, other_taken, other_weights in others:
        assert other_pairs == pairs
        assert other_losses.overall.tokens == n
        assert other_losses.overall.total == pytest.approx(losses.overall.total, rel=n * EPS)
        for domain, mean in losses.by_domain.items():
            assert other_losses.by_domain[domain].tokens == mean.tokens
            assert other_losses.by_domain[domain].total == pytest.approx(mean.total, rel=n * EPS)
        # The same n terms are summed in another order. AdamW turns a difference in the gradient into at most
        # rate / epsilon of it in the weight, since its step is rate * m / (sqrt(v) + epsilon).
        bound = n * EPS * max(gradient.abs().max() for gradient in taken)
        assert max((a - b).abs().max() for a, b in zip(taken, other_taken, strict=True)) <= bound
        moved = max((a - b).abs().max() for a, b in zip(weights, other_weights, strict=True))
        assert moved <= bound * rate / settings.epsilon


@pytest.mark.parametrize("variant", ["full", "anchor+tag+interleave"])
def test_longrope_takes_the_same_factors_whatever_the_micro_batch(tree, write_config, variant):
    """It goes by the batch's largest position: rows reach the last one, padded ones too."""
    lists = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    config = extend(tiny_config(), RopeConfig(type="longrope", **lists), 2 * POSITIONS)
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    _, rows, held_out, _ = packed(tree, write_config, f"pack.variant={variant}")
    assert any((row["document_ids"] < 0).any() for row in held_out)
    short = rotary.inv_freq.clone()
    rotary(torch.zeros(1), torch.arange(2 * POSITIONS)[None])
    long = rotary.inv_freq.clone()
    assert not torch.equal(short, long)
    for batch in [[row] for row in held_out] + [[rows[0], rows[1]]]:
        rotary(torch.zeros(1), torch.arange(2)[None])  # back to the short ones
        rotary(torch.zeros(1), stack_rows(batch)["position_ids"])
        assert torch.equal(rotary.inv_freq, long)


def test_losses_by_domain_are_those_of_each_document_alone(model, tree, write_config):
    _, rows, _, store = packed(tree, write_config, "pack.variant=intra_reset")
    batches = step_batches(rows, 0, TrainConfig(sequences_per_step=3), store.domains)
    losses, _ = accumulate(Replicated(model, None), batches, store.domains, chunk=37)

    model.set_attn_implementation("sdpa")
    sums, counts = dict.fromkeys(store.domains, 0.0), dict.fromkeys(store.domains, 0)
    for batch in (batch.part for batch in batches):
        for document in batch["document_ids"][0].unique():
            if document < 0:
                continue
            own = batch["document_ids"][0] == document
            labels = batch["shift_labels"][0, own]
            logits = model(batch["input_ids"][:, own], use_cache=False).logits[0]
            domain = store.domains[int(batch["domain_ids"][0, own][-1])]
            sums[domain] += F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
            counts[domain] += int((labels != IGNORED).sum())
    assert min(counts.values()) > 0
    for domain, mean in losses.by_domain.items():
        assert mean.tokens == counts[domain]
        # Each token's loss is some 100 roundings a layer away, of numbers whose size the loss's own bounds.
        assert mean.total == pytest.approx(sums[domain], rel=200 * EPS)


def test_evaluation_is_the_loss_of_training_and_knows_new_positions(model, tree, write_config):
    _, _, held_out, store = packed(tree, write_config)
    result = measure_held_out(model, held_out, HeldOut(store.domains, own_positions=50), chunk=37)
    assert model.training
    batches = make_micro_batches([stack_rows([row]) for row in held_out], store.domains)
    losses, _ = accumulate(Replicated(model, None), batches, store.domains, chunk=37)
    assert result.overall == losses.overall
    assert result.by_domain == losses.by_domain

    blind = [
        {**row, "shift_labels": np.where(row["position_ids"] < 50, IGNORED, row["shift_labels"])} for row in held_out
    ]
    batches = make_micro_batches([stack_rows([row]) for row in blind], store.domains)
    new, _ = accumulate(Replicated(model, None), batches, store.domains, chunk=37)
    assert 0 < new.overall.tokens < losses.overall.tokens
    assert result.new_positions.tokens == new.overall.tokens
    assert result.new_positions.total == pytest.approx(new.overall.total, rel=new.overall.tokens * EPS)

    seen = [visible_BTT(torch.from_numpy(row["document_ids"])[None])[0].sum(1) for row in held_out]
    labelled = [torch.from_numpy(row["shift_labels"]) != IGNORED for row in held_out]
    for start, mean in result.by_context.items():
        counts = ((x >= start) & (x < 2 * start) & of for x, of in zip(seen, labelled, strict=True))
        assert mean.tokens == sum(int(chosen.sum()) for chosen in counts)
    total = math.fsum(mean.total for mean in result.by_context.values())
    assert total == pytest.approx(result.overall.total, rel=losses.overall.tokens * EPS)
    assert result.as_dict()["contexts"].keys() == {str(s) for s, mean in result.by_context.items() if mean.tokens}


def test_a_step_without_a_label_changes_nothing_but_by_decay(model):
    tokens = torch.zeros(1, 8, dtype=torch.long)
    batch = {"input_ids": tokens, "position_ids": torch.arange(8)[None], "document_ids": tokens + 1}
    batch |= {"shift_labels": tokens + IGNORED, "domain_ids": tokens}
    losses, _ = accumulate(Replicated(model, None), make_micro_batches([batch], ["only"]), ["only"], chunk=4)
    assert losses.overall.value is None
    assert not any(g.any() for g in gradients(model))
