"""Documents with answers: which tokens are targets, from records of every kind to the rows that are trained on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import torchtrain
from anchorline.errors import UserError
from anchorline.tolerance import judge, likely_error_of_mean
from torchtrain.config import DataConfig, PackConfig, Preparation, Source, load_config
from torchtrain.data import PackedRows, prepare
from torchtrain.data.answers import AnswerEncoder
from torchtrain.data.files import BadItemError
from torchtrain.data.prepare import prepare_store
from torchtrain.tests.data_fixtures import write_jsonl
from torchtrain.tests.tiny import VOCABULARY, tiny_model

CLOSING = ["<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|return|>"]
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = [(role, f"{role[0]}{n}") for n in range(2) for role in ("user", "assistant")]
CONVERSATION = [{"role": role, "content": text} for role, text in TURNS]


def byte_tokenizer(template: str | None = PLAIN, bos: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and a few special tokens, below the tiny model's vocabulary."""
    alphabet = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"eos_token": "</s>", "additional_special_tokens": CLOSING} | ({"bos_token": bos} if bos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    assert len(tokenizer) <= VOCABULARY
    return tokenizer


def trained(tokenizer: PreTrainedTokenizerFast, record: dict) -> str:
    """Return the text of a record's targets."""
    kind = "messages" if "messages" in record else "completion" if "prompt" in record else "tokens"
    answered = AnswerEncoder(tokenizer, "text", True).encode(record, kind)
    return tokenizer.decode(answered.tokens[answered.targets])


# --- what is a target -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_what_the_assistant_says_is_a_target(template):
    assert trained(byte_tokenizer(template), {"messages": CONVERSATION}) == "a0<|im_end|>a1<|im_end|>"
    of_completion = {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}
    assert trained(byte_tokenizer(template), of_completion) == "a1<|im_end|>"


# Models' own templates, as TRL carries them.
STOCK = ("cohere2", "gemma3", "glm4moe", "llama3", "lfm2", "nemotron_3_nano", "phi3", "qwen2_5", "qwen3", "deepseekv3")
STOCK += ("qwen3_5_think", "qwen3_5_nothink", "qwen3_instruct_2507", "qwen3_vl")


def stock(name: str) -> str:
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", STOCK)
def test_models_own_templates_without_marks(name):
    """An empty thought, the role's header and white space behind the closing token are nobody's words."""
    told = trained(byte_tokenizer(stock(name), bos="<s>"), {"messages": CONVERSATION})
    for closing in [*CLOSING, "</s>", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "\n"]:
        told = told.replace(closing, "")
    assert told == "a0a1"


def test_a_thought_of_the_messages_own_is_a_target():
    thought = [CONVERSATION[0], {"role": "assistant", "content": "<think>\nwhy\n</think>\n\na0"}]
    assert trained(byte_tokenizer(stock("qwen3")), {"messages": thought}) == "<think>\nwhy\n</think>\n\na0<|im_end|>"


def test_the_kinds_of_record_say_the_same():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("Q: 2+2? A: 4</s>")
    prompt = len("Q: 2+2? A:")
    mask = [int(n >= prompt) for n in range(len(ids))]
    labels = [token if of else -100 for token, of in zip(ids, mask, strict=True)]
    of_text = {"prompt": "Q: 2+2? A:", "completion": " 4"}
    packed = [
        torchtrain.pack([record], tokenizer, sequence_length=32)[0]
        for record in (
            of_text,
            *({"input_ids": ids, name: of} for name, of in (("completion_mask", mask), ("assistant_masks", mask))),
            {"input_ids": np.array(ids), "labels": np.array(labels)},
            {"input_ids": torch.tensor(ids), "completion_mask": torch.tensor(mask).bool()},
        )
    ]
    for row in packed:
        assert {name: array.tolist() for name, array in row.items()} == {n: a.tolist() for n, a in packed[0].items()}
    kept = packed[0]["shift_labels"] != -100
    # A mask says which tokens are targets: the label stands one place before.
    assert tokenizer.decode(packed[0]["shift_labels"][kept]) == " 4</s>"
    assert kept.nonzero()[0].tolist() == [prompt, prompt + 1, prompt + 2], "an anchor stands before"


BAD = [
    ({"messages": []}, "messages: is no list of messages"),
    ({"messages": [{"content": "x"}]}, r"messages\[0\]: has no role"),
    ({"messages": [CONVERSATION[0]]}, "no message is the assistant's"),
    ({"messages": CONVERSATION[1:]}, r"messages\[0\]: is the assistant's"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\]: holds 'image'"),
    ({"messages": [{"role": "user", "content": "x</s>"}]}, r"messages\[0\]: holds the special token '</s>'"),
    ({"messages": CONVERSATION, "tools": [{"type": "function"}]}, "has tools, and the chat template writes none"),
    ({"prompt": "x", "completion": " "}, "completion is blank"),
    ({"prompt": "x", "completion": CONVERSATION[1:2]}, "are not both texts, or both lists of messages"),
    ({"input_ids": [1, 2, 3], "labels": [-100, 2]}, "labels has 2 entries and input_ids 3"),
    ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, r"labels\[0\] is 2 and input_ids\[0\] 1"),
    ({"input_ids": [1, 2, 3], "completion_mask": [0, 2, 1]}, "completion_mask holds 2; a mask is 0 or 1"),
    ({"input_ids": [1, 2, 3], "assistant_masks": [1, 0, 0]}, "no token is a target"),
    ({"input_ids": [1, 2, 3], "assistant_masks": [0, 1, 1], "labels": [1, 2, 3]}, "has labels, assistant_masks; give"),
    ({"input_ids": [1, 2, 999], "completion_mask": [0, 1, 1]}, "the token ids go from 1 to 999"),
    ({"input_ids": "abc", "completion_mask": [0, 1, 1]}, "input_ids: is no list of integers"),
]


@pytest.mark.parametrize(("record", "reason"), BAD, ids=[reason[:40] for _, reason in BAD])
def test_a_bad_record_is_one_line(record, reason):
    with pytest.raises(UserError, match=rf"^documents\[1\]: .*{reason}"):
        torchtrain.pack([{"messages": CONVERSATION}, record], byte_tokenizer(), sequence_length=64)


def test_templates_that_cannot_tell_an_answer_are_refused():
    later = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")
    for template, reason in (
        (None, "the tokenizer has no chat template"),
        (later, r"messages\[1\]: the chat template writes this answer otherwise"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses the messages: .*alternate"),
    ):
        with pytest.raises(BadItemError, match=reason):
            trained(byte_tokenizer(template), {"messages": CONVERSATION})


def test_a_token_of_both_sides_is_refused():
    alphabet = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merged = Tokenizer(models.BPE(alphabet | {"Ġ4": len(alphabet)}, [("Ġ", "4")]))
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged, eos_token="</s>")
    with pytest.raises(BadItemError, match=r"a token holds text of both sides of .* move white space"):
        AnswerEncoder(tokenizer, "text", True).encode({"prompt": "A: ", "completion": "4"}, "completion")
    answered = AnswerEncoder(tokenizer, "text", True).encode({"prompt": "A:", "completion": " 4"}, "completion")
    assert answered.targets.tolist() == [False, False, True, True]


# --- rows -------------------------------------------------------------------------------------------------------------


def conversations(count: int) -> list[dict]:
    """Conversations of unlike lengths."""
    return [
        {"messages": [{"role": role, "content": text * (1 + n % 3)} for role, text in TURNS[: 2 + 2 * (n % 2)]]}
        for n in range(count)
    ]


@pytest.mark.parametrize("variant", ["full", "intra", "intra_reset", "anchor", "anchor+tag"])
def test_conversations_stay_whole_and_keep_their_masks(variant):
    tokenizer, records = byte_tokenizer(), conversations(9)
    rows = torchtrain.pack(records, tokenizer, sequence_length=160, variant=variant)
    texts = [tokenizer.apply_chat_template(record["messages"], tokenize=False) for record in records]
    told = "".join(tokenizer.decode(row["input_ids"]) for row in rows)
    assert all(text in told for text in texts)
    expected = sorted(trained(tokenizer, record) for record in records)
    answers = "".join(tokenizer.decode(row["shift_labels"][row["shift_labels"] != -100]) for row in rows)
    assert sorted(answers) == sorted("".join(expected))


def test_one_that_no_row_holds_is_refused_or_dropped():
    records = [*conversations(2), {"messages": [CONVERSATION[0], {"role": "assistant", "content": "a" * 100}]}]
    with pytest.raises(UserError, match=r"1 documents with answers are longer than a row .*pack.longer to drop"):
        torchtrain.pack(records, byte_tokenizer(), sequence_length=80)
    rows = torchtrain.pack(records, byte_tokenizer(), sequence_length=80, longer="drop")
    assert rows.too_long == 1
    with pytest.raises(UserError, match="leaves nothing of 1 documents"):
        torchtrain.pack(records[2:], byte_tokenizer(), sequence_length=80, longer="drop")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"strategy": "sequential"}, "pack.strategy sequential: cuts documents, and answers need their questions"),
        ({"variant": "anchor+interleave"}, r"pack.variant anchor\+interleave: cuts documents"),
        ({"cross_document_targets": True}, "pack.cross_document_targets: trains tokens that are no answers"),
    ],
)
def test_what_would_cut_an_answer_from_its_question_is_refused(settings, reason, tree, write_config):
    with pytest.raises(UserError, match=reason):
        torchtrain.pack(conversations(2), byte_tokenizer(), sequence_length=64, **settings)
    tree["data"]["sources"] = [{"files": "x.jsonl", "records": "messages"}]
    tree["pack"] = {"sequence_length": 64, "strategy": "best_fit"} | settings
    with pytest.raises(UserError, match=reason):
        load_config(write_config(tree))


@pytest.mark.parametrize(
    ("template", "record", "told"),
    [
        (PLAIN, {"messages": CONVERSATION}, 0),
        (PLAIN.replace("<|im_end|>", ""), {"messages": CONVERSATION}, 1),
        (PLAIN, {"prompt": "Q", "completion": "A"}, 0),
        (PLAIN, {"input_ids": [5, 6], "completion_mask": [0, 1]}, 1),
        (PLAIN, "a text without answers", 0),
    ],
)
def test_answers_without_an_end_are_a_warning(caplog, template, record, told):
    torchtrain.pack([record], byte_tokenizer(template), sequence_length=64)
    assert caplog.text.count("no special token is a target, so the model learns no end of an answer") == told


def test_a_bos_that_the_template_writes_is_the_anchor():
    """What a server sends begins with one BOS, too."""
    tokenizer = byte_tokenizer("{{ bos_token }}" + PLAIN, bos="<s>")
    for variant, count in (("anchor", 0), ("intra", 1)):
        (row,) = torchtrain.pack(conversations(1), tokenizer, sequence_length=64, variant=variant)
        assert (row["input_ids"] == tokenizer.bos_token_id).sum() == 1 + count


# --- stores -----------------------------------------------------------------------------------------------------------


def test_a_run_and_a_preparation_keep_the_masks(tmp_path):
    """Shards of several tasks, texts beside conversations: the same rows as `pack` makes."""
    tokenizer, records = byte_tokenizer(), conversations(6)
    for n in range(3):
        write_jsonl(tmp_path / f"chats-{n}.jsonl", records[2 * n : 2 * n + 2])
    write_jsonl(tmp_path / "texts.jsonl", [{"text": "a text"}])
    sources = [
        Source(files=str(tmp_path / "chats-*.jsonl"), records="messages", domain="chats"),
        Source(files=str(tmp_path / "texts.jsonl")),
    ]
    data = DataConfig(sources=sources, cache=str(tmp_path / "cache"))
    pack = PackConfig(sequence_length=96, strategy="best_fit")
    made = torchtrain.pack([*records, "a text"], tokenizer, sequence_length=96)
    preparation = Preparation.model_validate(
        {"tokenizer": {"source": "unused"}, "data": data.model_dump(), "prepare": {"workers": 1}}
    )
    for store in (prepare(data, tokenizer), prepare_store(preparation, tokenizer, tmp_path / "store")):
        store.verify()
        rows = PackedRows(store, np.arange(len(store)), pack, 0, [made.anchor_ids[0]], {}, made.pad_id)
        for row, other in zip(rows, made, strict=True):
            assert all(np.array_equal(row[name], other[name]) for name in ("input_ids", "shift_labels"))
    flipped = tmp_path / "store" / "targets-00000.bin"
    flipped.write_bytes(bytes([1]) + flipped.read_bytes()[1:])
    with pytest.raises(UserError, match=r"targets-00000.bin"):
        store.verify()


def test_another_template_is_another_store(tmp_path):
    write_jsonl(tmp_path / "chats.jsonl", conversations(2))
    (tmp_path / "marked.jinja").write_text(MARKED)
    source = Source(files=str(tmp_path / "chats.jsonl"), records="messages")
    data = DataConfig(sources=[source], cache=str(tmp_path / "cache"))
    other = data.model_copy(update={"chat_template": str(tmp_path / "marked.jinja")})
    stores = [prepare(one, byte_tokenizer()) for one in (data, other)]
    assert stores[0].folder != stores[1].folder
    missing = data.model_copy(update={"chat_template": str(tmp_path / "none.jinja")})
    with pytest.raises(UserError, match=r"data.chat_template .*none.jinja"):
        prepare(missing, byte_tokenizer())


def test_a_tokenizer_without_a_template_is_refused_before_anything_is_read(tmp_path):
    texts, chats = Source(files=str(tmp_path / "a.jsonl")), Source(files=str(tmp_path / "b.jsonl"), records="messages")
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b.jsonl").write_text("not read\n")
    data = DataConfig(sources=[texts, chats], cache=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"^data.sources.1.records messages: the tokenizer has no chat template; set"):
        prepare(data, byte_tokenizer(None))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("kind", "record", "reason"),
    [
        ("messages", {"messages": CONVERSATION[:1]}, "no message is the assistant's"),
        ("tokens", {"input_ids": [1, 2, 3], "completion_mask": [0, 0, 0]}, "no token is a target"),
    ],
)
def test_a_source_without_a_target_is_refused(tmp_path, kind, record, reason):
    write_jsonl(tmp_path / "chats.jsonl", [record] * 3)
    data = DataConfig(
        sources=[Source(files=str(tmp_path / "chats.jsonl"), records=kind)], cache=str(tmp_path / "cache")
    )
    with pytest.raises(UserError, match=rf"3 of 3 records are bad.*{reason}"):
        prepare(data, byte_tokenizer())
    assert not list((tmp_path / "cache").rglob("*.bin"))


# --- TRL's loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["assistant_only_loss", "completion_only_loss", "padding_free"])
def test_losses_are_those_of_trl(tmp_path, asked):
    """On the same conversations, by the error rule: TRL pads each to the longest, ours are packed."""
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.pad_token = "</s>"
    records = conversations(6)
    if asked == "completion_only_loss":
        records = [{"prompt": f"Question {n}:", "completion": f" answer {n}"} for n in range(6)]
    settings = SFTConfig(
        str(tmp_path),
        assistant_only_loss=asked != "completion_only_loss",
        padding_free=asked == "padding_free",
        per_device_train_batch_size=6,
        report_to="none",
        use_cpu=True,
        max_length=None,
    )
    data = Dataset.from_list([json.loads(json.dumps(record)) for record in records])
    trainer = SFTTrainer(tiny_model("llama"), settings, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    batch = {name: x for name, x in batch.items() if name in ("input_ids", "labels", "attention_mask", "position_ids")}
    rows = torchtrain.pack(records, tokenizer, sequence_length=256, variant="intra_reset", anchor=[])
    own = torchtrain.collate(list(rows))
    assert (own["shift_labels"] != -100).sum() == (batch["labels"][:, 1:] != -100).sum()

    def losses(model, given, dtype):
        """Each target's loss, float64 [targets], of logits in `dtype`."""
        with torch.no_grad():
            # With a cache transformers would let the documents of a row see each other.
            logits = model.to(dtype)(**given, use_cache=False).logits[:, :-1].double().flatten(0, 1)
        labels = given["labels"][:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")[labels != -100].numpy()

    truth, reference = (losses(tiny_model("llama"), batch, dtype) for dtype in (torch.float64, torch.float32))
    ours = losses(torchtrain.attach(tiny_model("llama")), own, torch.float32)
    means = [x.mean(keepdims=True) for x in (ours, truth, reference)]
    likely = likely_error_of_mean(truth, reference, len(truth))
    assert judge(*means, "float32", likely_error=likely).passed
