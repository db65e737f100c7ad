"""Run the scripts of NVIDIA/RULER and our tasks, and count the prompts and answers that are identical.

    python -m benchmarks.ruler_reference CLONE

CLONE is a git clone of github.com/NVIDIA/RULER. Its scripts run unchanged, in this process, with our tokenizer, words,
haystack and sentences, and questions about the haystack. In the last column ours have one token more: they count the
anchor, and NVIDIA's do not.
"""

import argparse
import io
import itertools
import json
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml
from nltk.tokenize.punkt import PunktSentenceTokenizer
from wonderwords import random_word

from torchtrain.evaluation.suite import IN_2024, TASKS, load_suite
from torchtrain.evaluation.tasks.materials import Materials
from torchtrain.evaluation.tasks.ruler import make_samples, prompt_of
from torchtrain.modeling.source import open_tokenizer, resolve_source

ROOT = Path(__file__).resolve().parents[1]
LENGTHS, SAMPLES = (1024, 4096), 10
NOUNS = 100  # the first alone, because each script sorts all their pairs with adjectives
DOCUMENTS, WORDS = 300, 25  # of the questions; so short that ten documents fit into 1,024 tokens
MANIFESTS = ("manifest_utils", "nemo.collections.asr.parts.utils.manifest_utils")
Samples = list[dict[str, Any]]


def main() -> None:
    """Print a line for each commit, task and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--commits", default="5973c2a,c3f5e3b", help="default: of October 2024 and July 2026")
    parser.add_argument("--tasks", default=",".join([*TASKS, *IN_2024]))
    given = parser.parse_args()
    read = random_word._get_words_from_text_file
    random_word._get_words_from_text_file = lambda file: read(file)[: NOUNS if file == "nounlist.txt" else None]
    del random_word._DEFAULT_CATEGORIES[random_word.Defaults.NOUNS][NOUNS:]
    with tempfile.TemporaryDirectory() as temporary:
        questions = [f"{name}={temporary}/{name}.json" for name in ("squad", "hotpotqa")]
        suite = load_suite(ROOT / "configs/eval/ruler.yaml", questions)
        materials = Materials(suite)
        _write_materials(Path(temporary), materials.haystack)
        tokenizer = open_tokenizer(resolve_source("smollm2", suite.cache, needs="tokenizer"))
        print("| commit | task | tokens | identical | identical without the anchor |\n|---|---|---|---|---|")
        scripts = {commit: _check_out(given.clone, commit, Path(temporary)) for commit in given.commits.split(",")}
        for commit, task, length in itertools.product(scripts, given.tasks.split(","), LENGTHS):
            theirs = _theirs(scripts[commit], IN_2024.get(task, task), length, suite.seed, tokenizer)
            settings = (SAMPLES, suite.seed, tokenizer, materials)
            same, alike = (_identical(theirs, make_samples(task, most, *settings)) for most in (length, length + 1))
            print(f"| {commit} | {task} | {length:,} | {same} of {SAMPLES} | {alike} |", flush=True)


def _identical(theirs: Samples, ours: Samples) -> int:
    made = [(of["input"] + of.get("answer_prefix", ""), of["outputs"]) for of in theirs]
    return sum(one == (prompt_of(of), of["outputs"]) for one, of in zip(made, ours, strict=False))


def _write_materials(folder: Path, words: list[str]) -> None:
    """Write the haystack, and questions about it in the layouts of the published files."""
    texts = [" ".join(words[start : start + WORDS]) for start in range(0, DOCUMENTS * WORDS, WORDS)]
    squad, hotpotqa = [], []
    for index, text in enumerate(texts):
        asked = {"question": f"How does text {index} end?", "answers": [{"text": text[-9:]}], "is_impossible": False}
        squad.append({"context": text, "qas": [asked]})
        context = [[f"Text {at % DOCUMENTS}", [texts[at % DOCUMENTS]]] for at in range(index, index + 9)]
        hotpotqa.append({"question": asked["question"], "answer": text[-9:], "context": context})
    parts = [{"paragraphs": squad[start : start + 15]} for start in range(0, DOCUMENTS, 15)]
    contents = {"squad": {"data": parts}, "hotpotqa": hotpotqa, "PaulGrahamEssays": {"text": " ".join(words)}}
    # A clone may hold a pointer alone. The scripts take these where a list needs more words than there are.
    contents["english_words"] = {index: f"word{index}" for index in range(5000)}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def _check_out(clone: Path, commit: str, folder: Path) -> Path:
    """Write a commit's scripts into a folder, with our materials where they look for theirs."""
    command = ["git", "-C", str(clone), "archive", f"--prefix={commit}/", commit, "scripts"]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    for path in folder.glob("*.json"):
        shutil.copy(path, folder / commit / "scripts/data/synthetic/json")
    return folder / commit / "scripts"


def _theirs(scripts: Path, task: str, length: int, seed: int, tokenizer: Any) -> Samples:
    """Return the samples of NVIDIA's script, called with the arguments that its prepare.py gives it."""
    settings = yaml.safe_load((scripts / "synthetic.yaml").read_text())[task]
    kind = runpy.run_path(str(scripts / "data/synthetic/constants.py"))["TASKS"][settings["task"]]
    given = settings["args"] | {"save_dir": scripts, "save_name": task, "tokenizer_path": "", "random_seed": seed}
    given |= {"max_seq_length": length, "num_samples": SAMPLES, "tokens_to_generate": kind["tokens_to_generate"]}
    given["template"] = kind["template"] + kind["answer_prefix"]
    written: Samples = []
    manifest = SimpleNamespace(write_manifest=lambda _, made: written.extend(made), read_manifest=None)
    stubs: dict[str, Any] = dict.fromkeys(MANIFESTS, manifest)
    stubs["tokenizer"] = SimpleNamespace(select_tokenizer=lambda *_: SimpleNamespace(text_to_tokens=tokenizer.tokenize))
    stubs["nltk.tokenize"] = SimpleNamespace(sent_tokenize=PunktSentenceTokenizer().tokenize)
    script = scripts / "data/synthetic" / f"{settings['task']}.py"
    command = [str(script), *(str(part) for name, value in given.items() for part in (f"--{name}", value))]
    sys.modules.pop("constants", None)
    quiet = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    patched = mock.patch.multiple(sys, argv=command, path=[str(script.parent), *sys.path], **quiet)
    with mock.patch.dict(sys.modules, stubs), patched:
        runpy.run_path(str(script), run_name="__main__")
    return written


if __name__ == "__main__":
    main()
