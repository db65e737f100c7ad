"""`model.lora`: adapters are trained and nothing else, and what comes of it is what PEFT and transformers read."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from anchorline.errors import UserError
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import LoraSettings, ModelConfig, TrainConfig, load_config
from torchtrain.distributed.world import World
from torchtrain.modeling.adapters import FOLDER, add_adapters, layer_and_factors, split_off
from torchtrain.modeling.chunks import check_chunks
from torchtrain.modeling.load import digest_weights, load_for_evaluation
from torchtrain.modeling.recompute import save_memory
from torchtrain.products import LinearInFloat32
from torchtrain.run import recipe
from torchtrain.run.setup import set_up
from torchtrain.run.verify import verify_folder
from torchtrain.tests.error_ratio import error_ratio
from torchtrain.tests.runs import assert_same
from torchtrain.tests.tiny import FAMILIES, VOCABULARY, tiny_model
from torchtrain.training.events import read_metrics
from torchtrain.training.optimizer import Optimizer

QUIET = Console(quiet=True)
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear", "also_train": ["norm"]}
B, T = 2, 24


@pytest.fixture(scope="module")
def train(place, tmp_path_factory):
    """Return a function from a name and overrides to a run's folder; what has a name is trained once."""
    folder, made = tmp_path_factory.mktemp("lora"), dict[str, Path]()

    def run(name: str, *overrides: str) -> Path:
        if name not in made:
            given = [f"model.lora={json.dumps(LORA)}", *overrides, f"run.folder={folder / name}"]
            made[name] = folder / name
            recipe.train(load_config(place.config, given), console=QUIET)
        return made[name]

    return run


def losses_of(run: Path) -> list[float]:
    return [e["loss"] for e in read_metrics(run / "metrics.jsonl") if e["event"] == "evaluation"]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_the_loss_falls_and_begins_where_it_does_without_adapters(train):
    before, after = losses_of(train("straight"))
    assert after < before - 0.1
    assert before == losses_of(train("full", "model.lora=null", "train.steps=1", "save.every=0", "save.last=1"))[0]


def test_frozen_weights_are_bitwise_those_of_the_source(train, place):
    """Of a layer with an adapter too, which is what the merged weight is less the adapter: here by the checkpoint."""
    lora = json.dumps(LORA | {"target_modules": ["q_proj"]})
    source = load_file(place.folder / "source" / "model.safetensors")
    exported = load_file(train("few", f"model.lora={lora}", "train.steps=2") / "model" / "model.safetensors")
    moved = {name for name, x in exported.items() if not torch.equal(x, source[name].to(x.dtype))}
    assert moved == {name for name in source if "norm" in name or "q_proj" in name}


def test_a_checkpoint_holds_what_is_trained_and_nothing_else(train):
    checkpoints = Checkpoints(train("straight") / "checkpoints")
    manifest = checkpoints.open()
    assert manifest is not None
    assert all(".lora_" in name or "norm" in name for name in manifest.parameters)
    weights = sum(torch.Size(shape).numel() for shape in manifest.parameters.values())
    bytes_of = sum(e.bytes for name, e in manifest.files.items() if name.startswith("state"))
    assert 12 * weights < bytes_of < 12 * weights + 40_000, "float32 masters and two moments, and a header"


def copied(run: Path, to: Path) -> Path:
    """A run as it was after step 4."""
    shutil.copytree(run, to)
    for name in ("model", "exports/step-00000004", "checkpoints/step-00000006"):
        assert (to / name).exists()
    return to


def test_a_resumed_run_ends_with_the_same_bits(train, tmp_path):
    run = copied(train("straight"), tmp_path / "run")
    recipe.resume(load_config(run / "config.yaml", [f"run.folder={run}"]), step=4, console=QUIET)
    assert_same(run, train("straight"))


# --- its export -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    ids = torch.arange(2 * T).view(2, T) % VOCABULARY
    return model.eval()(ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("also", "dtype"),
    [(["norm"], "bfloat16"), (["norm", "embed_tokens"], "bfloat16"), ([], "float32")],
    ids=["norms", "tied embedding", "adapters"],
)
def test_peft_and_transformers_read_the_export_and_compute_one_thing(train, also, dtype):
    """The adapter beside its base, which PEFT computes, and the merged model, which the error rule holds to it: truth
    is the adapter in float64. Merging rounds each weight once, an adapter its own product, the sum and A x.
    """
    changes = [f"model.lora={json.dumps(LORA | {'also_train': also})}", f"model.dtype={dtype}"]
    model = train(f"{also}, {dtype}", *changes, "train.steps=3", "save.every=0", "save.last=1") / "model"
    settings = json.loads((model / FOLDER / "adapter_config.json").read_text())
    base, wanted = settings["base_model_name_or_path"], getattr(torch, dtype)

    assert settings["modules_to_save"] == (([*also, "lm_head"] if "embed_tokens" in also else also) or None)

    def with_adapter(dtype: torch.dtype) -> PeftModel:
        of_run = AutoConfig.from_pretrained(model)  # its length and RoPE, which the base has not
        loaded = AutoModelForCausalLM.from_pretrained(base, config=of_run, dtype=dtype)
        return PeftModel.from_pretrained(loaded, model / FOLDER, autocast_adapter_dtype=False)

    adapted = with_adapter(wanted)
    merged = AutoModelForCausalLM.from_pretrained(model)
    assert merged.dtype == wanted
    truth = logits_of(with_adapter(wanted).double())
    plain = logits_of(AutoModelForCausalLM.from_pretrained(base, config=merged.config, dtype=wanted))
    assert error_ratio(plain, truth, logits_of(adapted), wanted) > 10, "the adapter does something"
    assert error_ratio(logits_of(merged), truth, logits_of(adapted), wanted) <= 1


# --- its numbers ------------------------------------------------------------------------------------------------------


def adapted(dtype: torch.dtype = torch.float32, family: str = "llama", **lora: Any) -> Any:
    """A model with adapters that are not zero: the same in every dtype but for their rounding to bfloat16."""
    model = tiny_model(family).train()
    add_adapters(model, LoraSettings(**(LORA | {"also_train": []} | lora)), seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
            p.copy_(p.bfloat16())
    return model.to(dtype)


def adapters_of(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def backward(model: Any) -> None:
    ids = torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(0))
    model(ids, use_cache=False).logits.square().mean().backward()


def by_twin(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of A and B by those of a full training of W + s B A: s B^T dW and s dW A^T."""
    twin = tiny_model(model.config.model_type).train().to(dtype)
    merged, _ = split_off(copy.deepcopy(model).double(), copy.deepcopy(model).double().state_dict())
    twin.load_state_dict({name: x.to(dtype) for name, x in merged.items()})
    if dtype == torch.float64:
        exact_norms(twin)
    backward(twin)
    found = {}
    for name, module in adapters_of(model).items():
        _, factors = layer_and_factors(module)
        assert factors is not None
        a, b, scale = factors
        of_w = twin.get_submodule(name).weight.grad.double()
        found[f"{name}.lora_A.default.weight"] = scale * b.weight.double().T @ of_w
        found[f"{name}.lora_B.default.weight"] = scale * of_w @ a.weight.double().T
    return found


def exact_norms(model: nn.Module) -> None:
    """Take norms in float64, which transformers takes in float32."""
    for norm in (m for m in model.modules() if hasattr(m, "variance_epsilon")):
        norm.forward = lambda x, norm=norm: (
            norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        )


@pytest.mark.one_of(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_a_full_training_of_the_product(family, dtype):
    """And no worse in chunks of tokens, with layers that are computed again."""
    truth, reference = (by_twin(adapted(dtype, family), d) for d in (torch.float64, dtype))
    for changes in ({}, {"layer_chunk": 7, "activation_checkpointing": "offload"}):
        model = adapted(dtype, family)
        check_chunks(model)
        save_memory(model, ModelConfig(source="x", **changes))
        backward(model)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == truth.keys()
        for name, gradient in found.items():
            assert error_ratio(gradient, truth[name], reference[name], dtype) <= 1, (name, changes)


def test_nothing_frozen_has_a_gradient_a_master_or_a_moment_and_it_does_not_move():
    model = adapted(torch.bfloat16, also_train=["norm"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, TrainConfig(learning_rate=0.1))
    assert len(optimizer.masters) == len(trained)
    backward(model)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(), "moved into masters"
    norm = torch.stack([m.grad.norm() for m in optimizer.masters if m.grad is not None]).norm()
    assert optimizer.step(0.1) == pytest.approx(norm.item(), rel=len(trained) * 2**-24)
    assert len(optimizer.adamw.state) == len(trained)
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == trained


def test_adapters_are_drawn_by_the_seed_alone():
    models, seed = [], 3
    for other in (7, 8):
        torch.manual_seed(other)
        state = torch.get_rng_state()
        models.append(tiny_model())
        torch.manual_seed(other)
        add_adapters(models[-1], LoraSettings(**LORA), seed)
        assert torch.equal(torch.get_rng_state(), state)
    drawn = [[m.lora_A["default"].weight for m in adapters_of(model).values()] for model in models]
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    again = tiny_model()
    add_adapters(again, LoraSettings(**LORA), seed + 10)
    assert not any(
        torch.equal(m.lora_A["default"].weight, a) for m, a in zip(adapters_of(again).values(), drawn[0], strict=True)
    )


# --- what cannot be ---------------------------------------------------------------------------------------------------


MODULES = r"it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj "


@pytest.mark.parametrize(
    ("lora", "others", "message"),
    [
        ({"target_modules": ["q_prj"]}, [], f"model.lora.target_modules 'q_prj': is the end of no .* llama; {MODULES}"),
        ({"target_modules": ["lm_head"]}, [], rf"'lm_head': .*{MODULES}\(embedding, head and norms: model.lora.also"),
        ({"also_train": ["embed"]}, [], "model.lora.also_train 'embed': .* it has down_proj, embed_tokens, gate_proj"),
        ({"also_train": ["up_proj"]}, [], "layers.0.mlp.up_proj has an adapter, by model.lora.target_modules, too"),
        ({"rank": 65536}, [], r"model.lora.rank 65536: is more than .* set it to 32 or less$"),
        ({"r": 8}, [], "model.lora.r: unknown key"),
        ({"dropout": 0.1}, ["model.layer_chunk=32"], "lora.dropout 0.1 does not work with layer_chunk"),
        ({}, ["model.fused=compile"], "model.fused compile: does not go with model.lora"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_made(place, tmp_path, lora, others, message):
    given = [f"model.lora={json.dumps(lora)}", *others, f"run.folder={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=message) as said:
        recipe.train(load_config(place.config, given), console=QUIET)
    assert "\n" not in str(said.value)
    assert not (tmp_path / "run").exists()


def test_a_model_without_linear_layers_is_refused_in_one_line():
    """GPT-2's are of another kind."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UserError, match=r"^model\.lora: gpt2 has no linear layers for adapters; set it to null$"):
        add_adapters(model, LoraSettings(), 0)


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def strangers_model(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **more)).eval()


def test_experts_that_are_tensors_get_no_adapters_unasked():
    """PEFT takes gate, up and down of the shared experts for those of all; the merged model would lack them."""
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    says = r"PEFT puts adapters on model\.layers\.1\.mlp\.experts, which is no linear layer, .* \[(.*)\]$"
    with pytest.raises(UserError, match=says) as caught:
        add_adapters(strangers_model("glm4_moe", **experts), LoraSettings(rank=2), 0)
    advised = caught.value.args[0].rpartition("[")[2].rstrip("]").split(", ")
    assert advised == ["k_proj", "o_proj", "q_proj", "v_proj"]
    add_adapters(strangers_model("glm4_moe", **experts), LoraSettings(rank=2, target_modules=advised), 0)


@pytest.mark.parametrize(("family", "more"), [("phimoe", {"num_local_experts": 4}), ("falcon", {})])
def test_a_layer_that_computes_more_than_a_product_gets_no_adapter(family, more):
    """Phi's router is a linear layer that gives two tensors; Falcon's layers are all of a class of its own."""
    model, ids = strangers_model(family, **more), torch.arange(3, 12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        add_adapters(model, LoraSettings(rank=2), 0)
        assert torch.equal(model.eval()(input_ids=ids).logits, before)
    assert any("lora_A" in name for name, _ in model.named_parameters())


def test_a_layer_in_float32_beside_layers_in_bfloat16_gets_an_adapter_too():
    """Where a CPU multiplies bfloat16 in float32, only the layers in bfloat16 have a class for it."""
    model = strangers_model("llama")
    model.model.layers[0].self_attn.q_proj.__class__ = LinearInFloat32
    add_adapters(model, LoraSettings(rank=2), 0)
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 7 * len(model.model.layers)


@pytest.mark.sweep
def test_ranks_drop_by_themselves_and_a_run_on_two_goes_on_with_the_same_bits(place):
    given = [f"model.lora={json.dumps(LORA | {'dropout': 0.3})}", "save.last=1", "train.steps=4"]
    assert place.train("dropout", *given, processes=2) == [0, 0], place.log("dropout")
    run = place.folder / "dropout"
    for step in (2, 4):
        one, two = sorted((run / "checkpoints" / f"step-{step:08d}").glob("rng-*"))
        assert not torch.equal(load_file(one)["torch"], load_file(two)["torch"]), step
    straight = Path(shutil.copytree(run, place.folder / "dropout-straight"))
    assert place.resume("dropout", "--step", "2", processes=2) == [0, 0], place.log("dropout")
    assert_same(run, straight)


def test_the_digest_of_a_base_is_of_what_the_model_loads_alone(place, tmp_path):
    source = Path(shutil.copytree(place.folder / "source", tmp_path / "source"))
    own, weights = digest_weights(str(source)), load_file(source / "model.safetensors")
    save_file({"notes": torch.ones(3)}, source / "notes.safetensors")
    assert digest_weights(str(source)) == own
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert digest_weights(str(source)) == own
    shutil.copy2(source / "notes.safetensors", source / "model.safetensors")  # transformers reads it, not the index
    assert digest_weights(str(source)) != own


def test_a_rank_whose_base_is_another_is_refused_without_zero_too(place, tmp_path):
    class Second(World):
        def from_first(self, value: Any) -> Any:
            return "what rank 0 has"

    config = load_config(place.config, [f"model.lora={json.dumps(LORA)}", f"run.folder={tmp_path / 'run'}"])
    with pytest.raises(UserError, match=r"the weights here are not those of rank 0; copy the same model to every"):
        set_up(config, lambda line: None, world=Second(rank=1))


def test_a_base_that_has_moved_is_named_verified_and_gone_on_with(train, tmp_path, place):
    run = copied(train("straight"), tmp_path / "run")
    source = Path(shutil.copytree(place.folder / "source", tmp_path / "elsewhere"))

    def base_of() -> list[str]:
        return [str(found) for found in verify_folder(run) if found.what.startswith("base ")]

    (found,) = base_of()
    assert found.startswith(f"good base {(place.folder / 'source').resolve()}: 1 files, ")
    given = [f"run.folder={run}", f"model.source={source}"]
    recipe.resume(load_config(run / "config.yaml", given), step=4, console=QUIET)
    settings = json.loads((run / "model" / FOLDER / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(source)
    assert (run / "model" / "model.safetensors").read_bytes() == (
        train("straight") / "model" / "model.safetensors"
    ).read_bytes()
    assert base_of()[0].startswith(f"good base {source}: ")
    weights = load_file(source / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert base_of() == [f"BAD  base {source}: holds other weights than those with which the run began"]
    shutil.rmtree(source)
    assert "is missing, and a resumed run needs it" in base_of()[0]


def test_an_adapter_beside_the_model_of_the_source_is_refused_to_train_and_to_evaluate(place, tmp_path):
    """transformers would take it, and save it in the model's place."""
    source = Path(shutil.copytree(place.folder / "source", tmp_path / "source"))
    (source / "adapter_config.json").write_text("{}")
    said = r"^model\.source '.*' holds an adapter beside a model; merge it into the model, or move adapter_config\.json"
    for lora in ("null", json.dumps(LORA)):
        given = [f"model.source={source}", f"model.lora={lora}", f"run.folder={tmp_path / 'run'}"]
        with pytest.raises(UserError, match=said):
            recipe.train(load_config(place.config, given), console=QUIET)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=said):
        load_for_evaluation(str(source))
