"""The study's emulation against transformers itself, and the study on a torch model."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jaxref.study import smollm2
from jaxref.study.conditions import CONDITIONS
from jaxref.study.engine import Pair, Row, Stream, compare
from jaxref.study.measures import sample
from jaxref.study.schema import PerToken, ShiftPairs
from jaxref.study.spec import ShiftPairsConfig
from jaxref.study.text import RowArrays
from parity_tests.layers import oracle_of
from parity_tests.models import tiny_model
from parity_tests.study import check_emulation, oracle_attention, shift_records, sums, torch_attention
from parity_tests.test_smollm2 import CACHE
from torchtrain.modeling.smollm2 import smollm2_folder

TOKENS = 48


@pytest.fixture(scope="module")
def rows() -> list[RowArrays]:
    random = np.random.default_rng(0)
    return [
        RowArrays(random.integers(0, 97, TOKENS), np.ones(TOKENS, np.int64), np.arange(TOKENS), (TOKENS,))
        for _ in range(2)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eager_bf16_is_the_oracles(rows, family):
    """Layer by layer by the one rule; and the first layer, where nothing has had time to part, almost number by number."""
    found = check_emulation(tiny_model(family, torch.bfloat16, "eager"), rows)
    assert found.condition == "hf_eager_bf16"
    assert max(found.ratio) <= 1
    assert found.identical[0] > 0.99
    assert min(found.d_torch.values) > 0
    # Both are D of one bf16 run against another: apart by no more than each sequence's is from the other's own rounding.
    rounding = np.abs(np.subtract(found.d_torch.values, found.d_oracle.values))
    assert np.all(rounding <= found.d_oracle.values)


def test_a_wrong_emulation_is_caught(rows):
    """Frequencies that are off by a twentieth in torch alone. (Rounded to bf16 they would pass here: within 48 tokens the
    distances, which are all that attention sees, turn by less than bf16's other roundings.)"""
    model = tiny_model("llama", torch.bfloat16, "eager")
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 1.05
    assert max(check_emulation(model, rows).ratio) > 1


def test_the_engine_sums_what_the_matrices_hold(rows):
    """`engine.compare`, block by block and piece by piece, beside whole matrices from the decoder's own forward pass."""
    decoder, one, shifts = oracle_of(tiny_model("llama", torch.bfloat16, "eager")), rows[0], np.array([[0], [16]])
    heads = decoder.config.num_attention_heads
    for name in ("hf_eager_bf16", "flash_bf16"):
        chosen = CONDITIONS[name]
        runs = [oracle_attention(decoder, one.ids, one.positions + shift, chosen.rounding) for shift in shifts[:, 0]]
        streams = [Stream(chosen, one.positions + shifts)]
        row, pair = Row(one.ids, one.documents), [Pair((0, 0), (0, 1), "propagated")]
        got, whole = compare(decoder, row, streams, pair, block=16)[0][0], sums(*runs)
        # The probabilities are the same numbers; within a block the engine sums them in float32, so many terms, each rounded.
        unit = 2.0**-24 * whole.column_T.sum()
        assert np.abs(got.column_T - whole.column_T).max() <= heads * TOKENS * unit
        assert np.abs(got.head_LH - whole.head_LH).max() <= heads * TOKENS * unit


def test_a_study_of_a_torch_model(rows):
    section = ShiftPairsConfig.model_validate(
        {"contestants": [{"condition": "hf_eager_bf16"}], "tokens": TOKENS, "d1": [0, 2], "d2": 16}
    )
    for implementation in ("eager", "sdpa"):
        model = tiny_model("llama", torch.bfloat16, implementation)
        pairs, per_token = shift_records(model, rows, section, f"torch {implementation}", "hf_eager_bf16")
        assert isinstance(pairs, ShiftPairs)
        assert isinstance(per_token, PerToken)
        assert [(one.d1, one.d2) for one in pairs.pairs] == [(0, 2), (0, 16), (2, 16)]
        assert len(per_token.columns.d) == TOKENS
        assert per_token.difference.d.mean > 0
        assert model.config._attn_implementation == implementation
    exact = tiny_model("llama", torch.float64, "sdpa")
    attention = [torch_attention(exact, rows[0].ids, rows[0].positions + shift) for shift in (0, 16)]
    assert sample(sums(*attention), rows[0].documents).d < per_token.difference.d.mean


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
    from tokenizers import Tokenizer

    text = "Fellow citizens, 1,024 tokens:\n\n    def f(x): return x ** 2  # naïve\t🙂 <|im_start|>user"
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text).ids == plain.encode(text).ids
    assert tokenizer.token_to_id("<|im_start|>") == config["bos_token_id"]
