"""`torchtrain init`, shipped configs, the version, and what is refused before anything heavy is imported."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import LlamaConfig
from typer.testing import CliRunner

from torchtrain.cli import app, main
from torchtrain.config import load_config
from torchtrain.data.corpus import read
from torchtrain.run.export import model_card
from torchtrain.tests.test_answers import CONVERSATION, PLAIN, byte_tokenizer
from torchtrain.tests.tiny import POSITIONS, tiny_settings


def call(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_config_that_init_writes_trains(corpus, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [json.loads(line) for line in corpus.read_text().splitlines()]
    lines = [json.dumps({"id": "7", "body": record["text"]}) for record in records]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torchtrain.commands.first_config._SHORT", 16)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text("\n".join(lines))
    told = call("init", "docs", model_folder(), "--out", "mine.yaml")
    assert told.exit_code == 0, told.output
    assert "rows of 128 tokens are slow without a GPU; a first run: --length 16\n" in told.stdout
    assert told.stdout.endswith("config    mine.yaml; next: torchtrain train mine.yaml\n")
    assert len((tmp_path / "mine.yaml").read_text().splitlines()) <= 25
    config = load_config("mine.yaml")
    assert config.data.sources[0].text_field == "body"
    assert (config.pack.sequence_length, config.rope.type) == (2 * POSITIONS, "ntk")
    told = call("train", "mine.yaml", "train.steps=1", "model.dtype=float32", "rope.type=linear")
    assert told.exit_code == 0, told.output
    card = (tmp_path / "runs" / "mine" / "model" / "README.md").read_text()
    assert f"in rows of {2 * POSITIONS}" in card
    assert "AutoModelForCausalLM" in card
    note = "vLLM: takes max_position_embeddings times the factor"
    assert f"- {note}" in card
    assert f"readers   {note}" in told.output


ANSWERED = {
    "messages": {"messages": CONVERSATION, "id": "longer than what is said"},
    "completion": {"prompt": "Q: 2+2? A:", "completion": " 4", "source": "longer than what is said"},
    "tokens": {"input_ids": [*range(3, 30)], "completion_mask": [0] * 9 + [1] * 18},
    "weights": {"input_ids": [*range(3, 30)], "weights": [0.0] * 9 + [0.5] * 18},
}


@pytest.mark.parametrize("kind", ANSWERED)
def test_init_sees_documents_with_answers(model_folder, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder(), "source")
    byte_tokenizer(PLAIN.replace("<|im_end|>", "")).save_pretrained("source")
    Path("a.jsonl").write_text("\n".join([json.dumps(ANSWERED[kind])] * 60))
    Dataset.from_list([ANSWERED[kind]] * 60).to_parquet("a.parquet")
    for data in ("a.parquet", "a.jsonl"):
        told = call("init", data, "source", "--out", f"{data}.yaml")
        assert f"records: {kind}; only answers are targets" in told.stdout, told.output
    assert load_config("a.jsonl.yaml").pack.longer == "drop"
    told = call("train", "a.jsonl.yaml", "train.steps=1", "model.dtype=float32", "data.held_out_share=0")
    assert told.exit_code == 0, told.output
    assert ("warning   no special token is a target" in told.output) is (kind != "completion")
    assert "**Every prompt begins with `</s>`**" in Path("runs/a.jsonl/model/README.md").read_text()


def test_short_rows_leave_the_models_length_in_its_card():
    config = load_config("demo", ["pack.sequence_length=512"])
    card = model_card(config, LlamaConfig(max_position_embeddings=8192), 3, [])
    assert "# A model for 8,192 tokens" in card
    assert "3 steps, 1,536 tokens, in rows of 512" in card
    assert 'base_model: "HuggingFaceTB/SmolLM2-135M-Instruct"' in card


@pytest.mark.parametrize("name", ["texts[1]", "s*", "c::d", "x\ny", "b[2].jsonl", "amb[1]", "bad\udcff"])
def test_init_writes_the_pattern_of_the_documents_it_was_given(model_folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for place in dict.fromkeys([name, "texts1", "qa", "sa", "b", "amb[[]1]", "b2.jsonl"]):
        path = Path(place) / "a.jsonl" if not place.endswith(".jsonl") else Path(place)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": f"{place} {'x' * 200}"}, ensure_ascii=True))
    told = call("init", name, model_folder(), "--out", "a.yaml", "--length", "64")
    if refusal := {"amb[1]": "its pattern is the name of another folder", "bad\udcff": "is not UTF-8"}.get(name):
        assert told.exit_code == 2
        assert refusal in told.stderr
        return
    assert told.exit_code == 0, told.output
    (source,) = load_config("a.yaml").data.sources
    assert [record.text.rpartition(" ")[0] for record in read(source)] == [name]


def test_init_says_what_it_leaves_out(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, binary = json.dumps({"text": "x" * 200}), b"\x00\xff\xfe"
    for place in ("both/a.jsonl", "both/b.txt", "both/in/c.txt", "both/d.md", "binary/a.txt", "binary/b.txt"):
        Path(place).parent.mkdir(exist_ok=True)
        Path(place).write_text(good)
    (tmp_path / "binary" / "c.txt").write_bytes(binary)
    odd = [
        '{"text": null}',
        '{"text": 3}',
        "x",
        "[1]",
        '{"text": " "}',
        '{"a":1}',
        '{"text":"a" "b"}',
        '{"text": null}',
    ]
    (tmp_path / "odd.jsonl").write_text("\n".join([good] * 20 + odd))
    (tmp_path / "half.jsonl").write_text("\n".join([good] * 8 + odd))
    shares = {}
    for name in ("both", "binary", "odd.jsonl", "half.jsonl"):
        shares[name] = call("init", name, model_folder(), "--out", f"{name}.yaml", "--length", "64")
    assert "left out  2 .txt, 1 .md files beside 1 .jsonl; add a source to data.sources" in shares["both"].stdout
    assert "1 of the first 3 records hold no document: binary/c.txt: is not UTF-8; the" in shares["binary"].stdout
    assert load_config("binary.yaml").data.bad_record_share == 0.67
    said = shares["odd.jsonl"].stdout
    for part in ("odd.jsonl:21: 'text' is null (2 such)", ":22: 'text' is not a string", ":27: is not JSON: Expecting"):
        assert part in said
    assert load_config("odd.jsonl.yaml").data.bad_record_share == 0.58
    assert shares["half.jsonl"].exit_code == 2
    assert (
        "DATA: 8 of the first 16 records hold no document: half.jsonl:9: 'text' is null" in shares["half.jsonl"].stderr
    )


@pytest.mark.parametrize(
    ("data", "model", "out", "message"),
    [
        ("nothing", None, "a.yaml", "DATA 'nothing': no such file or folder"),
        ("empty", None, "a.yaml", "DATA 'empty': the folder holds none of "),
        ("numbers.jsonl", None, "a.yaml", "no record has a field that holds text; write records such as {"),
        ("broken.jsonl", None, "a.yaml", "DATA broken.jsonl:2: is not JSON: Expecting ',' delimiter"),
        ("words.jsonl", None, "a.yaml", "DATA words.jsonl:1: is no object; write one such as {"),
        ("half.jsonl", None, "a.yaml", "DATA: 1 of the first 2 records hold no document: half.jsonl:2: is not "),
        ("docs.jsonl", None, "a.yaml", "longer than all documents together, about 7 tokens; give more documents, or a"),
        ("blank.jsonl", None, "a.yaml", "DATA 'blank.jsonl': holds no record; give documents"),
        ("docs.jsonl", "/no/such", "a.yaml", "no folder with a config.json here"),
        ("docs.jsonl", None, "docs.jsonl", "--out docs.jsonl: exists"),
        ("docs.jsonl", None, "a.txt", "--out a.txt: is not the name of a YAML file"),
    ],
)
def test_what_init_refuses_leaves_no_file(model_folder, tmp_path, monkeypatch, data, model, out, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n")
    (tmp_path / "numbers.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "broken.jsonl").write_text('\n{"text": "a" "b"}\n')
    (tmp_path / "words.jsonl").write_text('"one two"\n')
    (tmp_path / "half.jsonl").write_text('{"text": "one two"}\n{"text": \n')
    (tmp_path / "docs.jsonl").write_text('{"text": "one two"}\n')
    before = sorted(tmp_path.iterdir())
    told = call("init", data, model or model_folder(), "--out", out)
    assert told.exit_code == 2
    assert message in told.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("vocabulary", "eos", "bos", "said"),
    [
        (264, "</x>", "<b>", "warning   tokenizer.json lacks BOS '<b>' (id 259) and EOS '</x>' (id 260): added"),
        (259, "</x>", "<s>", "the tokenizer's EOS '</x>' is the token id 259 but the model's vocabulary has 259; name"),
        (264, "</s>", "<s>", ""),
    ],
)
def test_a_special_token_that_transformers_adds_is_refused_or_said(
    model_folder, corpus, tmp_path, monkeypatch, vocabulary, eos, bos, said
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder("llama", vocab_size=vocabulary), "m")
    held = json.loads(Path("m/tokenizer_config.json").read_text()) | {"eos_token": eos, "bos_token": bos}
    Path("m/tokenizer_config.json").write_text(json.dumps(held))
    tree = tiny_settings(tmp_path, tmp_path / "m", corpus)
    tree["train"] |= {"steps": 1, "warmup_steps": 0}
    Path("c.yaml").write_text(json.dumps(tree))
    commands = [["init", corpus, "m", "--out", "i.yaml", "--length", "64"], ["prepare", "c.yaml", "--out", "store"]]
    for command in [*commands, ["train", "c.yaml"]]:
        told = call(*command)
        assert told.exit_code == (2 if said.startswith("the") else 0), told.output
        assert said in told.output
        assert said or "warning" not in told.output


@pytest.mark.parametrize("name", ["demo", "demo.yaml", "configs/demo.yaml", "paper/llama2-7b-64k-anchor"])
def test_shipped_configs_have_names_anywhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert load_config(name).pack.variant == "anchor"
    told = call("config", "demos")
    assert "config demos: no such file" in told.stderr
    (tmp_path / "demo").write_text("run: {folder: mine}\n")
    if name == "demo":
        assert "config demo: model: missing" in call("config", name).stderr, "a user's own file comes first"


@pytest.mark.parametrize("module", ["torchtrain.cli", "jaxref.cli", "parity_tests.cli"])
def test_version(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command", "--version"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main()
    assert not ended.value.code
    assert re.fullmatch(r"\S+ \d+\.\d+\.\d+\n", capsys.readouterr().out)


REFUSED = [
    (["train", "{config}"], "already holds a run"),
    (["train", "{config}", "run.folder=other", "model.source=no/such/model"], "no folder with a config.json here"),
    (["init", "{config}", "/no", "--out", "a.yaml"], "MODEL '/no': no folder with a config.json here"),
    (["evaluate", "/no"], "RUN_OR_FOLDER '/no': no folder with a config.json here"),
    (["init", "nothing", "model"], "DATA 'nothing': no such file or folder"),
    (["init", "{config}", "model", "--out", "{config}"], "exists; choose another name"),
]
WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from torchtrain.cli import main
for sys.argv[1:] in json.loads(sys.argv[1]):
    try: main()
    except SystemExit as ended: print(ended.code, file=sys.stderr)
"""


def test_what_costs_nothing_to_check_is_refused_before_torch_is_imported(tree, write_config):
    folder = Path(tree["run"]["folder"])
    folder.mkdir()
    (folder / "run.json").write_text('{"made_by": "torchtrain train"}')
    config = write_config(tree)
    given = json.dumps([[word.format(config=config) for word in command] for command, _ in REFUSED])
    told = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, given], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    *answers, end = told.stderr.split("\n2\n")
    assert end == ""
    for answer, (command, message) in zip(answers, REFUSED, strict=True):
        assert message in answer, command


@pytest.mark.parametrize("verb", ["train", "config", "plan"])
def test_a_config_of_prepare_is_called_that(tmp_path, verb):
    text = "tokenizer: {source: m}\ndata: {sources: [{files: a.jsonl}]}\nprepare: {workers: 2}\n"
    (tmp_path / "p.yaml").write_text(text)
    told = call(verb, tmp_path / "p.yaml")
    assert told.exit_code == 2
    assert "p.yaml: is one of `torchtrain prepare`: it has tokenizer, prepare; give it to that" in told.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--help", "train.betas"], "default: [0.9, 0.95]"),
        (["--explain"], "\ntrain.betas: "),
        (["--explain"], "\nprepare.workers: "),
        ([], "\ndata.sources.N.files: "),
    ],
)
def test_config_explains_one_setting_or_lists_all(monkeypatch, capsys, words, told):
    monkeypatch.setattr(sys, "argv", ["torchtrain", "config", *words])
    with pytest.raises(SystemExit):
        main()
    assert told in capsys.readouterr().out


# --- a system that lacks what only Linux has --------------------------------------------------------------------------


LINUX_ONLY = ("O_TMPFILE", "posix_fadvise", "POSIX_FADV_RANDOM", "sched_getaffinity", "sched_setaffinity")

TRAIN_ELSEWHERE = f"""
import os, pathlib, shutil, signal, sys
for name in {LINUX_ONLY!r}: delattr(os, name)
del signal.SIGHUP
read_text = pathlib.Path.read_text
def read(path, *rest, **more):
    if str(path).startswith(("/proc", "/sys")): raise FileNotFoundError(str(path))
    return read_text(path, *rest, **more)
pathlib.Path.read_text = read
from torchtrain.cli import app
config, run = sys.argv[1:]
given = ["train.steps=2", "model.activation_checkpointing=auto", f"run.folder={{run}}"]
app(["train", config, *given], standalone_mode=False)
os.unlink(f"{{run}}/outputs.json")  # as if it had been interrupted
shutil.rmtree(f"{{run}}/model")
app(["resume", run], standalone_mode=False)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE") or not hasattr(signal, "SIGHUP"), reason="not Linux")
def test_train_and_resume_need_nothing_that_only_linux_has(place, tmp_path):
    command = [sys.executable, "-c", TRAIN_ELSEWHERE, str(place.config), str(tmp_path / "run")]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_system_without_file_locks_is_told_what_to_do(tmp_path):
    """Windows has no `fcntl`: importing works, and a run is refused in one line."""
    code = "import pathlib, sys; sys.modules['fcntl'] = None; from torchtrain.run.lock import hold\n"
    code += f"with hold(pathlib.Path({str(tmp_path / '.lock')!r})): pass"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(r"run\.folder.*WSL", told.stderr.splitlines()[-1])
