"""What others make of an exported folder: older transformers, and the keys that they know."""

import json
import math
import re
import sys

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torchtrain.config import RopeConfig
from torchtrain.modeling.rope import extend
from torchtrain.modeling.save import reader_notes, save_folder
from torchtrain.tests.readers import CASES, LENGTH, THETA, environment, export_case, read_with
from torchtrain.tests.tiny import FAMILIES, POSITIONS, tiny_config, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for every RoPE type."""
    made = {name: tmp_path_factory.mktemp("exported") / "model" for name in CASES}
    for name, folder in made.items():
        export_case(folder, CASES[name])
    return made


def written_in(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def frequencies(config, seq_len=None):
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=seq_len)


@pytest.mark.parametrize("case", CASES)
def test_the_keys_of_transformers_4_alone_mean_the_same(folders, case):
    written = written_in(folders[case])
    older = {key: value for key, value in written.items() if key != "rope_parameters"}
    assert older["rope_theta"] >= THETA
    read, alone = AutoConfig.from_pretrained(folders[case]), LlamaConfig.from_dict(older)
    assert alone.rope_parameters == read.rope_parameters
    for seq_len in (None, LENGTH, 2 * LENGTH):
        for one, other in zip(frequencies(alone, seq_len), frequencies(read, seq_len), strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("longrope")])
def test_longrope_as_transformers_4_reads_it(folders, case):
    """It takes the original length from beside `rope_scaling`, and the factor from the two lengths."""
    written = written_in(folders[case])
    original, scaling = written["original_max_position_embeddings"], written["rope_scaling"]
    assert original == scaling["original_max_position_embeddings"] == POSITIONS
    derived = LENGTH / original
    read = scaling.get("attention_factor") or (1 + torch.tensor(derived).log() / torch.tensor(original).log()).sqrt()
    asked = CASES[case].get("factor", derived)
    truth = (1 + torch.tensor(asked).log() / torch.tensor(original).log()).sqrt()
    assert float(read) == pytest.approx(float(truth), rel=4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("case", CASES)
def test_transformers_5_reads_the_config_that_was_trained(folders, case):
    own = {"rope_type": "default", "rope_theta": THETA}
    trained = extend(tiny_config(rope_parameters=own), RopeConfig(**CASES[case]), LENGTH)
    read = AutoConfig.from_pretrained(folders[case])
    scaling = frequencies(trained)[1]
    # Written out where transformers 4 would derive another.
    assert read.rope_parameters.pop("attention_factor", scaling) == scaling
    trained.rope_parameters.pop("attention_factor", None)
    assert read.rope_parameters == trained.rope_parameters
    assert read.max_position_embeddings == trained.max_position_embeddings
    assert torch.equal(frequencies(read)[0], frequencies(trained)[0])


def test_part_of_a_head_that_is_rotated_stands_beside_the_scaling(tmp_path):
    own = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}
    model = tiny_model()
    model.config = extend(tiny_config(rope_parameters=own), RopeConfig(type="yarn"), LENGTH)
    save_folder(model, tiny_tokenizer(), tmp_path)
    written = written_in(tmp_path)
    assert written["partial_rotary_factor"] == 0.5
    assert "partial_rotary_factor" not in written["rope_scaling"]
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == model.config.rope_parameters


def test_a_generation_length_that_the_source_does_not_set_stays_unset(tmp_path):
    save_folder(tiny_model(), tiny_tokenizer(), tmp_path)
    assert "max_length" not in written_in(tmp_path, "generation_config.json")


def test_a_tokenizer_that_cuts_at_the_old_length_does_so_no_more(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(POSITIONS)
    save_folder(tiny_model(), tokenizer, tmp_path)
    assert written_in(tmp_path, "tokenizer.json")["truncation"] is None


def test_the_tokenizer_is_one_that_transformers_4_knows(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<x>"]})
    save_folder(tiny_model(), tokenizer, tmp_path)
    written = written_in(tmp_path, "tokenizer_config.json")
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<x>"]
    assert "extra_special_tokens" not in written
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.extra_special_tokens == ["<x>"]
    assert again("a<x>")["input_ids"] == tokenizer("a<x>")["input_ids"]


def llama_tokenizer(**settings) -> LlamaTokenizer:
    return LlamaTokenizer(
        vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "▁a": 5}, merges=[("▁", "a")], **settings
    )


@pytest.mark.parametrize("bos", [False, True])
def test_a_tokenizer_class_of_transformers_4_is_told_of_bos(tmp_path, bos):
    save_folder(tiny_model(), llama_tokenizer(add_bos_token=bos), tmp_path)
    written = written_in(tmp_path, "tokenizer_config.json")
    assert (written["tokenizer_class"], written["add_bos_token"], written["add_eos_token"]) == (
        "LlamaTokenizer",
        bos,
        False,
    )
    assert AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"] == [1] * bos + [5]


NOTES = {
    "theta raised": [],
    "ntk": [],
    "linear": [r"vLLM: .*--max-model-len 256"],
    "dynamic": [r"vLLM: .*--max-model-len 256\. Before 0\.22 .*--hf-overrides .*default.*500000"],
    "yarn": [],
    "yarn, factor 8": [
        r"vLLM before 0\.30: takes 64 times .*--max-model-len 256",
        r"transformers 4\.51: takes 4 for yarn's factor 8",
    ],
    "yarn, all given": [rf'vLLM before 0\.30 and llama\.cpp: .*"attn_factor": {1.25 / (0.1 * math.log(4) + 1):.9g}'],
    "llama3": [],
    "longrope": [r"vLLM: .* 64 positions .*--max-model-len 256", r"llama\.cpp: .*llama"],
    "longrope, factor 8": [
        r"vLLM: .* 64 positions .*--max-model-len 256",
        rf'vLLM: set "short_mscale" and "long_mscale": {math.sqrt(1 + math.log(8) / math.log(POSITIONS)):.9g}',
        r"llama\.cpp: .*llama",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_what_no_config_can_say_is_said(folders, case):
    notes = reader_notes(AutoConfig.from_pretrained(folders[case]))
    assert len(notes) == len(NOTES[case])
    for note, pattern in zip(notes, NOTES[case], strict=True):
        assert re.search(pattern, note), note
        assert "\n" not in note


def test_a_converter_that_leaves_scaling_out_is_named():
    own = {"rope_type": "default", "rope_theta": THETA}
    config = extend(tiny_config("qwen3", rope_parameters=own), RopeConfig(**CASES["llama3"]), LENGTH)
    assert [note.split(":")[0] for note in reader_notes(config)] == ["llama.cpp"]


@pytest.mark.parametrize("version", ["4.57.3", "4.51.3"])
def test_a_real_transformers_4_reads_the_same_bits(folders, tmp_path, version):
    if environment(version) is None:
        pytest.skip(f"no transformers {version} here; `make readers` puts one into .venv-readers")
    for family in FAMILIES:
        export_case(tmp_path / family, CASES["yarn"], family)
    save_folder(tiny_model(), llama_tokenizer(add_bos_token=False), tmp_path / "no bos")
    # A note says it (4.51 takes the factor from the lengths), and no key mends it.
    misread = {"yarn, factor 8"} if version == "4.51.3" else set()
    every = [folder for case, folder in folders.items() if case not in misread]
    every += [*(tmp_path / family for family in FAMILIES), tmp_path / "no bos"]
    ours, theirs = read_with(sys.executable, every), read_with(environment(version) or "", every)
    assert theirs["version"] == version
    for folder in map(str, every):
        expected, found = ours["folders"][folder], theirs["folders"][folder]
        assert "error" not in expected | found
        # Qwen 2's tokenizer class of transformers 5 adds a token of its own, which no text gives.
        for name in expected.keys() - {"warnings", "special"}:
            assert found[name] == expected[name], (folder, name)
