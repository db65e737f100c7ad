"""Maps of names: each engine's layout, written by hand from the same arrays, comes out as the same arrays."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from anchorline.errors import UserError
from parity_tests.comparing.compare import compare
from parity_tests.comparing.dumps import Array, Dump, open_dump
from parity_tests.comparing.judging import Rule
from parity_tests.comparing.names import Names, load_names, recognise, rename, shipped_names
from parity_tests.record import record

T, H, K, D, M, F, RANKS = 6, 4, 2, 8, 16, 12, 2
CONFIG = {"num_attention_heads": H, "num_key_value_heads": K, "head_dim": D, "intermediate_size": F}
Arrays = dict[str, np.ndarray]


def canonical() -> Arrays:
    random = np.random.default_rng(0)
    found = {"embed": (M,), "final_norm": (M,), "logits": (12,)}
    for i in range(2):
        found |= {f"layers.{i}.{n}": (h, D) for n, h in {"q": H, "k": K, "v": K, "attn": H}.items()}
        found |= {f"layers.{i}.{n}": (M,) for n in ("input_norm", "attn_out", "post_norm", "mlp", "residual")}
        found |= {f"layers.{i}.{n}": (F,) for n in ("gate", "up")}
    return {name: random.standard_normal((1, T, *rest)) for name, rest in found.items()}


def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1)


def pairs(x: np.ndarray) -> np.ndarray:
    return np.stack(np.split(x, 2, -1), -1).reshape(x.shape)


def torchtitan_0_1(own: Arrays, rank: int) -> Arrays:
    made = {"tok_embeddings": own["embed"], "norm": own["final_norm"], "output": own["logits"]}
    for i in range(2):
        at, to = f"layers.{i}", f"layers.{i}.attention"
        by_head = {"wq": pairs(own[f"{at}.q"]), "wk": pairs(own[f"{at}.k"])}
        by_head |= {"wv": own[f"{at}.v"], "wo.input": own[f"{at}.attn"]}
        made |= {f"{to}.{name}": flat(share(x, 2, rank)) for name, x in by_head.items()}
        made |= {f"{to}.wo": own[f"{at}.attn_out"], f"{at}.ffn_norm": own[f"{at}.post_norm"]}
        made |= {f"{at}.attention_norm": own[f"{at}.input_norm"], f"{at}.feed_forward": own[f"{at}.mlp"]}
        made |= {
            f"{at}.feed_forward.{w}": share(own[f"{at}.{name}"], 2, rank) for w, name in (("w1", "gate"), ("w3", "up"))
        }
        made |= {at: own[f"{at}.residual"]}
    return made


def torchtitan(own: Arrays, rank: int) -> Arrays:
    names = {"qkv_linear": "wq", "qkv_linear.1": "wk", "qkv_linear.2": "wv", "inner_attention": "wo.input"}
    made = torchtitan_0_1(own, rank)
    for i in range(2):
        to = f"layers.{i}.attention"
        made |= {f"{to}.{name}": made.pop(f"{to}.{old}").reshape(1, T, -1, D) for name, old in names.items()}
    return made | {"lm_head": made.pop("output")}


def share(x: np.ndarray, axis: int, rank: int, ranks: int = RANKS) -> np.ndarray:
    return np.split(x, ranks, axis)[rank]


def megatron(own: Arrays, rank: int, sequence: bool = False) -> Arrays:
    def turned(x: np.ndarray, whole: bool = False) -> np.ndarray:
        x = x.swapaxes(0, 1)
        return share(x, 0, rank) if sequence and whole else x

    made = {"embedding": turned(own["embed"], True), "decoder.final_layernorm": turned(own["final_norm"], True)}
    made["output_layer"] = turned(share(own["logits"], 2, rank))
    for i in range(2):
        at, to = f"layers.{i}", f"decoder.layers.{i}"
        q = own[f"{at}.q"].reshape(1, T, K, H // K, D)
        qkv = np.concatenate([q, own[f"{at}.k"][:, :, :, None], own[f"{at}.v"][:, :, :, None]], 3)
        fused = [share(own[f"{at}.{name}"], 2, rank) for name in ("gate", "up")]
        made |= {
            f"{to}.self_attention.linear_qkv": turned(flat(share(qkv, 2, rank))),
            f"{to}.self_attention.linear_proj.input": turned(flat(share(own[f"{at}.attn"], 2, rank))),
            f"{to}.mlp.linear_fc1": turned(np.concatenate(fused, 2)),
        }
        names = {"input_layernorm": "input_norm", "pre_mlp_layernorm": "post_norm", "mlp.linear_fc2": "mlp"}
        for name, from_ in names.items():
            made[f"{to}.{name}"] = turned(own[f"{at}.{from_}"], True)
        made[f"{to}.self_attention.linear_proj"] = turned(own[f"{at}.attn_out"], True)
        made[to] = turned(own[f"{at}.residual"], True)
    return made


def vllm(own: Arrays, rank: int, ranks: int = RANKS) -> Arrays:
    ends = {"model.embed_tokens": "embed", "model.norm": "final_norm"}
    made = {name: own[of][0] for name, of in ends.items()}
    for i in range(2):
        at, to = f"layers.{i}", f"model.layers.{i}"
        qkv = [share(own[f"{at}.q"], 2, rank, ranks), *(share(own[f"{at}.{n}"], 2, rank * K // ranks, K) for n in "kv")]
        gate_up = [share(own[f"{at}.{name}"], 2, rank, ranks) for name in ("gate", "up")]
        made |= {
            f"{to}.self_attn.qkv_proj": np.concatenate([flat(x) for x in qkv], 2)[0],
            f"{to}.self_attn.attn": flat(share(own[f"{at}.attn"], 2, rank, ranks))[0],
            f"{to}.mlp.gate_up_proj": np.concatenate(gate_up, 2)[0],
        }
        names = {"input_layernorm": "input_norm", "self_attn.o_proj": "attn_out", "mlp": "mlp"}
        names |= {"post_attention_layernorm": "post_norm"}
        made |= {f"{to}.{name}": own[f"{at}.{of}"][0] for name, of in names.items()}
        made |= {to: own[f"{at}.residual"][0] / 4, f"{to}.1": own[f"{at}.residual"][0] * 0.75}
    return made


def maxtext(own: Arrays, rank: int, turn: Callable = lambda x: x) -> Arrays:
    made = {"token_embedder": own["embed"], "decoder.decoder_norm": own["final_norm"]}
    made |= {"decoder.logits_dense": own["logits"]}
    names = {"self_attention.value": "v", "mlp": "mlp", "mlp.wi_0": "gate", "mlp.wi_1": "up"}
    names |= {"self_attention.attention_op": "attn", "self_attention": "attn_out"}
    names |= {"pre_self_attention_layer_norm": "input_norm", "post_self_attention_layer_norm": "post_norm"}
    for i in range(2):
        made |= {f"decoder.layers_{i}.{name}": own[f"layers.{i}.{of}"] for name, of in names.items()}
        made[f"decoder.layers_{i}"] = own[f"layers.{i}.residual"]
        made[f"decoder.layers_{i}.self_attention.query"] = turn(own[f"layers.{i}.q"]) / D**0.5
        made[f"decoder.layers_{i}.self_attention.key"] = turn(own[f"layers.{i}.k"])
    return made


def dump(ranks: list[Arrays], config: dict = CONFIG) -> Dump:
    each = [*enumerate(ranks)]
    arrays = {n: [Array("float64", lambda x=r[n]: x, i) for i, r in each if n in r] for r in ranks for n in r}
    return Dump("", arrays, config)


@pytest.mark.parametrize(
    ("name", "lay_out"),
    [
        ("torchtitan", torchtitan),
        ("torchtitan_0_1", torchtitan_0_1),
        ("megatron", megatron),
        ("megatron_sp", lambda own, rank: megatron(own, rank, sequence=True)),
        ("vllm", vllm),
        ("maxtext", maxtext),
        ("maxtext_llama3", lambda own, rank: maxtext(own, rank, pairs)),
    ],
)
def test_the_layout_of_an_engine_on_two_ranks(name: str, lay_out: Callable):
    own = canonical()
    held = dump([lay_out(own, rank) for rank in range(RANKS)])
    assert recognise(held)[0] == name.removesuffix("_sp").removesuffix("_llama3")
    assert name in recognise(held)
    found = rename(held, load_names(name)).arrays
    assert set(found) == {n for n in own if name != "vllm" or n != "logits"}
    for key, ranks in found.items():
        for array in ranks:
            np.testing.assert_allclose(array.load(), own[key], rtol=1e-15, err_msg=key)  # times and by the root of D


def test_only_what_no_module_of_transformers_puts_out_has_no_name_there():
    made = {name: {*load_names(name).names} for name in shipped_names()}
    assert set().union(*made.values()) - made["hf"] - made["gemma"] == {f"layers.{{i}}.{x}_rope" for x in "qk"}


def test_heads_that_ranks_hold_in_common_are_one_and_judged_each():
    own = canonical()
    ranks, rule = [vllm(own, rank, 4) for rank in range(4)], Rule({}, None, 16, "difference")
    del own["logits"]

    def judge():
        return compare(rename(dump(ranks), load_names("vllm")), None, None, dump([own]), rule).cases[0]

    right = judge()
    assert (right.passed, len(right.measures)) == (True, len(own)), right.reasons
    ranks[3]["model.layers.1.self_attn.qkv_proj"][:, -D:] *= 2
    assert getattr(judge().first_divergence, "name", None) == "layers.1.v [rank 1]"


@pytest.mark.parametrize("first", [1, 2])
def test_stages_may_hold_different_numbers_of_layers(first):
    whole = {f"h{i}/{n}": np.full((1, T, M), i) for i in range(3) for n in "ab"}
    ranks = [{n.replace(f"h{i}", f"h{i - by}"): whole[n] for n in whole for i in held if f"h{i}" in n}
             for held, by in ((range(first), 0), (range(first, 3), first))]  # fmt: skip
    names = Names.model_validate({"stages": True, "names": {"layers.{i}.mlp": "h{i}/a"}})
    found = rename(dump(ranks), names).arrays
    assert {n: x[0].load()[0, 0, 0] for n, x in found.items()} == {
        n: i for i in range(3) for n in (f"layers.{i}.mlp", f"h{i}/b")
    }


def test_stages_that_do_not_fit():
    says = {
        3: "2: mine has 3 ranks; give a number that divides them",
        2: "mine counts layers from 1 in stage 1, not from",
    }
    for ranks, words in says.items():
        held = replace(dump([{f"layers.{i}.mlp": np.ones(2)} for i in range(ranks)]), source="mine")
        with pytest.raises(UserError, match=words):
            rename(held, Names.model_validate({"stages": 2, "names": {}}))


def test_pipeline_and_tensor_parallel_together():
    own, ranks = canonical(), []
    for stage in range(2):
        for rank in range(RANKS):
            whole, lacks = megatron(own, rank), ("output", "decoder.final") if stage == 0 else ("embedding",)
            mine = {n: x for n, x in whole.items() if f"layers.{1 - stage}" not in n and not n.startswith(lacks)}
            ranks.append({n.replace("layers.1", "layers.0"): x for n, x in mine.items()})
    found = rename(dump(ranks), load_names("megatron").model_copy(update={"stages": 2})).arrays
    assert set(found) == set(own)
    for key, arrays in found.items():
        assert all(np.array_equal(array.load(), own[key]) for array in arrays), key
    every = load_names("megatron").model_copy(update={"stages": True})
    assert "layers.1.residual" in rename(dump(ranks[::RANKS]), every).arrays


def test_partial_results_are_added_and_a_wrong_step_is_named(tmp_path):
    own = canonical()
    path = tmp_path / "mine.yaml"
    path.write_text("names: {mlp: {from: a, steps: [sum]}}")
    found = rename(dump([{"a": own["embed"] * 0.25}, {"a": own["embed"] * 0.75}]), load_names(str(path)))
    np.testing.assert_allclose(found.arrays["mlp"][0].load(), own["embed"])
    wrong = {"[turn]": "step 'turn' is unknown", "[heads]": "head_dim is not known", "[{join: 9}]": "mlp: its"}
    for steps, says in wrong.items():
        path.write_text(f"names: {{mlp: {{from: a, steps: {steps}}}}}")
        with pytest.raises(UserError, match=says):
            rename(dump([{"a": own["embed"]}] * 2, {}), load_names(str(path))).arrays["mlp"][0].load()


FAMILIES = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mistral": {}, "Gemma3": {"sliding_window": 8},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_is_recognised_and_its_heads_are_apart(family, tmp_path):
    name = f"{family}Text" if family == "Gemma3" else family
    sizes = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": D}
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_attention_heads=4, num_key_value_heads=2, **FAMILIES[family]
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with record(model, tmp_path / "a"):
        model(torch.randint(0, 19, (1, T)))
    held = open_dump(tmp_path / "a")
    assert any(name.endswith("self_attn.1") for name in held.arrays), "eager attention returns its weights"
    outputs = {name: own for name, own in held.arrays.items() if not name.endswith(".input")}
    for dump in (held, replace(held, arrays=outputs)):
        assert recognise(dump)[0] == ("gemma" if family == "Gemma3" else "hf")
    found = {name: ranks[0].load() for name, ranks in rename(held, load_names(recognise(held)[0])).arrays.items()}
    assert not any("self_attn.1" in name for name in found)
    for i in range(2):
        assert found[f"layers.{i}.q"].shape == found[f"layers.{i}.attn"].shape == (1, T, 4, D)
        np.testing.assert_allclose(
            found[f"layers.{i}.attn_residual"] + found.get(f"layers.{i}.mlp_norm", found[f"layers.{i}.mlp"]),
            found[f"layers.{i}.residual"], atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.0.mlp.act_fn", None),  # of one engine's insides
        ("layers.1.experts", None),  # the other engine's map has none
        ("layers.1.residual", "the candidate lacks layers.1.residual"),
        ("layers.0.post_norm", "the candidate lacks layers.0.post_norm"),
    ],
)
def test_a_name_is_missing_where_the_maps_of_both_engines_have_it(name, said):
    own = canonical() | {name: np.ones((1, T, M))}
    mine = rename(dump([torchtitan(own, rank) for rank in range(RANKS)]), load_names("torchtitan"))
    mine = replace(mine, arrays={n: x for n, x in mine.arrays.items() if n != name})
    theirs = rename(dump([own]), load_names("hf"))
    case = compare(mine, None, None, theirs, Rule({}, None, 16, "difference")).cases[0]
    left_out = [note for note in case.notes if note.startswith("not compared")]
    assert (case.problem or "").startswith(said or "")
    assert any(name in note for note in left_out) == (said is None)
    assert said or not case.problem


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_a_module_that_two_engines_call_alike_is_not_compared(name):
    alike = ["model.layers.0.self_attn", "model.layers.1.mlp.down_proj"]
    others = ["inputs.input_ids", "gradients.model.norm.weight", "loss"]
    own, same = canonical(), {n: np.ones((T, M)) for n in (*alike, *others)}
    mine = rename(dump([(vllm(own, 0) if name == "vllm" else own) | same]), load_names(name))
    rule = Rule({}, None, 16, "difference")
    case = compare(mine, None, None, rename(dump([own | same]), load_names("hf")), rule, list(same)).cases[0]
    assert {m.name for m in case.measures} == {*others, *(alike if name == "hf" else ())}
