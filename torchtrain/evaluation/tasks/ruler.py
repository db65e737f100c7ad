"""RULER's tasks for lm-eval, made by the generators of the installed lm-eval. This file mends where those differ from
RULER; docs/evaluation.md has the list.

Each task is seeded alone, as NVIDIA's scripts are. A prompt is counted as the model reads it: with the prefix of the
answer, the special tokens, one token of anchor, and room for the answer.

lm-eval itself runs them, too:

    lm_eval --model hf --model_args pretrained=FOLDER,max_length=4096 --include_path FOLDER_OF_THIS_FILE --tasks cwe \\
        --metadata '{"length": 4096, "suite": "configs/eval/ruler.yaml"}'
"""

import hashlib
import importlib
import io
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from anchorline.environment import versions
from anchorline.errors import UserError, disk_fault, quoted_reason
from anchorline.files import expand, replace_file
from torchtrain.data.prepare import tokenizer_identity
from torchtrain.evaluation.suite import load_suite, room_of
from torchtrain.evaluation.tasks.materials import CannotRunError, Materials

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Sample = dict[str, Any]
Count = Callable[[str], int]  # from a text to its tokens
Make = Callable[[int], tuple[str, list[str]]]  # from a size to a prompt with its answer's prefix, and the answers

_MOST_LENGTH_TRIED, _LENGTH_STEP = 4096, 128  # for the least length that a message names
_QUESTION = re.compile(r"(?s:.*)\nWhat (is|are all) the special magic (\S+) for (.+?) mentioned in the provided text\?")
_EXAMPLE_TOKENS = 500  # of vt's one-shot example, at most
_HOPS, _CHAINS = 4, 1
_ATTEMPTS = 20  # at the smallest size: samples of one size differ by a few tokens
_PLACEHOLDER = "12345"


def token_counter(tokenizer: "PreTrainedTokenizerFast", chat: bool = False) -> Count:
    """Return what counts the tokens of a whole prompt as the model reads it: special ones and one of anchor included.

    Args:
        tokenizer: the model's.
        chat: whether prompts go into its chat template.
    """
    more = 1
    if chat:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        more += len(tokenizer(str(tokenizer.apply_chat_template(turns, tokenize=False))).input_ids)
    return lambda text: len(tokenizer(text, verbose=False).input_ids) + more


def _as_tokenizer(count: Count, prefix_of: Callable[[str], str] = lambda text: text) -> Callable[[str], Any]:
    """Return what lm-eval takes for a tokenizer, to count a text together with its answer's prefix."""
    return lambda text: SimpleNamespace(input_ids=range(count(prefix_of(text))))


def prompt_of(sample: Sample) -> str:
    """Return what the model reads: the question, and the prefix of its answer."""
    return f"{sample['input']} {sample['gen_prefix']}"


def load_samples(**metadata: Any) -> dict[str, Any]:
    """Return the samples of a task as lm-eval takes a data set: `custom_dataset` of the YAML files.

    Args:
        metadata: `ruler` (the task), `length`, `suite` (a YAML file), `pretrained` (a model), and `samples`, which
            overrides the suite's.

    Raises:
        UserError: one of them is missing, or as `make_samples`.
    """
    from torchtrain.modeling.source import open_tokenizer, resolve_source

    if lacks := [name for name in ("pretrained", "length", "suite") if not metadata.get(name)]:
        raise UserError(f"{metadata['ruler']}: {lacks[0]} is not in --metadata or --model_args; add it")
    suite = load_suite(metadata["suite"], [f"samples={metadata['samples']}"] if "samples" in metadata else [])
    tokenizer = open_tokenizer(resolve_source(metadata["pretrained"], suite.cache, needs="tokenizer"))
    try:
        return as_dataset(open_samples(metadata["ruler"], int(metadata["length"]), tokenizer, Materials(suite))[0])
    except CannotRunError as error:
        raise UserError(f"{metadata['ruler']}: {error}") from None


def as_dataset(samples: list[Sample]) -> dict[str, Any]:
    """Return samples as lm-eval takes a data set."""
    import datasets

    return {"test": datasets.Dataset.from_list(samples, split=datasets.Split.TEST)}


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return RULER's score: the share of answers that the model's text contains, in upper case or lower.

    For a question (qa) it is whether the text contains any of them. lm-eval takes their share there, too.
    """
    from lm_eval.tasks.ruler.common_utils import postprocess_pred

    text = postprocess_pred(results)[0].lower()
    hits = [answer.lower() in text for answer in doc["outputs"]]
    return {"score": float(any(hits)) if doc["any"] else sum(hits) / len(hits)}


def open_samples(
    task: str, length: int, tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples of a task, made now if the suite's cache does not hold them, and what they depend on.

    Raises:
        CannotRunError: the task's material is not set, or the length leaves no room; the message has the least length.
        UserError: as `make_samples`; the cache is damaged or cannot be written.
    """
    suite = materials.suite
    identity = {
        "task": task,
        "length": length,
        "samples": suite.samples,
        "seed": suite.seed,
        "chat_template": suite.chat_template,
        "tokenizer": tokenizer_identity(tokenizer),
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
    made = make_samples(task, length, suite.samples, suite.seed, tokenizer, materials)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in made).encode())
    except OSError as error:
        raise UserError(f"cache: {disk_fault(error)}; choose a folder that can be written") from None
    return made, identity


def make_samples(
    task: str, length: int, samples: int, seed: int, tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> list[Sample]:
    """Make samples of one task, each at most `length` tokens with the room for its answer (fwe_2024_10: without).

    The first ones of many are those of few. Questions (qa) whose own documents leave no room are left out.

    Args:
        task: one of RULER's.
        length: tokens, prompt and answer together.
        samples: how many.
        seed: of this task alone.
        tokenizer: of the model.
        materials: haystack and questions.

    Returns:
        Of each: `index`, `input`, `gen_prefix`, `outputs` (the answers), `any` (whether one answer is enough), `length`
        (tokens of prompt, anchor and answer), `max_length`.

    Raises:
        CannotRunError: the task's material is not set, or the length leaves no room; the message has the least length.
        UserError: lm-eval is missing or another version, or the haystack is too short.
    """
    if "haystack" in materials.identity(task) and len(materials.haystack) < length:
        raise UserError(
            f"haystack: {len(materials.haystack):,} words are too few for a length of {length:,} tokens; give more text"
        )
    first = length // _LENGTH_STEP * _LENGTH_STEP + _LENGTH_STEP
    for tried in (length, *range(first, _MOST_LENGTH_TRIED + 1, _LENGTH_STEP)):
        try:
            made = _make(task, tried, samples if tried == length else 1, seed, tokenizer, materials)
        except _NoRoomError:
            continue
        if tried == length:
            return made
        raise CannotRunError(f"{length:,} tokens leave no room; it needs {tried:,} with this tokenizer")
    raise CannotRunError(f"{length:,} tokens leave no room, and {_MOST_LENGTH_TRIED:,} neither with this tokenizer")


class _NoRoomError(Exception):
    """No sample fits into a length."""


def _make(
    task: str, length: int, samples: int, seed: int, tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> list[Sample]:
    count, room = token_counter(tokenizer, materials.suite.chat_template), room_of(task)
    with library() as lm, _seeded(seed, lm):
        try:
            if task.startswith("niah"):
                made = _needles(lm, task, length, samples, seed, count, materials)
            elif task.startswith("qa"):
                made = _questions(lm, task, length, samples, count, materials)
            elif task.startswith("fwe"):
                made = _frequent_words(lm, length - room if task == "fwe" else length, samples, count)
            else:
                make = {"cwe": _common_words, "vt": _variables, "vt_2024_10": _variables_2024}[task]
                made = [_sample(index, *of) for index, of in enumerate(make(lm, length, samples, seed, count))]
        except (AttributeError, TypeError, KeyError) as error:
            raise UserError(
                f"{task}: lm-eval's generator is not the one of 0.4.13 ({quoted_reason(error)}); "
                "pip install lm_eval==0.4.13"
            ) from error
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise _NoRoomError from None
    for sample in made:
        sample |= {"any": task.startswith("qa"), "max_length": length}
        sample["length"] = count(prompt_of(sample)) + room
        lacks = task.startswith("fwe") and any(word not in sample["input"] for word in sample["outputs"])
        if lacks or sample["length"] > length + (room if task == "fwe_2024_10" else 0):
            raise _NoRoomError
    return made


@contextmanager
def library() -> Iterator[SimpleNamespace]:
    """Yield lm-eval's modules of RULER, which then print nothing and ask the network for nothing.

    Raises:
        UserError: a package is missing.
    """
    names = ("niah_utils", "prepare_niah", "vt_utils", "cwe_utils", "fwe_utils", "qa_utils")
    log = logging.getLogger("lm_eval")
    with ExitStack() as changes:
        changes.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)  # it warns of samples that it left out
        changes.enter_context(redirect_stdout(io.StringIO()))
        try:
            import nltk

            with _replaced(nltk, download=lambda *_, **__: False):
                modules = [importlib.import_module(f"lm_eval.tasks.ruler.{name}") for name in names]
        except ImportError as error:
            raise UserError(f"RULER needs the package {error.name}: pip install 'anchorline[eval]'") from None
        found = {name.removesuffix("_utils"): module for name, module in zip(names, modules, strict=True)}
        for name in ("prepare_niah", "fwe", "qa"):
            changes.enter_context(_replaced(found[name], tqdm=lambda items, **_: items))
        yield SimpleNamespace(**found)


@contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    """Give a module's names other values for the time of the block."""
    had = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(had)


@contextmanager
def _seeded(seed: int, lm: SimpleNamespace) -> Iterator[None]:
    """Seed what lm-eval draws from: the process's generators, and two constants. Put them back afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        with _replaced(lm.fwe, SEED=seed), _replaced(lm.qa, SEED=seed):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def sentence_splitter(kind: str) -> Callable[[str], list[str]]:
    """Return what splits a text into sentences, as `haystack.sentences` says.

    Raises:
        UserError: NLTK's data for English is not on this machine.
    """
    import nltk
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    if kind == "untrained":
        return PunktSentenceTokenizer().tokenize
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise UserError(
            "haystack.sentences 'english': NLTK's punkt_tab is not on this machine; fetch it with python -m "
            "nltk.downloader punkt_tab, or set it to untrained"
        ) from None
    return nltk.sent_tokenize


def _needles(
    lm: SimpleNamespace, task: str, length: int, samples: int, seed: int, count: Count, materials: Materials
) -> list[Sample]:
    """Call lm-eval's own function of the task, with our tokenizer, haystack, number of samples and seed."""
    made, generate = [], lm.prepare_niah.generate_samples
    haystack = materials.suite.haystack

    @cache
    def split(text: str) -> list[str]:
        return sentence_splitter("untrained" if haystack is None else haystack.sentences)(text)

    def get_haystack(type_haystack: str) -> Any:
        return materials.haystack if type_haystack == "essay" else lm.prepare_niah.get_haystack(type_haystack)

    def generate_samples(*given: Any, **settings: Any) -> list[Sample]:
        own = {"num_samples": samples, "TOKENIZER": _as_tokenizer(count, _with_needle_prefix), "random_seed": seed}
        made.extend(generate(*given, **{**settings, **own, "tokens_to_generate": room_of(task)}))
        return made

    changes = {"generate_samples": generate_samples, "get_haystack": get_haystack, "get_tokenizer": lambda _: None}
    with _replaced(lm.niah, **changes), _replaced(lm.prepare_niah, cached_sent_tokenize=split):
        getattr(lm.niah, task)(max_seq_lengths=[length])
    return made


def _with_needle_prefix(text: str) -> str:
    """Add to a question (and whatever follows it) about as much as the prefix of its answer will."""
    found = _QUESTION.match(text)
    assert found is not None, "the template of niah ends with its question"
    verb, kind, query = found.groups()
    return f"{text} The special magic {kind} for {query} mentioned in the provided text {verb[:3].strip()}"


def _questions(
    lm: SimpleNamespace, task: str, length: int, samples: int, count: Count, materials: Materials
) -> list[Sample]:
    published, name, _ = materials.questions(task)
    # The readers are cached by their address, which ours lack: the function below the cache is called.
    reader = (lm.qa.read_squad if task == "qa_1" else lm.qa.read_hotpotqa).__wrapped__
    with _replaced(lm.qa, download_json=lambda _: published):
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
    return lm.qa.generate_samples(
        tokenizer=_as_tokenizer(count, lambda text: f"{text} {lm.qa.CONFIG['answer_prefix']}"),
        docs=documents,
        qas=questions,
        max_seq_length=length,
        num_samples=min(samples, len(questions)),
        tokens_to_generate=room_of(task),
    )


def _frequent_words(lm: SimpleNamespace, prompt: int, samples: int, count: Count) -> list[Sample]:
    if count(lm.fwe.TEMPLATE.format(context="", query="")) > prompt or prompt < 4 * 50:
        raise _NoRoomError  # lm-eval would run for ever; it has a word for every 50 tokens, and asks for three
    return lm.fwe.sys_kwext(tokenizer=_as_tokenizer(count), max_seq_length=prompt, num_samples=samples)


def _common_words(
    lm: SimpleNamespace, length: int, samples: int, seed: int, count: Count
) -> list[tuple[str, list[str]]]:
    def shuffle(words: list[str]) -> None:
        random.Random(seed).shuffle(words)  # lm-eval keeps one generator, so that a sample depends on all before it

    def make(words: int) -> tuple[str, list[str]]:
        example, text, answers = lm.cwe.generate_input_output(words, length)
        return f"{example}\n{text}", answers

    def tokens(words: int) -> int:
        text, answers = make(words)
        return count(text + " " + " ".join(f"{i + 1}. {word}" for i, word in enumerate(answers)))

    # lm-eval shuffles the vocabulary at import by the seed 42, as NVIDIA's script does by its seed.
    with _replaced(lm.cwe, RNG=SimpleNamespace(shuffle=shuffle)):
        room = room_of("cwe")
        words = _largest(tokens, room, length, step=10, most=len(lm.cwe.WORDS))
        return [_fitting(make, words, 10, count, length - room) for _ in range(samples)]


def _variables_2024(
    lm: SimpleNamespace, length: int, samples: int, seed: int, count: Count
) -> list[tuple[str, list[str]]]:
    room = room_of("vt")

    def make(size: int, is_example: bool = False) -> tuple[str, list[str]]:
        # A template that is not the task's own is folded for the example. Since December 2024 lm-eval's is its own.
        with _replaced(lm.vt, TEMPLATE=f" {lm.vt.TEMPLATE}" if is_example else lm.vt.TEMPLATE):
            return lm.vt.generate_input_output(size, _CHAINS, _HOPS, is_icl=is_example)

    def tokens(size: int, is_example: bool = False) -> int:
        return plain("{} {}".format(*make(size, is_example)))

    plain = _without_special(count)
    make_example = partial(make, is_example=True)
    size = _largest(partial(tokens, is_example=True), room, _EXAMPLE_TOKENS, step=5)
    example, answers = _fitting(make_example, size, 5, plain, _EXAMPLE_TOKENS - room)
    example = f"{example} {' '.join(answers)}\n\n"
    size = _largest(tokens, room + plain(example), length - count(""), step=10)

    def make_whole(size: int) -> tuple[str, list[str]]:
        text, answers = make(size)
        return f" {example}\n\n{text}", answers

    return [_fitting(make_whole, size, 10, count, length - room) for _ in range(samples)]


def _variables(lm: SimpleNamespace, length: int, samples: int, seed: int, count: Count) -> list[tuple[str, list[str]]]:
    room, noise, config = room_of("vt"), lm.prepare_niah.get_haystack("repeat"), lm.vt.CONFIG["variable_tracking"]
    template = config["template"] + config["answer_prefix"].replace("assgined", "assigned")

    def make(size: int, is_example: bool = False) -> tuple[str, list[str]]:
        state = np.random.get_state()
        names, chains = lm.vt.generate_chains(_CHAINS, _HOPS, is_icl=is_example)
        value = chains[0][0].rpartition(" ")[2]
        if is_example:  # whose value NVIDIA does not draw
            np.random.set_state(state)
            chains[0][0] = chains[0][0].removesuffix(value) + _PLACEHOLDER
            value = _PLACEHOLDER
        lines = [noise] * size
        for chain in chains:
            places = sorted(random.sample(range(len(lines)), len(chain)))
            for offset, (place, line) in enumerate(zip(places, chain, strict=True)):
                lines.insert(place + offset, line)
        context = "\n".join(lines).replace(". \n", ".\n")
        return template.format(context=context, query=value, num_v=_HOPS + 1), names[0]

    make_example = partial(make, is_example=True)
    plain = _without_special(count)
    size = _most_by_halves(lambda size: plain(make_example(size)[0]), 0, _EXAMPLE_TOKENS, 5)
    example, answers = _fitting(make_example, size, 5, plain, _EXAMPLE_TOKENS)
    example = f"{example} {' '.join(answers)}\n"
    step = 10 if length >= 4096 else 5
    size = _most_by_halves(lambda size: plain(make(size)[0]), plain(example) + room, length - count(""), step)

    def make_whole(size: int) -> tuple[str, list[str]]:
        text, answers = make(size)
        return f"{_renamed(example)}\n{text}", answers

    return [_fitting(make_whole, size, step, count, length - room) for _ in range(samples)]


def _renamed(example: str) -> str:
    """Give an example of `vt` other names and another value, so that it tells nothing of the next one."""
    for name in example.split()[-_HOPS - 1 :]:
        example = example.replace(name, "".join(random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=len(name))))
    return example.replace(_PLACEHOLDER, str(np.random.randint(10000, 99999)))


def _sample(index: int, prompt: str, answers: list[str]) -> Sample:
    """Cut a prompt before the prefix of its answer."""
    question, _, prefix = prompt.rpartition(" Answer: ")
    return {"index": index, "input": question, "gen_prefix": f"Answer: {prefix}", "outputs": answers}


def _largest(tokens: Callable[[int], int], room: int, limit: int, step: int, most: float = math.inf) -> int:
    """Return the size that NVIDIA's scripts of 2024 find: it grows by steps until a first sample does not fit."""
    size, total = step, 0
    while total + room < limit:
        total = tokens(size)
        if total + room > limit:
            return max(size - step, step)
        size += step
        if size > most:
            return int(most)
    return size


def _most_by_halves(tokens: Callable[[int], int], more: int, limit: int, step: int) -> int:
    """Return the size that NVIDIA's scripts find since June 2025: by bisection, from a first guess."""
    low, best = step, step
    high = max(int(limit / (tokens(step) / step) * 3), 2 * step)
    while low <= high:
        size = (low + high) // 2
        if tokens(size) + more <= limit:
            best, low = size, size + 1
        else:
            high = size - 1
    return best


def _without_special(count: Count) -> Count:
    """Return what counts a part of a prompt: without special tokens and anchor."""
    return lambda text: count(text) - count("")


def _fitting(make: Make, size: int, step: int, count: Count, limit: int) -> tuple[str, list[str]]:
    """Make a sample of this size, or of the next smaller one whose prompt has at most `limit` tokens.

    Raises:
        _NoRoomError: none fits.
    """
    for _ in range(size // step + _ATTEMPTS):
        text, answers = make(size)
        if count(text) <= limit:
            return text, answers
        size = size - step if size > step else size
    raise _NoRoomError
