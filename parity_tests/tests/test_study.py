"""The study's emulation against transformers itself, and the study on a torch model.

Legend: S shifts · L layers · H heads · T tokens of a row.
"""

import _thread
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from anchorline.command import Leave
from anchorline.errors import UserError
from parity_tests.models import tiny_model
from parity_tests.oracle import oracle_of
from parity_tests.study import run as study
from parity_tests.study.__main__ import main
from parity_tests.study.beside import Attended, PairSums, side_by_side
from parity_tests.study.emulation import Emulated, check_row, emulation_record, oracle_qk, shift_verdict
from parity_tests.study.run import run_torch_study
from parity_tests.tests.test_smollm2 import CACHE
from ropestudy import smollm2
from ropestudy.conditions import CONDITIONS
from ropestudy.engine import Pair, Row, Stream, compare
from ropestudy.measures import Sums, weights
from ropestudy.pieces import probabilities
from ropestudy.report.__main__ import app as render
from ropestudy.schema import EmulationCheck, PerToken, ShiftPairs, read_results
from ropestudy.spec import load_study
from ropestudy.text import RowArrays, read_pool
from torchtrain.modeling.smollm2 import smollm2_folder

TOKENS = 48
SHIFTS = np.array([[0], [16], [100]])
# So many sums that some lie near the middle of two numbers of bf16, where correct runs part (`shift_verdict`).
WIDE = {"hidden_size": 256, "head_dim": 64}
WIDE_TOKENS, WIDE_ROWS = 128, 4


def rows(count: int, tokens: int) -> list[RowArrays]:
    random = np.random.default_rng(0)
    return [
        RowArrays(random.integers(0, 97, tokens), np.ones(tokens, np.int64), np.arange(tokens), (tokens,))
        for _ in range(count)
    ]


# -- the emulation -----------------------------------------------------------------------------------------------------


def checked(model) -> list[Emulated]:
    decoder = oracle_of(model)
    return [check_row(model, decoder, one) for one in rows(WIDE_ROWS, WIDE_TOKENS)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eager_bf16_is_the_oracles(family):
    """As near to float64, moved alike by a shift, and with the same D column by column: each by the one rule."""
    found = checked(tiny_model(family, torch.bfloat16, "eager", **WIDE))
    record = emulation_record(found, WIDE_TOKENS, "torch eager", "hf_eager_bf16", "bfloat16", 0, 16)
    assert max(record.ratio) <= 1
    assert min(record.d_torch.values) > 0
    assert shift_verdict(found, "bfloat16").passed
    assert max(one.d_ratio for one in found) <= 1


def attention_in_float32(module, query, key, value, *rest, **named):
    out, returned = EAGER(module, query.float(), key.float(), value.float(), *rest, **named)
    return out.to(query.dtype), returned


def rotation_in_float32(q, k, cos, sin, *rest, **named):
    turned = ROTATE(q.float(), k.float(), cos.float(), sin.float(), *rest, **named)
    return tuple(x.to(q.dtype) for x in turned)


EAGER, ROTATE = llama.eager_attention_forward, llama.apply_rotary_pos_emb


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("eager_attention_forward", attention_in_float32), ("apply_rotary_pos_emb", rotation_in_float32)],
)
def test_a_model_that_rounds_elsewhere_is_caught(name, wrong, monkeypatch):
    """It is as near to float64, even nearer, and so passes the first question; shifts move it otherwise."""
    monkeypatch.setattr(llama, name, wrong)
    found = checked(tiny_model("llama", torch.bfloat16, "eager", **WIDE))
    assert max(max(one.ratio) for one in found) <= 1
    assert not shift_verdict(found, "bfloat16").passed


def test_a_wrong_emulation_is_caught():
    """Frequencies that are off by a twentieth in torch alone. (Rounded to bf16 they would pass here: within 128 tokens
    the distances, which are all that attention sees, turn by less than bf16's other roundings.)"""
    model = tiny_model("llama", torch.bfloat16, "eager", **WIDE)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 1.05
    assert max(check_row(model, oracle_of(model), rows(1, WIDE_TOKENS)[0]).ratio) > 1


# -- side by side, in blocks -------------------------------------------------------------------------------------------


def gathered(model, one: RowArrays) -> list[list[Attended]]:
    """Every run of every layer [L][S], which the study itself never holds at once."""
    found: list[list[Attended]] = []
    side_by_side(model, one.ids, one.positions + SHIFTS, lambda layer, runs: found.insert(layer, list(runs)))
    return found


@torch.no_grad()
def test_every_pass_is_transformers_own():
    """Bit for bit the attention that transformers returns of each shift alone; afterwards the model is as it was."""
    model, one = tiny_model("qwen3", torch.bfloat16, "eager"), rows(1, TOKENS)[0]
    found = gathered(model, one)
    for place, shift in enumerate(SHIFTS[:, 0]):
        ids, positions = (torch.from_numpy(x)[None] for x in (one.ids, one.positions + shift))
        theirs = model(input_ids=ids, position_ids=positions, output_attentions=True).attentions
        assert len(theirs) == len(found)
        for layer, attention in enumerate(theirs):
            assert torch.equal(found[layer][place].weights, attention[0])
    assert not torch.equal(found[0][0].weights, found[0][1].weights)
    assert model.config._attn_implementation == "eager"


def whole(runs: list[Attended]) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and logits of one layer as whole matrices, float64 [S, H, T, T], in numpy."""
    probs, logits = [], []
    for run in runs:
        q_HTD, k_KTD = (x.double().numpy() for x in (run.q, run.k))
        k_HTD = np.repeat(k_KTD, len(q_HTD) // len(k_KTD), axis=0)
        seen = np.tril(np.ones((q_HTD.shape[1],) * 2, bool))
        logit = q_HTD @ k_HTD.swapaxes(1, 2) * run.scale
        shifted = np.where(seen, np.exp(logit - logit.max(-1, keepdims=True)), 0)
        made = shifted / shifted.sum(-1, keepdims=True)
        probs.append(made if run.weights is None else run.weights.double().numpy())
        logits.append(np.where(seen, logit, 0))
    return np.array(probs), np.array(logits)


def whole_sums(probs_LSHTT: np.ndarray, logits_LSHTT: np.ndarray, a: int, b: int) -> Sums:
    """What `PairSums` and `engine.compare` sum block by block, from whole matrices under `full`."""
    d_LHTT, d_logit_LHTT = (np.abs(x[:, a] - x[:, b]) for x in (probs_LSHTT, logits_LSHTT))
    n_T = weights(np.ones(d_LHTT.shape[-1], np.int64))
    return Sums(
        column_T=d_LHTT.sum((0, 1, 2)),
        logit_T=d_logit_LHTT.sum((0, 1, 2)),
        row_T=d_LHTT.sum((0, 1, 3)),
        mass_T=probs_LSHTT[:, a].sum((0, 1, 2)),
        head_LH=d_LHTT.sum(2) @ n_T,
        square=float((d_logit_LHTT**2).sum()),
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_blocks_hold_what_the_matrices_hold(implementation):
    model, one, pairs = tiny_model("llama", torch.bfloat16, implementation), rows(1, TOKENS)[0], [(0, 1), (1, 2)]
    found = PairSums(TOKENS, pairs, query_block=7)
    side_by_side(model, one.ids, one.positions + SHIFTS, found.add)
    layers = gathered(model, one)
    assert {run.weights is None for runs in layers for run in runs} == {implementation == "sdpa"}
    probs, logits = (np.array(x) for x in zip(*map(whole, layers), strict=True))
    # Both sum as many rounded float64 numbers, in two orders; a probability moves by at most a row's own sum.
    unit = probs[:, 0].size * 2.0**-53
    for got, (a, b) in zip(found.sums(), pairs, strict=True):
        twin = whole_sums(probs, logits, a, b)
        for name in ("column_T", "row_T", "mass_T", "head_LH"):
            assert np.abs(getattr(got, name) - getattr(twin, name)).max() <= unit * twin.mass_T.sum(), name
        assert np.abs(got.logit_T - twin.logit_T).max() <= unit * np.abs(logits).sum()
        assert abs(got.square - twin.square) <= unit * np.square(logits).sum()
        assert got.column_T.sum() > 0


def test_the_engine_sums_what_the_matrices_hold():
    """`engine.compare`, by block and piece, beside whole matrices from the decoder's own forward pass."""
    decoder = oracle_of(tiny_model("llama", torch.bfloat16, "eager", **WIDE))
    one, shifts = rows(1, WIDE_TOKENS)[0], SHIFTS[:2]
    heads = decoder.config.num_attention_heads
    mask = jnp.asarray(np.tril(np.ones((WIDE_TOKENS, WIDE_TOKENS), bool)))
    for name in ("hf_eager_bf16", "flash_bf16"):
        rounding = CONDITIONS[name].rounding

        def matrices(qk, rounding=rounding):
            q, k = qk
            k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)  # each head its own key: a group of one
            p, logit = probabilities(
                jnp.asarray(q[None, :, :, None]), jnp.asarray(k[None, :, :, None]), mask, rounding, 0.125
            )
            return (
                np.asarray(x, np.float64).reshape(heads, WIDE_TOKENS, WIDE_TOKENS)
                for x in (p, jnp.where(mask, logit, 0))
            )

        runs = [oracle_qk(decoder, one.ids, one.positions + shift, rounding) for shift in shifts[:, 0]]
        probs, logits = (
            np.array(x).swapaxes(0, 1)
            for x in zip(*(map(np.array, zip(*map(matrices, run), strict=True)) for run in runs), strict=True)
        )
        streams = [Stream(CONDITIONS[name], one.positions + shifts)]
        row, pair = Row(one.ids, one.documents), [Pair((0, 0), (0, 1), "propagated")]
        got, twin = compare(decoder, row, streams, pair, query_block=50)[0][0], whole_sums(probs, logits, 0, 1)
        # The same probabilities; within a block the engine sums them in float32, so many terms, each rounded.
        unit = 2.0**-24 * twin.column_T.sum()
        assert np.abs(got.column_T - twin.column_T).max() <= heads * WIDE_TOKENS * unit
        assert np.abs(got.head_LH - twin.head_LH).max() <= heads * WIDE_TOKENS * unit


def test_an_error_or_an_interrupt_stops_every_pass():
    model, one = tiny_model("llama", torch.float32, "sdpa"), rows(1, TOKENS)[0]
    threads, seen = threading.active_count(), []

    def broken(layer, runs):
        seen.append(layer)
        raise OSError("no room")

    def interrupted(layer, runs):
        seen.append(layer)
        _thread.interrupt_main()  # what Ctrl-C does

    for at_layer, error in ((broken, OSError), (interrupted, KeyboardInterrupt)):
        with pytest.raises(error):
            side_by_side(model, one.ids, one.positions + SHIFTS, at_layer)
        assert threading.active_count() <= threads
        assert model.config._attn_implementation == "sdpa"
    assert seen[0] == 0


# -- the whole study ---------------------------------------------------------------------------------------------------

CONFIG = f"""
title: Tiny
shift_pairs:
  contestants: [{{condition: hf_eager_bf16}}]
  tokens: {WIDE_TOKENS}
  d1: [0, 2]
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> SimpleNamespace:
    """A tiny model with float32 weights, its text and a study of both."""
    folder = tmp_path_factory.mktemp("given")
    tiny_model("llama", torch.float32, "eager", **WIDE).save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "w1"}))
    texts = [" ".join(f"w{i}" for i in np.random.default_rng(n).integers(2, 97, WIDE_TOKENS)) for n in range(3)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "study.yaml").write_text(CONFIG)
    where = [f"model.source={folder / 'model'}", f"text.source={folder / 'text.jsonl'}"]
    return SimpleNamespace(file=folder / "study.yaml", where=where, config=load_study(folder / "study.yaml", where))


def test_an_interrupted_study_goes_on_and_ends_the_same(given, tmp_path, monkeypatch):
    def stop(what: str, done: int, total: int) -> None:
        assert total == 4
        if done == 3:  # both sequences' shifts, and the first one's check
            raise KeyboardInterrupt

    computed: list[str] = []
    for name in ("shift_samples", "check_row"):
        own = getattr(study, name)
        monkeypatch.setattr(study, name, lambda *args, own=own, name=name: computed.append(name) or own(*args))
    with pytest.raises(KeyboardInterrupt):
        run_torch_study(given.config, tmp_path, progress=stop)
    assert computed == ["shift_samples", "shift_samples", "check_row"]
    assert not (tmp_path / "results.json").exists()
    lines = []
    found = run_torch_study(given.config, tmp_path, progress=lambda *line: lines.append(line))
    assert computed == ["shift_samples", "shift_samples", "check_row", "check_row"]
    assert [done for _, done, _ in lines] == [1, 2, 3, 4]
    assert read_results(tmp_path / "results.json") == found
    assert not list(tmp_path.rglob(".*"))
    pairs, per_token, check = found.records
    assert isinstance(pairs, ShiftPairs)
    assert isinstance(per_token, PerToken)
    assert isinstance(check, EmulationCheck)
    assert [(one.d1, one.d2) for one in pairs.pairs] == [(0, 2), (0, 16), (2, 16)]
    assert (len(per_token.columns.d), len(per_token.difference.d.values)) == (WIDE_TOKENS, 2)
    assert per_token.difference.d.mean > 0
    assert {one.attention_from for one in found.records} == {"torch eager bfloat16 on cpu"}
    assert found.model.weights == "bfloat16"


def test_what_a_kernel_does_not_return_is_said(given, tmp_path):
    """And in float32 the parameters are still those that the oracle has."""
    found = run_torch_study(given.config, tmp_path, "sdpa", "float32")
    assert {one.attention_from for one in found.records} == {"torch sdpa float32 on cpu, softmax in float64"}
    pretrained = study.load_pretrained(given.config.model)
    model, _ = study.load_torch(given.config, pretrained, "sdpa", "float32")
    assert model.dtype == torch.float32
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter.bfloat16().float())


def test_studies_are_shown_together_if_all_is_the_same(given, tmp_path):
    def made(name: str, *overrides: str) -> str:
        config = load_study(given.file, [*given.where, "shift_pairs.sequences=1", *overrides])
        run_torch_study(config, tmp_path / name, "sdpa", "float32")
        return str(tmp_path / name)

    own = made("own")
    for name, override, line in (
        ("stored", "model.weights=stored", "is of another model.weights"),
        ("none", "text.bos=none", "is of another text.bos"),
        ("seed", "seed=3", "is of another seed"),
    ):
        refused = CliRunner().invoke(render, [own, "--beside", made(name, override)])
        assert (refused.exit_code, line in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize("override", ["text.tokens=200", "frequency={tokens: 200, sequences: 1}"])
def test_its_texts_are_the_studys_however_long_these_must_be(given, tmp_path, override):
    """A study beside another reads the documents that the other took, which follow from all of its sections."""
    texts = [json.loads(line)["text"] for line in Path(given.config.text.source).read_text().splitlines()]
    longer = [f"{text} {text}" for text in texts[:2]]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in (*texts, *longer)))
    where = [*given.where[:1], f"text.source={tmp_path / 'text.jsonl'}", "shift_pairs.sequences=2", override]
    config = load_study(given.file, where)
    found = run_torch_study(config, tmp_path / "out", "sdpa", "float32")
    pretrained = study.load_pretrained(config.model)
    assert found.text.documents == read_pool(config.text, pretrained.tokenizer, 2, 200, config.seed).names
    assert found.text.documents != read_pool(config.text, pretrained.tokenizer, 2, WIDE_TOKENS, config.seed).names


def test_a_mistake_is_one_line_and_marks_no_folder(given, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"

    def refused(*overrides: str, implementation: str = "sdpa", dtype: str = "bfloat16") -> str:
        with pytest.raises(UserError) as told:
            main(given.file, [*given.where, *overrides], implementation, dtype, out)
        printed = capsys.readouterr()
        assert (printed.out, "\n" in str(told.value)) == ("", False), printed.err
        assert not out.exists()
        return f"study: {told.value}\n"

    assert "--implementation: 'sdap' does not run here: " in refused(implementation="sdap")
    assert "--dtype: 'int8'; give bfloat16" in refused(dtype="int8")
    assert "--dtype: float16 does not hold the parameters" in refused(dtype="float16")
    assert "shift_pairs: the configuration has no such section" in refused("shift_pairs=off", "remedies={}")
    with monkeypatch.context() as patch:
        patch.setattr(
            AutoModelForCausalLM,
            "from_pretrained",
            lambda *_, **__: (_ for _ in ()).throw(ImportError("not installed")),
        )
        line = refused(implementation="flash_attention_2")
        assert line == "study: --implementation: 'flash_attention_2' does not run here: not installed; give another\n"

    monkeypatch.setattr(study, "shift_samples", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(Leave) as left:
        main(given.file, given.where, "sdpa", "bfloat16", out)
    assert left.value.code == 130
    assert str(left.value) == "interrupted; finished sequences are kept, and the same command goes on"


def test_the_gguf_is_read_as_transformers_reads_it():
    """Every parameter bit for bit, and the same tokens: a study is the same with and without the trainer's cache."""
    folder = smollm2_folder(CACHE)
    config, arrays, tokenizer = smollm2.read_gguf()
    theirs = load_file(folder / "model.safetensors")
    assert arrays.keys() == theirs.keys()
    for name, array in theirs.items():
        assert array.dtype == arrays[name].dtype
        assert np.array_equal(array, arrays[name]), name
    assert smollm2.converted_folder(CACHE) == folder
    text = "Fellow citizens, 1,024 tokens:\n\n    def f(x): return x ** 2  # naïve\t🙂 <|im_start|>user"
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text).ids == plain.encode(text).ids
    assert tokenizer.token_to_id("<|im_start|>") == config["bos_token_id"]
