"""RULER's tasks for lm-eval, made by the generators of the installed lm-eval; this file mends where those differ from
RULER.

Each task is seeded alone, as NVIDIA's scripts are, and a prompt is counted as the model reads it: with the prefix of
the answer, the special tokens, one token of anchor, and room for the answer.

    niah_*, qa_1, qa_2   are lm-eval's, sample by sample; qa counts any of the references
    fwe                  leaves the room for the answer that NVIDIA's does since June 2025
    fwe_2024_10          leaves none, as before
    cwe                  has its one-shot example, which lm-eval drops; words are drawn as NVIDIA's script of 2024 does
    vt_2024_10           one example for all samples, its template folded to a line, as before 4 December 2024
    vt                   as since May 2025: one sentence of noise a line, a new example each time, "assigned"

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from anchorline.environment import versions
from anchorline.errors import UserError, disk_fault, quoted_reason
from anchorline.files import expand, replace_file
from torchtrain.data.prepare import tokenizer_identity
from torchtrain.evaluation.suite import Suite, load_suite, room_of
from torchtrain.evaluation.tasks.materials import NEEDS_HAYSTACK, CannotRunError, Materials

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Sample = dict[str, Any]

_CONTROL = re.compile(r"[\x00-\x1f]")
_MOST_LENGTH_TRIED, _LENGTH_STEP = 4096, 128  # for the least length that a message names
NEEDLES: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_2": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_3": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "uuids"},
    "niah_multikey_1": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_k": 4,
    },
    "niah_multikey_2": {"type_haystack": "needle", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "niah_multivalue": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_v": 4,
    },
    "niah_multiquery": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_q": 4,
    },
}
_QUESTION = re.compile(r"(?s:.*)\nWhat (is|are all) the special magic (\S+) for (.+?) mentioned in the provided text\?")
_EXAMPLE_TOKENS = 500  # of vt's one-shot example, at most
_HOPS, _CHAINS = 4, 1
_ATTEMPTS = 20  # at the smallest size: samples of one size differ by a few tokens
_PLACEHOLDER = "12345"


class PromptLengths:
    """Counts a prompt as the model will read it, in place of the tokenizer that lm-eval asks for `input_ids`.

    Args:
        tokenizer: the model's own.
        chat: whether prompts go into its chat template.
        prefix_of: from a text without the answer's prefix to the text with it.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        chat: bool = False,
        prefix_of: Callable[[str], str] = lambda text: text,
    ) -> None:
        self._tokenizer, self._prefix_of, self._chat = tokenizer, prefix_of, 0
        if chat:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
            self._chat = len(tokenizer(str(tokenizer.apply_chat_template(turns, tokenize=False))).input_ids)

    def with_prefix(self, prefix_of: Callable[[str], str]) -> "PromptLengths":
        """Return the same counts for texts that still lack the prefix of their answer."""
        found = PromptLengths(self._tokenizer, prefix_of=prefix_of)
        found._chat = self._chat
        return found

    def count(self, prompt: str) -> int:
        """Return the tokens of a whole prompt, special ones and one of anchor with them."""
        return len(self._tokenizer(prompt, verbose=False).input_ids) + 1 + self._chat

    def __call__(self, text: str) -> SimpleNamespace:
        """Return what has as many `input_ids` as a text with its answer's prefix has tokens."""
        return SimpleNamespace(input_ids=range(self.count(self._prefix_of(text))))


def prompt_of(sample: Mapping[str, Any]) -> str:
    """Return what the model reads: the question, and the prefix of its answer."""
    return f"{sample['input']} {sample['gen_prefix']}"


def load_samples(**metadata: Any) -> dict[str, Any]:
    """Return the samples of a task as lm-eval takes a data set: `custom_dataset` of the YAML files.

    Args:
        metadata: `ruler` (the task), `length`, `suite` (a YAML file, or a Suite), `tokenizer` or `pretrained` (a model,
            or a tokenizer); `samples` overrides the suite's.

    Raises:
        UserError: one of them is missing, or as `make_samples`.
    """
    import datasets

    from torchtrain.modeling.source import open_tokenizer, resolve_source

    task: str = metadata["ruler"]
    source: Any = metadata.get("tokenizer") or metadata.get("pretrained")
    for name, value in (("pretrained", source), ("length", metadata.get("length")), ("suite", metadata.get("suite"))):
        if not value:
            raise UserError(f"{task}: {name} is not in --metadata or --model_args; add it")
    suite: Any = metadata["suite"]
    if not isinstance(suite, Suite):
        suite = load_suite(suite, [f"samples={metadata['samples']}"] if "samples" in metadata else [])
    if isinstance(source, str):
        source = open_tokenizer(resolve_source(source, suite.cache, needs="tokenizer"))
    try:
        made = open_samples(task, int(metadata["length"]), source, Materials(suite))[0]
    except CannotRunError as error:
        raise UserError(f"{task}: {error}") from None
    return {"test": datasets.Dataset.from_list(made, split=datasets.Split.TEST)}


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return RULER's score: the share of answers that stand in what the model said, upper case or not.

    Of a question (qa) it is whether any of them does; lm-eval averages over them.
    """
    text = _CONTROL.sub("\n", results[0].strip()).strip().lower()
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
        UserError: lm-eval is missing or another, or the haystack is too short.
    """
    materials.identity(task)
    if task in NEEDS_HAYSTACK and len(materials.haystack) < length:
        raise UserError(
            f"haystack: {len(materials.haystack):,} words are too few for a length of {length:,} tokens; give more text"
        )
    try:
        return _make(task, length, samples, seed, tokenizer, materials)
    except _NoRoomError:
        pass
    for longer in range(length // _LENGTH_STEP * _LENGTH_STEP + _LENGTH_STEP, _MOST_LENGTH_TRIED + 1, _LENGTH_STEP):
        try:
            _make(task, longer, 1, seed, tokenizer, materials)
        except _NoRoomError:
            continue
        raise CannotRunError(f"{length:,} tokens leave no room; it needs {longer:,} with this tokenizer")
    raise CannotRunError(f"{length:,} tokens leave no room, and {_MOST_LENGTH_TRIED:,} neither with this tokenizer")


class _NoRoomError(Exception):
    """No sample fits into a length."""


def _make(
    task: str, length: int, samples: int, seed: int, tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> list[Sample]:
    lengths, room = PromptLengths(tokenizer, materials.suite.chat_template), room_of(task)
    with library() as lm, _seeded(seed, lm):
        try:
            if task in NEEDLES:
                made = _needles(lm, task, length, samples, seed, lengths, materials)
            elif task in ("qa_1", "qa_2"):
                made = _questions(lm, task, length, samples, lengths, materials)
            elif task in ("fwe", "fwe_2024_10"):
                made = _frequent_words(lm, length - room if task == "fwe" else length, samples, lengths)
            elif task == "cwe":
                made = _common_words(lm, length, samples, seed, lengths)
            else:
                made = _variables(lm, length, samples, lengths, now=task == "vt")
        except UserError:
            raise
        except (AttributeError, TypeError, KeyError) as error:
            raise UserError(
                f"{task}: lm-eval's generator is not the one of 0.4.13 ({quoted_reason(error)}); "
                "pip install lm_eval==0.4.13"
            ) from error
        except ValueError:
            raise _NoRoomError from None
    for sample in made:
        assert all(answer.strip() for answer in sample["outputs"] or [""]), "an empty one stands in whatever is said"
        sample |= {"any": task in ("qa_1", "qa_2"), "max_length": length}
        sample["length"] = lengths.count(prompt_of(sample)) + room
        lacks = task.startswith("fwe") and any(word not in sample["input"] for word in sample["outputs"])
        if lacks or sample["length"] > length + (room if task == "fwe_2024_10" else 0):
            raise _NoRoomError
    return made


@contextmanager
def library() -> Iterator[SimpleNamespace]:
    """Yield lm-eval's modules of RULER, imported (10 seconds, once) without asking the network for anything.

    Raises:
        UserError: a package is missing.
    """
    try:
        import nltk

        # It says that it downloaded what it did not.
        with _replaced(nltk, download=lambda *_, **__: False), redirect_stdout(io.StringIO()):
            names = ("niah_utils", "prepare_niah", "vt_utils", "cwe_utils", "fwe_utils", "qa_utils")
            found = {name: importlib.import_module(f"lm_eval.tasks.ruler.{name}") for name in names}
    except ImportError as error:
        raise UserError(f"RULER needs the package {error.name}: pip install 'anchorline[eval]'") from None
    quiet, log = {"tqdm": lambda items, **_: items}, logging.getLogger("lm_eval")
    with ExitStack() as changes:
        changes.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)  # it tells what it left out
        for name in ("prepare_niah", "fwe_utils", "qa_utils"):
            changes.enter_context(_replaced(found[name], **quiet))
        yield SimpleNamespace(**{name.removesuffix("_utils"): module for name, module in found.items()})


@contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    """Give a module's names other values for the time of the block."""
    had = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in had.items():
            setattr(module, name, value)


@contextmanager
def _seeded(seed: int, lm: SimpleNamespace) -> Iterator[None]:
    """Seed what lm-eval draws from, which is the process's and two constants, and put back what it was."""
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
    lm: SimpleNamespace,
    task: str,
    length: int,
    samples: int,
    seed: int,
    lengths: PromptLengths,
    materials: Materials,
) -> list[Sample]:
    settings, changes = NEEDLES[task], {}
    if settings["type_haystack"] == "essay":
        haystack = materials.haystack
        assert materials.suite.haystack is not None
        split, known = sentence_splitter(materials.suite.haystack.sentences), {}

        def sentences(text: str) -> list[str]:
            return known[text] if text in known else known.setdefault(text, split(text))

        changes["cached_sent_tokenize"] = sentences
    else:
        haystack = lm.prepare_niah.get_haystack(type_haystack=settings["type_haystack"])
    with _replaced(lm.prepare_niah, **changes):
        return lm.prepare_niah.generate_samples(
            haystack,
            TOKENIZER=lengths.with_prefix(_with_needle_prefix),
            max_seq_length=length,
            template=lm.niah.TEMPLATE,
            num_samples=samples,
            tokens_to_generate=room_of(task),
            random_seed=seed,
            **settings,
        )


def _with_needle_prefix(text: str) -> str:
    """Add to a question (and whatever follows it) about as much as the prefix of its answer will."""
    found = _QUESTION.match(text)
    assert found is not None, "the template of niah ends with its question"
    verb, kind, query = found.groups()
    return f"{text} The special magic {kind} for {query} mentioned in the provided text {verb[:3].strip()}"


def _questions(
    lm: SimpleNamespace,
    task: str,
    length: int,
    samples: int,
    lengths: PromptLengths,
    materials: Materials,
) -> list[Sample]:
    published, name, _ = materials.questions(task)
    # The readers are cached by their address, of which ours are none: what is under `cache` is called.
    reader = (lm.qa.read_squad if task == "qa_1" else lm.qa.read_hotpotqa).__wrapped__
    with _replaced(lm.qa, download_json=lambda _: published):
        try:
            questions, documents = reader("")
        except (TypeError, KeyError, ValueError, AttributeError):
            raise UserError(f"{task}: {name} is not in the layout of the published file; fetch that") from None
    if not questions:
        raise UserError(f"{task}: {name} holds no question with an answer; give the published file's")
    for number, question in enumerate(questions, start=1):
        answers = question["outputs"]
        if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
            raise UserError(f"{task}: {name}: answered question {number}: has an empty answer; fetch the file again")
    return lm.qa.generate_samples(
        tokenizer=lengths.with_prefix(lambda text: f"{text} {lm.qa.CONFIG['answer_prefix']}"),
        docs=documents,
        qas=questions,
        max_seq_length=length,
        num_samples=min(samples, len(questions)),
        tokens_to_generate=room_of(task),
    )


def _frequent_words(lm: SimpleNamespace, prompt: int, samples: int, lengths: PromptLengths) -> list[Sample]:
    if lengths.count(lm.fwe.TEMPLATE.format(context="", query="")) > prompt or prompt < 4 * 50:
        raise _NoRoomError  # lm-eval would go on for ever; it has a word for every 50 tokens, and asks for three
    return lm.fwe.sys_kwext(tokenizer=lengths, max_seq_length=prompt, num_samples=samples)


def _common_words(lm: SimpleNamespace, length: int, samples: int, seed: int, lengths: PromptLengths) -> list[Sample]:
    def shuffle(words: list[str]) -> None:
        random.Random(seed).shuffle(words)  # lm-eval goes on with one generator, so that a sample depends on all before

    def make(words: int) -> tuple[str, list[str]]:
        example, text, answers = lm.cwe.generate_input_output(words, length)
        return f"{example}\n{text}", answers

    # lm-eval shuffles the vocabulary at import by the seed 42, as NVIDIA's script does by its seed.
    with _replaced(lm.cwe, RNG=SimpleNamespace(shuffle=shuffle)):
        room = room_of("cwe")

        def tokens(words: int) -> int:
            text, answers = make(words)
            return lengths.count(text + " " + " ".join(f"{i + 1}. {word}" for i, word in enumerate(answers)))

        words = _largest(tokens, room, length, step=10, most=len(lm.cwe.WORDS))
        return [
            _sample(index, *_fitting(make, words, 10, lambda text: lengths.count(text) + room <= length))
            for index in range(samples)
        ]


def _variables(lm: SimpleNamespace, length: int, samples: int, lengths: PromptLengths, now: bool) -> list[Sample]:
    room = room_of("vt")

    def fits(prompt: str) -> bool:
        return lengths.count(prompt) + room <= length

    if now:
        make = _variables_now(lm)
        example, answers = _fitting(
            lambda size: make(size, True),
            _most_by_halves(lambda size: lengths.count(make(size, True)[0]), _EXAMPLE_TOKENS, 5),
            5,
            lambda text: lengths.count(text) <= _EXAMPLE_TOKENS,
        )
        example = f"{example} {' '.join(answers)}\n"
        step, taken = (10 if length >= 4096 else 5), lengths.count(example) + room
        size = _most_by_halves(lambda size: lengths.count(make(size, False)[0]) + taken, length, step)

        def sample(size: int) -> tuple[str, list[str]]:
            text, answers = make(size, False)
            return f"{_renamed(example)}\n{text}", answers

        return [_sample(index, *_fitting(sample, size, step, fits)) for index in range(samples)]

    def make_2024(size: int, is_example: bool) -> tuple[str, list[str]]:
        # A template that is not the task's own is folded for the example: since December 2024, lm-eval's is its own.
        with _replaced(lm.vt, TEMPLATE=f" {lm.vt.TEMPLATE}" if is_example else lm.vt.TEMPLATE):
            return lm.vt.generate_input_output(size, _CHAINS, _HOPS, is_icl=is_example)

    def tokens(size: int, is_example: bool) -> int:
        text, answers = make_2024(size, is_example)
        return lengths.count(f"{text} {answers}")

    with _muted(lm.vt):
        size = _largest(lambda size: tokens(size, True), room, _EXAMPLE_TOKENS, step=5)
        example, answers = _fitting(
            lambda size: make_2024(size, True), size, 5, lambda text: lengths.count(text) + room <= _EXAMPLE_TOKENS
        )
        example = f"{example} {' '.join(answers)}\n\n"
        size = _largest(lambda size: tokens(size, False), room + lengths.count(example), length, step=10)

        def sample_2024(size: int) -> tuple[str, list[str]]:
            text, answers = make_2024(size, False)
            return f" {example}\n\n{text}", answers

        return [_sample(index, *_fitting(sample_2024, size, 10, fits)) for index in range(samples)]


@contextmanager
def _muted(module: Any) -> Iterator[None]:
    module.print = lambda *_, **__: None
    try:
        yield
    finally:
        del module.print


def _variables_now(lm: SimpleNamespace) -> Callable[[int, bool], tuple[str, list[str]]]:
    noise = lm.prepare_niah.get_haystack(type_haystack="repeat")
    config = lm.vt.CONFIG["variable_tracking"]
    template = config["template"] + config["answer_prefix"].replace("assgined", "assigned")

    def make(size: int, is_example: bool) -> tuple[str, list[str]]:
        names, chains = lm.vt.generate_chains(_CHAINS, _HOPS, is_icl=is_example)
        value = chains[0][0].rpartition(" ")[2]
        if is_example:
            chains[0][0] = chains[0][0].removesuffix(value) + _PLACEHOLDER
            value = _PLACEHOLDER
        lines = [noise] * size
        for chain in chains:
            places = sorted(random.sample(range(len(lines)), len(chain)))
            for offset, (place, line) in enumerate(zip(places, chain, strict=True)):
                lines.insert(place + offset, line)
        context = "\n".join(lines).replace(". \n", ".\n")
        return template.format(context=context, query=value, num_v=_HOPS + 1), names[0]

    return make


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
    """Return the size that NVIDIA's scripts of 2024 find: grown by steps until a first sample does not fit."""
    size, total = step, 0
    while total + room < limit:
        total = tokens(size)
        if total + room > limit:
            return max(size - step, step)
        size += step
        if size > most:
            return int(most)
    return size


def _most_by_halves(tokens: Callable[[int], int], limit: int, step: int) -> int:
    """Return the size that NVIDIA's scripts find since June 2025: by bisection, from a first guess."""
    low, best = step, step
    high = max(int(limit / (tokens(step) / step) * 3), 2 * step)
    while low <= high:
        size = (low + high) // 2
        if tokens(size) <= limit:
            best, low = size, size + 1
        else:
            high = size - 1
    return best


def _fitting(
    make: Callable[[int], tuple[str, list[str]]], size: int, step: int, fits: Callable[[str], bool]
) -> tuple[str, list[str]]:
    """Make a sample of this size, or of the next smaller one that fits.

    Raises:
        _NoRoomError: none does.
    """
    for _ in range(size // step + _ATTEMPTS):
        text, answers = make(size)
        if fits(text):
            return text, answers
        size = size - step if size > step else size
    raise _NoRoomError
