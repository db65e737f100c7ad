"""RULER's tasks for lm-eval, made by the generators of the installed lm-eval. This file corrects what those do
differently from RULER; docs/evaluation.md lists the differences.

Each task is seeded alone, as in NVIDIA's scripts. The length of a prompt includes the prefix of the answer, the special
tokens, one token of anchor, and the tokens of the answer.

lm-eval can run these tasks itself:

    lm_eval --model hf --model_args pretrained=FOLDER,max_length=4096 --include_path FOLDER_OF_THIS_FILE --tasks cwe \\
        --metadata '{"length": 4096, "suite": "configs/eval/ruler.yaml"}'
"""

import hashlib
import importlib
import io
import json
import math
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from anchorline.environment import version, versions
from anchorline.errors import UserError, disk_fault
from anchorline.files import expand, replace_file
from torchtrain.data.identity import tokenizer_digest
from torchtrain.evaluation.suite import load_suite, room_of
from torchtrain.evaluation.tasks.materials import CannotRunError, Materials, quiet_library

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Sample = dict[str, Any]
Make = Callable[[int], tuple[str, list[str]]]  # from a size to a prompt with the prefix of its answer, and the answers

_VERSION = "0.4.13"  # of lm-eval
_MOST_LENGTH_TRIED, _LENGTH_STEP = 4096, 128  # when the least length of a task is searched
_QUESTION = re.compile(r"(?s:.*)\nWhat (is|are all) the special magic (\S+) for (.+?) mentioned in the provided text\?")
_EXAMPLE_TOKENS = 500  # of vt's solved example, at most
_HOPS, _CHAINS = 4, 1
_ATTEMPTS = 20  # at the smallest size, because samples of one size differ by a few tokens
_PLACEHOLDER = "12345"
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class _NoRoomError(Exception):
    """No sample fits into the length."""


def prompt_of(sample: Sample) -> str:
    """Return what the model reads: the question, and the prefix of its answer."""
    return f"{sample['input']} {sample['gen_prefix']}"


def score(doc: Sample, results: list[str]) -> dict[str, float]:
    """Return RULER's score: the share of answers in the model's text, any case; of a question (qa) one is enough."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred

    text = postprocess_pred(results)[0].lower()
    hits = [answer.lower() in text for answer in doc["outputs"]]
    return {"score": float(any(hits)) if doc["any"] else sum(hits) / len(hits)}


def load_samples(**metadata: Any) -> dict[str, Any]:
    """Return the samples of a task as lm-eval expects a data set: `custom_dataset` of the YAML files.

    metadata: `ruler` (the task), `length`, `suite` (a YAML file), `pretrained` (a model), and `samples`, which
        overrides the suite's.
    Raises UserError: one of them is missing, or as `open_samples`.
    """
    from torchtrain.modeling.source import open_tokenizer, resolve_source

    task = metadata["ruler"]
    if lacks := [name for name in ("pretrained", "length", "suite") if not metadata.get(name)]:
        raise UserError(f"{task}: {lacks[0]} is not in --metadata or --model_args; add it")
    suite = load_suite(metadata["suite"], [f"samples={metadata['samples']}"] if "samples" in metadata else [])
    tokenizer = open_tokenizer(resolve_source(metadata["pretrained"], suite.cache, needs="tokenizer"))
    try:
        return as_dataset(open_samples(task, int(metadata["length"]), tokenizer, Materials(suite))[0])
    except CannotRunError as error:
        raise UserError(f"{task}: {error}") from None


def as_dataset(samples: list[Sample]) -> dict[str, Any]:
    """Return samples as lm-eval expects a data set."""
    import datasets

    return {"test": datasets.Dataset.from_list(samples, split=datasets.Split.TEST)}


def open_samples(
    task: str, length: int, tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> tuple[list[Sample], dict[str, Any]]:
    """Return a task's samples, from the suite's cache if it has them, and all settings that they depend on. Raises as
    `make_samples`; and UserError: the cache is damaged or cannot be written.
    """
    suite = materials.suite
    identity = {
        "task": task,
        "length": length,
        "samples": suite.samples,
        "seed": suite.seed,
        "chat_template": suite.chat_template,
        "tokenizer": tokenizer_digest(tokenizer),
        "materials": materials.identity(task),
        "versions": versions(("anchorline", "lm_eval", "wonderwords", "nltk", "numpy")),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = expand(suite.cache) / "ruler" / f"{task}-{length}-{digest}.jsonl"
    if path.is_file():
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line], identity
        except (OSError, ValueError):
            raise UserError(f"cache: {path} is damaged; remove it, and its samples are made again") from None
    samples = make_samples(task, length, suite.samples, suite.seed, tokenizer, materials)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples).encode())
    except OSError as error:
        raise UserError(f"cache: {disk_fault(error)}; choose a folder that can be written") from None
    return samples, identity


def make_samples(
    task: str, length: int, samples: int, seed: int, tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> list[Sample]:
    """Make samples of one task, each at most `length` tokens with the room for its answer (fwe_2024_10: without).

    The first n samples do not depend on how many are made. Questions (qa) whose own documents do not fit are left out.
    Returns samples: `index`, `input`, `gen_prefix`, `outputs` (the answers), `any` (whether one answer is enough),
    `length` (tokens of prompt, anchor and answer), `max_length`. Raises CannotRunError: the task's material is not set,
    or the length leaves no room; the message has the least length. Raises UserError: lm-eval is missing or another
    version, or the haystack is too short.
    """
    if "haystack" in materials.identity(task) and len(materials.haystack) < length:
        raise UserError(
            f"haystack: {len(materials.haystack):,} words are too few for a length of {length:,} tokens; give more text"
        )
    more = 1  # token of anchor
    if materials.suite.chat_template:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        more += len(tokenizer(str(tokenizer.apply_chat_template(turns, tokenize=False))).input_ids)

    def make(length: int, samples: int) -> list[Sample] | None:
        try:
            with library(seed) as lm:
                return _make(_Wanted(task, length, samples, seed, tokenizer, more, lm, materials))
        except _NoRoomError:
            return None

    if (made := make(length, samples)) is not None:
        return made
    longer = range(length // _LENGTH_STEP * _LENGTH_STEP + _LENGTH_STEP, _MOST_LENGTH_TRIED + 1, _LENGTH_STEP)
    least = bisect_left(longer, True, key=lambda tried: make(tried, 1) is not None)
    if least < len(longer):
        raise CannotRunError(f"{length:,} tokens leave no room; it needs {longer[least]:,} with this tokenizer")
    raise CannotRunError(f"{length:,} tokens leave no room, and {_MOST_LENGTH_TRIED:,} neither with this tokenizer")


class _Library:
    """lm-eval's modules of RULER. Each is imported when it is first used, because prepare_niah takes 8 seconds."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"lm_eval.tasks.ruler.{name}" + "_utils" * (name != "prepare_niah"))


@contextmanager
def library(seed: int = 42) -> Iterator[_Library]:
    """Yield lm-eval's modules of RULER, seeded. They print nothing, do not use the network, and leave the process's
    generators as they were. Raises UserError: another version of lm-eval is installed, or a package is missing.
    """
    if version("lm_eval") != _VERSION:
        raise UserError(
            f"RULER needs lm_eval {_VERSION}, whose generators make its samples: pip install lm_eval=={_VERSION}"
        )
    lm, states = _Library(), (random.getstate(), np.random.get_state())
    try:
        with quiet_library(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), patch("nltk.download"):
            random.seed(seed)
            np.random.seed(seed)
            with patch.multiple(lm.fwe, SEED=seed), patch.multiple(lm.qa, SEED=seed):
                yield lm
    except ImportError as error:
        raise UserError(f"RULER needs the package {error.name}: pip install 'anchorline[eval]'") from None
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@dataclass(frozen=True)
class _Wanted:
    """The samples to make: arguments of `make_samples`, tokens that a prompt has besides its text, and lm-eval."""

    task: str
    length: int
    samples: int
    seed: int
    tokenizer: Any  # a quoted type cannot be resolved where lm-eval loads this file by its path
    more: int
    lm: _Library
    materials: Materials

    @property
    def room(self) -> int:
        return room_of(self.task)

    def count(self, text: str) -> int:
        """Return the tokens of a whole prompt as the model reads it, special ones and one of anchor included."""
        return len(self.tokenizer(text, verbose=False).input_ids) + self.more

    def count_part(self, text: str) -> int:
        """Return the tokens of a part of a prompt, without special tokens and anchor."""
        return self.count(text) - self.count("")

    def counter(self, prefix_of: Callable[[str], str] = lambda text: text) -> Callable[[str], Any]:
        """Return a function that lm-eval can use as a tokenizer, to count a text with the prefix of its answer."""
        return lambda text: SimpleNamespace(input_ids=range(self.count(prefix_of(text))))


def _make(wanted: _Wanted) -> list[Sample]:
    task, room = wanted.task, wanted.room
    kind = next(name for name in _MAKERS if task.startswith(name))
    try:
        samples = _MAKERS[kind](wanted)
    except UserError:
        raise
    except ValueError:  # lm-eval could not make one sample
        raise _NoRoomError from None
    for sample in samples:
        sample |= {"any": kind == "qa", "max_length": wanted.length}
        sample["length"] = wanted.count(prompt_of(sample)) + room
        lacks = kind == "fwe" and any(word not in sample["input"] for word in sample["outputs"])
        if lacks or sample["length"] > wanted.length + (room if task == "fwe_2024_10" else 0):
            raise _NoRoomError
    return samples


def _sentences(kind: str, text: str) -> list[str]:
    import nltk
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    if kind == "untrained":
        return PunktSentenceTokenizer().tokenize(text)
    try:
        return nltk.sent_tokenize(text)
    except LookupError:
        raise UserError(
            "haystack.sentences 'english': NLTK's punkt_tab is not on this machine; fetch it with python -m "
            "nltk.downloader punkt_tab, or set it to untrained"
        ) from None


def _needles(wanted: _Wanted) -> list[Sample]:
    """Call lm-eval's function of the task with our tokenizer, haystack, number of samples and seed."""
    niah, prepare, materials = wanted.lm.niah, wanted.lm.prepare_niah, wanted.materials
    haystack, generate, stock = materials.suite.haystack, prepare.generate_samples, prepare.get_haystack
    own = {
        "TOKENIZER": wanted.counter(_with_needle_prefix),
        "num_samples": wanted.samples,
        "tokens_to_generate": wanted.room,
        "random_seed": wanted.seed,
    }
    changes = {
        "generate_samples": lambda *given, **settings: generate(*given, **settings | own),
        "get_haystack": lambda type_haystack: materials.haystack if type_haystack == "essay" else stock(type_haystack),
        "get_tokenizer": lambda _: None,
    }
    split = cache(partial(_sentences, "untrained" if haystack is None else haystack.sentences))
    with patch.multiple(niah, **changes), patch.multiple(prepare, cached_sent_tokenize=split):
        return getattr(niah, wanted.task)(max_seq_lengths=[wanted.length])["test"].to_list()


def _with_needle_prefix(text: str) -> str:
    """Append about as many tokens to a question as the prefix of its answer has."""
    match = _QUESTION.match(text)
    assert match is not None, "the template of niah ends with its question"
    verb, kind, query = match.groups()
    return f"{text} The special magic {kind} for {query} mentioned in the provided text {verb[:3].strip()}"


def _questions(wanted: _Wanted) -> list[Sample]:
    task, qa = wanted.task, wanted.lm.qa
    published, name, _ = wanted.materials.questions(task)
    # lm-eval caches its readers by the address of the file, and we give none: call the function below the cache.
    reader = (qa.read_squad if task == "qa_1" else qa.read_hotpotqa).__wrapped__
    with patch.multiple(qa, download_json=lambda _: published):
        try:
            questions, documents = reader("")
        except (TypeError, KeyError, ValueError, AttributeError):
            raise UserError(f"{task}: {name} is not in the layout of the published file; fetch that") from None
    for number, question in enumerate(questions, start=1):
        answers = question["outputs"]
        if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
            raise UserError(f"{task}: {name}: answered question {number}: has an empty answer; fetch the file again")
    if not questions:
        raise UserError(f"{task}: {name} holds no question with an answer; give the published file's")
    return qa.generate_samples(
        tokenizer=wanted.counter(lambda text: f"{text} {qa.CONFIG['answer_prefix']}"),
        docs=documents,
        qas=questions,
        max_seq_length=wanted.length,
        num_samples=min(wanted.samples, len(questions)),
        tokens_to_generate=wanted.room,
    )


def _frequent_words(wanted: _Wanted) -> list[Sample]:
    fwe, prompt = wanted.lm.fwe, wanted.length - (wanted.room if wanted.task == "fwe" else 0)
    if wanted.count(fwe.TEMPLATE.format(context="", query="")) > prompt or prompt < 4 * 50:
        raise _NoRoomError  # lm-eval would not end. It has a word for every 50 tokens, and asks for three words.
    return fwe.sys_kwext(tokenizer=wanted.counter(), max_seq_length=prompt, num_samples=wanted.samples)


def _common_words(wanted: _Wanted) -> list[Sample]:
    cwe = wanted.lm.cwe

    def shuffle(words: list[str]) -> None:
        # lm-eval keeps one generator, so that a sample depends on all samples before it.
        random.Random(wanted.seed).shuffle(words)

    def make(words: int) -> tuple[str, list[str]]:
        example, text, answers = cwe.generate_input_output(words, wanted.length)
        return f"{example}\n{text}", answers

    def tokens(words: int) -> int:
        text, answers = make(words)
        return wanted.count(text + " " + " ".join(f"{i + 1}. {word}" for i, word in enumerate(answers)))

    # lm-eval shuffles the vocabulary at import by the seed 42, as NVIDIA's script does by its seed.
    with patch.multiple(cwe, RNG=SimpleNamespace(shuffle=shuffle)):
        words = _largest_by_steps(tokens, wanted.room, wanted.length, 10, most=len(cwe.WORDS))
        return _samples_of(make, words, 10, wanted)


def _variables(wanted: _Wanted) -> list[Sample]:
    """Make samples of vt, or of vt_2024_10, which has one example for all samples and searches sizes by steps."""
    old, room, count_part = wanted.task == "vt_2024_10", wanted.room, wanted.count_part
    chain, largest = (_chain_2024, _largest_by_steps) if old else (_chain, _largest_by_halves)
    make = partial(chain, wanted.lm)
    make_example = partial(make, is_example=True)

    def tokens_by(make: Make, size: int) -> int:
        text, answers = make(size)
        return count_part(f"{text} {answers}" if old else text)

    step, more = 10 if old or wanted.length >= 4096 else 5, room if old else 0
    size = largest(partial(tokens_by, make_example), more, _EXAMPLE_TOKENS, 5)
    example, answers = _fitting(make_example, size, 5, count_part, _EXAMPLE_TOKENS - more)
    example = f"{example} {' '.join(answers)}\n" + "\n" * old
    size = largest(partial(tokens_by, make), count_part(example) + room, wanted.length - wanted.count(""), step)

    def make_whole(size: int) -> tuple[str, list[str]]:
        text, answers = make(size)
        return f" {example}\n\n{text}" if old else f"{_renamed(example)}\n{text}", answers

    return _samples_of(make_whole, size, step, wanted)


def _chain_2024(lm: _Library, size: int, is_example: bool = False) -> tuple[str, list[str]]:
    # lm-eval folds the template of an example into a line if it is not the task's own.
    with patch.multiple(lm.vt, TEMPLATE=f" {lm.vt.TEMPLATE}" if is_example else lm.vt.TEMPLATE):
        return lm.vt.generate_input_output(size, _CHAINS, _HOPS, is_icl=is_example)


def _chain(lm: _Library, size: int, is_example: bool = False) -> tuple[str, list[str]]:
    config, state = lm.vt.CONFIG["variable_tracking"], np.random.get_state()
    names, (chain,) = lm.vt.generate_chains(_CHAINS, _HOPS, is_icl=is_example)
    value = chain[0].rpartition(" ")[2]
    if is_example:  # NVIDIA does not draw its value
        np.random.set_state(state)
        chain[0] = chain[0].removesuffix(value) + _PLACEHOLDER
        value = _PLACEHOLDER
    lines = [_NOISE] * size
    for offset, (place, line) in enumerate(zip(sorted(random.sample(range(size), len(chain))), chain, strict=True)):
        lines.insert(place + offset, line)
    template = config["template"] + config["answer_prefix"].replace("assgined", "assigned")
    context = "\n".join(lines).replace(". \n", ".\n")
    return template.format(context=context, query=value, num_v=_HOPS + 1), names[0]


def _renamed(example: str) -> str:
    """Give an example of `vt` other names and another value, because one example serves all samples."""
    for name in example.split()[-_HOPS - 1 :]:
        example = example.replace(name, "".join(random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=len(name))))
    return example.replace(_PLACEHOLDER, str(np.random.randint(10000, 99999)))


def _largest_by_steps(tokens: Callable[[int], int], more: int, limit: int, step: int, most: float = math.inf) -> int:
    """Return the size that NVIDIA's scripts of 2024 choose: they add steps until a first sample does not fit."""
    size, total = step, 0
    while total + more < limit:
        total = tokens(size)
        if total + more > limit:
            return max(size - step, step)
        size += step
        if size > most:
            return int(most)
    return size


def _largest_by_halves(tokens: Callable[[int], int], more: int, limit: int, step: int) -> int:
    """Return the size that NVIDIA's scripts choose since June 2025: they bisect, from a first guess."""
    low, best = step, step
    high = max(int(limit / (tokens(step) / step) * 3), 2 * step)
    while low <= high:
        size = (low + high) // 2
        if tokens(size) + more <= limit:
            best, low = size, size + 1
        else:
            high = size - 1
    return best


def _samples_of(make: Make, size: int, step: int, wanted: _Wanted) -> list[Sample]:
    samples = []
    for index in range(wanted.samples):
        prompt, answers = _fitting(make, size, step, wanted.count, wanted.length - wanted.room)
        question, _, prefix = prompt.rpartition(" Answer: ")
        samples.append({"index": index, "input": question, "gen_prefix": f"Answer: {prefix}", "outputs": answers})
    return samples


def _fitting(make: Make, size: int, step: int, count: Callable[[str], int], limit: int) -> tuple[str, list[str]]:
    """Make a sample of this size, or of the next smaller one whose prompt has at most `limit` tokens."""
    for _ in range(size // step + _ATTEMPTS):
        text, answers = make(size)
        if count(text) <= limit:
            return text, answers
        size = size - step if size > step else size
    raise _NoRoomError


_MAKERS = {"niah": _needles, "qa": _questions, "fwe": _frequent_words, "cwe": _common_words, "vt": _variables}
