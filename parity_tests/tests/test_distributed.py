"""One computation however it is spread: 2 and 4 real processes on gloo against one process, and against the oracle.

Two launches run all cases (`torchtrain/tests/distributed_worker.py`): starting them takes longer than what they do.
The processes of `pytest -n` share them.

Legend: B batch · T tokens of a row · V vocabulary.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from filelock import FileLock

import torchtrain
from anchorline.tolerance import Verdict, judge
from jaxref.loss import mean_and_gradients
from jaxref.optim import step
from jaxref.rounding import preset
from parity_tests.oracle import adamw_of, preset_name
from parity_tests.tests.models import oracle_of, packed_batch, tiny_model
from torchtrain.config import TrainConfig
from torchtrain.modeling.adapters import layer_and_factors, split_off
from torchtrain.tests import distributed_worker as worker
from torchtrain.tests.forks import forks

VOCABULARY = 97
ROWS = 4
# 31 and 95 tokens: neither 2 nor 4 ranks divide them. A document lies across every place where ranks part.
LENGTHS = {
    31: ((9, 1, 15, 5), (12, 8, 3, 7)),
    95: ((40, 1, 30, 23), (10, 50, 2, 32)),
    96: ((40, 1, 30, 24), (10, 50, 3, 32)),
    64: ((10, 16, 15, 22), (8, 31, 16, 8)),  # documents that two ranks can have whole, and four cannot
}
SETTINGS = {"sequences_per_step": ROWS, "loss_chunk": 7, "clip_norm": 0.5, "learning_rate": 1e-2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
    "original_max_position_embeddings": 64,
}
LORA = {"rank": 4, "alpha": 6, "also_train": ["norm"]}
# Name -> family and what of its config is changed.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
}


def batch_of(variant: str, tokens: int, weighted: bool = False) -> dict[str, torch.Tensor]:
    """Four rows, unevenly labelled (the last not at all), documents of two domains by turns; int64 [4, T]."""
    rows = [packed_batch(variant, lengths, VOCABULARY, seed) for seed, lengths in enumerate(LENGTHS[tokens])]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, VOCABULARY, batch["input_ids"].shape, generator=generator)
    masked = torch.rand(labels.shape, generator=generator) < torch.tensor([[0.2], [0.7], [0.5], [1.1]])
    batch["shift_labels"] = labels.masked_fill(masked | (batch["document_ids"] <= 0), -100)
    batch["domain_ids"] = torch.where(batch["document_ids"] > 0, batch["document_ids"] % 2, -1)
    if weighted:
        batch["weights"] = 5 * torch.rand(labels.shape, generator=generator)
    return batch


def _logit_cases() -> list[dict[str, Any]]:
    found = []
    # Every variant in both dtypes; 95 tokens leave a part of a row to pad, 96 do not.
    for number, variant in enumerate(("full", "intra", "intra_reset", "anchor")):
        for dtype, tokens in (("float32", 95 + number % 2), ("bfloat16", 96 - number % 2)):
            found.append({"name": f"logits-{variant}-{tokens}-{dtype}", "model": "llama", "dtype": dtype})
            found[-1] |= {"variant": variant, "tokens": tokens, "logits": True}
    for variant, dtype in (
        ("anchor", "float32"),
        ("anchor", "bfloat16"),
        ("intra_reset", "float32"),
        ("full", "bfloat16"),
    ):
        found.append({"name": f"logits-documents-{variant}-{dtype}", "model": "llama", "dtype": dtype})
        found[-1] |= {"variant": variant, "tokens": 64, "logits": True, "share": "documents"}
    found.append({"name": "logits-longrope-float32", "model": "longrope", "dtype": "float32"})
    found[-1] |= {"variant": "anchor", "tokens": 95, "logits": True}
    return found


def _train_case(dtype: str, stage: int, shared: int, micro_batch: int = 1, offload: str = "none", **more: Any) -> dict:
    case = {"model": "llama", "variant": "anchor", "tokens": 31, "dtype": dtype, "train": True} | more
    case["distributed"] = {"zero_stage": stage, "sequence_parallel": shared, "offload": offload}
    case["distributed"]["share"] = case.get("share", "heads")
    case["settings"] = SETTINGS | {"micro_batch": micro_batch}
    traits = [str(x) for x in more.values()] + ([offload] if offload != "none" else [])
    case["name"] = "-".join([f"zero{stage}", f"sp{shared}", f"rows{micro_batch}", *traits, dtype])
    return case


def _cases() -> dict[int, list[dict[str, Any]]]:
    """Cases by number of processes."""
    cases: dict[int, list[dict[str, Any]]] = {2: [], 4: []}
    for dtype in ("float32", "bfloat16"):
        for stage in range(4):
            cases[2].append(_train_case(dtype, stage, 2, 1 + stage % 2, checkpointing=stage == 3))
            cases[2].append(_train_case(dtype, stage, 1, 2 - stage % 2))
            cases[4].append(_train_case(dtype, stage, 4 - 2 * (stage % 2), 1 + stage // 3))
        cases[4].append(_train_case(dtype, 2, 1, offload="optimizer"))
        cases[4].append(_train_case(dtype, 3, 2, offload="all"))
    cases[2].append(_train_case("float32", 3, 2, model="tied"))
    cases[2].append(_train_case("float32", 1, 2, share="documents"))
    cases[2].append(_train_case("bfloat16", 3, 2, 2, share="documents"))
    for processes, dtype, stage, shared, more in (
        (2, "float32", 0, 1, {}),
        (2, "float32", 0, 2, {"share": "documents"}),
        (2, "bfloat16", 3, 2, {}),
        (4, "float32", 2, 2, {}),
    ):
        cases[processes].append(_train_case(dtype, stage, shared, weights=True, **more))
    # Compiled layers, without what a compiler would round otherwise: ZeRO gathers and sends around them.
    cases[2].append(_train_case("float32", 2, 1, fused="compile"))
    cases[2].append(_train_case("bfloat16", 3, 2, fused="compile", checkpointing=True))
    for processes, dtype, stage, shared, offload in (
        (2, "float32", 1, 2, "none"),
        (2, "bfloat16", 2, 1, "optimizer"),
        (2, "bfloat16", 3, 2, "none"),
        (4, "bfloat16", 0, 4, "none"),
        (4, "float32", 3, 2, "all"),
    ):
        case = _train_case(dtype, stage, shared, offload=offload)
        cases[processes].append(case | {"lora": LORA, "name": f"lora-{case['name']}"})
    for processes, found in cases.items():
        for case in _logit_cases():
            # The models have 2 key/value heads: 4 ranks are more than that.
            distributed = {"sequence_parallel": processes, "share": case.get("share", "heads")}
            found.append(case | {"distributed": distributed, "settings": SETTINGS})
    return cases


CASES = _cases()
TRAINED = [(n, case["name"]) for n, found in CASES.items() for case in found if "train" in case and "lora" not in case]
ADAPTED = [(processes, case["name"]) for processes, found in CASES.items() for case in found if "lora" in case]
LOGITS = [(processes, case["name"]) for processes, found in CASES.items() for case in found if "logits" in case]


@cache
def model_of(name: str, dtype: str) -> Any:
    family, changes = MODELS[name]
    return tiny_model(family, getattr(torch, dtype), **({"num_hidden_layers": 2} | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The models and batches of all cases, one folder for all processes of `pytest -n`."""
    torchtrain.register()
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributed"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            for name in MODELS:
                model_of(name, "float32").save_pretrained(folder / name)
            for case in (case for found in CASES.values() for case in found):
                torch.save(batch_of(*rows_of(case)), folder / file_of(case))
    return folder


def located(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    return case | {"model": str(folder / case["model"]), "batch": str(folder / file_of(case))}


def rows_of(case: dict[str, Any]) -> tuple[str, int, bool]:
    return case["variant"], case["tokens"], case.get("weights", False)


def file_of(case: dict[str, Any]) -> str:
    return "-".join(map(str, rows_of(case))) + ".pt"


@pytest.fixture(scope="module")
def spread(folder):
    """Return a function from processes and a case's name to its arrays; a number of processes is launched once."""

    def arrays(processes: int, name: str) -> dict[str, np.ndarray]:
        out, log = folder / f"on-{processes}", folder / f"log-{processes}"
        with FileLock(f"{out}.lock"):
            if not out.exists():
                out.mkdir()
                path = folder / f"cases-{processes}.json"
                path.write_text(json.dumps([located(case, folder) for case in CASES[processes]]))
                main = "torchtrain.tests.distributed_worker"
                done = forks().run(str(path), str(out), main=main, processes=processes, log=log)
                assert done["codes"] == [0] * processes, log.read_text()[-6000:]
        with np.load(out / f"{name}.npz") as found:
            return dict(found)

    return arrays


@pytest.fixture(scope="module")
def alone(folder):
    """Return a function from a case to the arrays that this process alone computes, in one micro-batch."""
    known: dict[str, dict[str, np.ndarray]] = {}

    def arrays(case: dict[str, Any]) -> dict[str, np.ndarray]:
        traits = ("model", "dtype", "variant", "tokens")
        key = "-".join(str(case[trait]) for trait in traits) + str("logits" in case) + file_of(case)
        if key not in known:
            plain = {k: v for k, v in case.items() if k in (*traits, "weights", "logits", "train")}
            micro_batch = 1 if "logits" in case else ROWS
            plain |= {"settings": SETTINGS | {"micro_batch": micro_batch}}
            known[key] = worker.run(located(plain, folder), 0, 1)
        return known[key]

    return arrays


def case_of(processes: int, name: str) -> dict[str, Any]:
    return next(case for case in CASES[processes] if case["name"] == name)


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "name"), LOGITS)
def test_logits_under_sequence_parallelism_are_those_of_one_process(spread, alone, processes, name):
    """Bitwise, both dtypes, every variant: documents cut where ranks part, rows padded, key/value heads repeated."""
    case = case_of(processes, name)
    found, expected = spread(processes, name)["logits"], alone(case)["logits"]
    tokens = case["tokens"]
    assert found.shape == (ROWS, tokens, VOCABULARY)
    document_ids = batch_of(case["variant"], tokens)["document_ids"]
    cut = -(-tokens // processes)
    assert (document_ids[:, cut - 1] == document_ids[:, cut]).any(), "no document lies across the ranks' border"
    real = (document_ids >= 0).numpy()
    np.testing.assert_array_equal(found[real], expected[real])


# --- loss, gradient, norm, clipping -----------------------------------------------------------------------------------


@cache
def oracle(model: str, dtype: str, weighted: bool = False) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(truth, reference) of a step: loss, gradients, norm and first moments, by the worker's names.

    The moments are those of the oracle's AdamW with clipping, from its own gradients.
    """
    candidate, batch = model_of(model, dtype), batch_of("anchor", 31, weighted)
    arrays = {name: x.numpy() for name, x in batch.items()}
    found = []
    for rounding, carrier in (("exact", jnp.float64), (preset_name("sdpa", getattr(torch, dtype)), jnp.float32)):
        _, gradients, nll = mean_and_gradients(oracle_of(candidate), arrays, preset(rounding))
        loss = nll.sum() / (arrays["shift_labels"] != -100).sum()  # which no weight changes
        gradients = {name: jnp.asarray(x, carrier) for name, x in gradients.items()}
        weights = {n: jnp.asarray(p.detach().float().numpy(), carrier) for n, p in candidate.named_parameters()}
        found.append(_step_of(loss, gradients, weights))
    return found[0], found[1]


def _step_of(loss: Any, gradients: dict[str, Any], weights: dict[str, Any]) -> dict[str, np.ndarray]:
    optimizer = adamw_of(TrainConfig.model_validate(SETTINGS), weights)
    _, state, norm = step(optimizer, weights, optimizer.init(weights), gradients)
    found = {"loss": np.asarray([loss]), "norm": np.asarray([norm])}
    found |= {f"gradient.{name}": np.asarray(x) for name, x in gradients.items()}
    return found | {f"moment.{name}": np.asarray(x) for name, x in first_moment(state).items()}


def first_moment(state: Any) -> dict[str, Any]:
    """`mu` of optax's Adam, wherever it stands in the chain's state."""
    if hasattr(state, "mu"):
        return state.mu
    return next((found for part in state if isinstance(part, tuple) and (found := first_moment(part))), {})


def verdicts(arrays: dict[str, np.ndarray], model: str, dtype: str, weighted: bool = False) -> dict[str, Verdict]:
    truth, reference = oracle(model, dtype, weighted)
    total, tokens = arrays["loss"]
    judged = {"loss": np.asarray([total / tokens]), "norm": np.asarray([float(arrays["norm"])])}
    judged |= {name: x for name, x in arrays.items() if name.startswith(("gradient.", "moment."))}
    assert judged.keys() == truth.keys()
    return {name: judge(x, truth[name], reference[name], dtype) for name, x in judged.items()}


@pytest.mark.parametrize(("processes", "name"), TRAINED)
def test_loss_gradient_norm_and_clipping_are_the_same_however_a_step_is_spread(spread, processes, name):
    case = case_of(processes, name)
    arrays = spread(processes, name)
    found = verdicts(arrays, case["model"], case["dtype"], case.get("weights", False))
    assert not {what: str(verdict) for what, verdict in found.items() if not verdict.passed}
    assert float(arrays["norm"]) > SETTINGS["clip_norm"], "the test is about a gradient that is clipped"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process_passes_the_same_rule(alone, dtype):
    found = verdicts(alone(_train_case(dtype, 0, 1, ROWS)), "llama", dtype)
    assert not {what: str(verdict) for what, verdict in found.items() if not verdict.passed}


@pytest.mark.parametrize(("processes", "name"), TRAINED)
def test_counts_domains_and_weights_are_whole(spread, alone, processes, name):
    """Tokens and live pairs exactly; a domain's loss against its own tokens alone; every weight moved and gathered."""
    case = case_of(processes, name)
    arrays, expected = spread(processes, name), alone(case)
    assert arrays["pairs"] == expected["pairs"]
    batch = batch_of("anchor", 31)
    labelled = batch["shift_labels"] != -100
    truths = oracle_domains(case["model"], case["dtype"])
    for index, domain in enumerate(worker.DOMAINS):
        total, tokens = arrays[f"domains.{domain}"]
        assert tokens == (labelled & (batch["domain_ids"] == index)).sum()
        truth, reference = (x[index] for x in truths)
        assert judge([total], [truth], [reference], case["dtype"]).passed, domain
    assert arrays["loss"][1] == labelled.sum()
    weights = {name.removeprefix("weight.") for name in arrays if name.startswith("weight.")}
    model = model_of(case["model"], case["dtype"])
    assert weights == set(model.state_dict())
    for parameter, before in model.named_parameters():
        after = arrays[f"weight.{parameter}"]
        assert after.shape == tuple(before.shape)
        assert (after != before.detach().float().numpy()).any(), parameter


@cache
def oracle_of_adapters(dtype: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """As `oracle`, of adapters: the gradients of A and B follow from the oracle's of W + s B A, s B^T dW and s dW A^T;
    for the reference that sum is rounded to the dtype.
    """
    model = tiny_model("llama", getattr(torch, dtype), num_hidden_layers=2)
    worker.add_drawn_adapters(model, LORA)
    factors = {name: layer_and_factors(m)[1] for name, m in model.named_modules() if hasattr(m, "lora_A")}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wide = {name: x.double() for name, x in model.state_dict().items()}
    merged, _ = split_off(model, wide)
    arrays, found = {name: x.numpy() for name, x in batch_of("anchor", 31).items()}, []
    for rounding, carrier in (("exact", jnp.float64), (preset_name("sdpa", getattr(torch, dtype)), jnp.float32)):
        of = torch.float64 if rounding == "exact" else getattr(torch, dtype)
        twin = tiny_model("llama", of, num_hidden_layers=2)
        twin.load_state_dict({name: x.to(of) for name, x in merged.items()})
        loss, of_sums, _ = mean_and_gradients(oracle_of(twin), arrays, preset(rounding))
        gradients = {name: jnp.asarray(x, carrier) for name, x in of_sums.items() if name in trained}
        for name, (a, b, scale) in factors.items():
            of_w, a_RI, b_OR = (
                np.asarray(x, np.float64)
                for x in (of_sums[f"{name}.weight"], *(f.weight.detach().double() for f in (a, b)))
            )
            gradients[f"{name}.lora_A.default.weight"] = jnp.asarray(scale * b_OR.T @ of_w, carrier)
            gradients[f"{name}.lora_B.default.weight"] = jnp.asarray(scale * of_w @ a_RI.T, carrier)
        weights = {name: jnp.asarray(p.detach().float().numpy(), carrier) for name, p in trained.items()}
        found.append(_step_of(loss, gradients, weights))
    return found[0], found[1]


@pytest.mark.parametrize(("processes", "name"), ADAPTED)
def test_adapters_are_trained_the_same_however_a_step_is_spread(spread, processes, name):
    """And nothing else is."""
    case, arrays = case_of(processes, name), spread(processes, name)
    truth, reference = oracle_of_adapters(case["dtype"])
    total, tokens = arrays["loss"]
    judged = {"loss": np.asarray([total / tokens]), "norm": np.asarray([float(arrays["norm"])])}
    judged |= {what: x for what, x in arrays.items() if what.startswith(("gradient.", "moment."))}
    assert judged.keys() == truth.keys()
    found = {what: judge(x, truth[what], reference[what], case["dtype"]) for what, x in judged.items()}
    assert not {what: str(verdict) for what, verdict in found.items() if not verdict.passed}
    assert float(arrays["norm"]) > SETTINGS["clip_norm"], "the test is about a gradient that is clipped"
    base = tiny_model("llama", getattr(torch, case["dtype"]), num_hidden_layers=2).state_dict()
    frozen = {name for name in base if "norm" not in name}
    after = {
        name.removeprefix("weight.").replace(".base_layer.", "."): x for name, x in arrays.items() if "weight." in name
    }
    assert [name for name in frozen if (after[name] != base[name].float().numpy()).any()] == []


@cache
def oracle_domains(model: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(truth, reference): the sums of the losses of each domain."""
    from jaxref.loss import batch_nll, domain_totals

    batch = {name: x.numpy() for name, x in batch_of("anchor", 31).items()}
    found = []
    for rounding in ("exact", preset_name("sdpa", getattr(torch, dtype))):
        nll_BT = batch_nll(oracle_of(model_of(model, dtype)), batch, preset(rounding))
        sums, _ = domain_totals(nll_BT, batch["shift_labels"], batch["domain_ids"], len(worker.DOMAINS))
        found.append(np.asarray(sums))
    return found[0], found[1]
