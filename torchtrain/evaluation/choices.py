"""MMLU and HellaSwag: which of four answers a model finds likeliest, asked by lm-eval's own tasks on our questions.

Where MMLU's own code (hendrycks/test, evaluate_hf.py) is another, ours is as that:

    description    two spaces stand before the subject
    questions      are not stripped
    shots          as many as fit are left, where lm-eval cuts a prompt on its left; there at 2,048 tokens, here at the
                   length that is asked for

Its average, by questions and not by subjects, is `compare`'s. HellaSwag has no code of its own for language models:
lm-eval's is what all quote, the likelihood of an ending over its length in characters (`acc_norm`); `acc`, without the
length, stands beside it in each result.
"""

import importlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anchorline.errors import UserError, quoted_reason
from torchtrain.evaluation.engines import Pair
from torchtrain.evaluation.materials import Materials, Questions
from torchtrain.evaluation.suite import HELLASWAG, library_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Sample = dict[str, Any]


def make_choices(
    task: str, length: int, samples: int, tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> list[Sample]:
    """Make the first samples of a task.

    Args:
        task: `hellaswag`, or `mmlu_` and a subject.
        length: tokens of context, one of anchor, and the longest answer, at most.
        samples: how many, at most.
        tokenizer: of the model.
        materials: the published questions.

    Returns:
        Of each: `index`, `prompt`, `choices` (each as it follows the prompt), `answer` (the index of the right one),
        `shots`, `length` (tokens with the longest choice and an anchor), `max_length`.

    Raises:
        MissingMaterialError: the questions are not there.
        UserError: they are damaged; lm-eval is missing or another; or a question alone is longer than the length.
    """
    questions = materials.published(task)
    most_shots = 0 if task == HELLASWAG else min(materials.suite.mmlu_shots, len(questions.shots))
    if task != HELLASWAG and most_shots < materials.suite.mmlu_shots:
        raise UserError(f"mmlu: {task} has {most_shots} solved questions of mmlu_shots {materials.suite.mmlu_shots}")
    try:
        asked = _library_task(task, questions, samples)
        documents = list(asked.eval_docs)
        return [
            _sample(asked, task, index, document, most_shots, length, tokenizer)
            for index, document in enumerate(documents[:samples])
        ]
    except (AttributeError, TypeError, KeyError) as error:
        raise UserError(
            f"{task}: lm-eval's task is not the one of 0.4.13 ({quoted_reason(error)}); pip install lm_eval==0.4.13"
        ) from error


def _library_task(task: str, questions: Questions, samples: int) -> Any:
    """Return lm-eval's task on our questions."""
    try:
        import datasets

        load_yaml = importlib.import_module("lm_eval.tasks._yaml_loader").load_yaml
        kind = importlib.import_module("lm_eval.api.task").ConfigurableTask
    except ImportError as error:
        raise UserError(f"{task} needs the package {error.name}: pip install 'anchorline[eval]'") from None
    folder = library_folder("hellaswag" if task == HELLASWAG else "mmlu/default")
    config = load_yaml(folder / f"{task}.yaml")
    if task == HELLASWAG:
        splits = {"validation": questions.questions[:samples]}
        config["training_split"] = None
    else:
        splits = {"test": questions.questions[:samples], "dev": questions.shots}
        config["description"] = _put(config["description"], "about ", "about  ")
        config["doc_to_text"] = _put(config["doc_to_text"], "question.strip()", "question")
    tables = {name: datasets.Dataset.from_list(records) for name, records in splits.items()}
    config |= {"dataset_path": "", "dataset_name": "", "custom_dataset": lambda **_: tables, "metadata": {}}
    log = logging.getLogger("lm_eval.api.task")
    before, log.level = log.level, logging.ERROR  # it advises on custom data sets
    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return kind(config=config)
    finally:
        log.level = before
        if bars:
            datasets.enable_progress_bars()


def _put(text: str, old: str, new: str) -> str:
    if old not in text:
        raise KeyError(old)
    return text.replace(old, new)


def _sample(
    asked: Any,
    task: str,
    index: int,
    document: dict[str, Any],
    most_shots: int,
    length: int,
    tokenizer: "PreTrainedTokenizerFast",
) -> Sample:
    for shots in range(most_shots, -1, -1):
        prompt = asked.fewshot_context(document, shots)
        requests = asked.construct_requests(document, prompt, metadata=(task, index, 1))
        choices = [request.args[1] for request in requests]
        answer = document["gold"] if "gold" in document else asked.doc_to_target(document)
        sample = {"index": index, "prompt": prompt, "choices": choices, "answer": int(answer), "shots": shots}
        pairs = encode_pairs(sample, tokenizer)
        tokens = max(len(context) + len(choice) for context, choice in pairs) + 1
        if tokens <= length:
            return sample | {"length": tokens, "max_length": length}
    raise UserError(f"{task} at {length:,} tokens: question {index + 1} alone is longer; give a greater length")


def encode_pairs(sample: Sample, tokenizer: "PreTrainedTokenizerFast") -> list[Pair]:
    """Return the ids of a sample's prompt with each choice, cut where lm-eval cuts them."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False).input_ids)

    context = encode(sample["prompt"].rstrip())  # white space at the end goes with the choice
    pairs = []
    for choice in sample["choices"]:
        whole = encode(sample["prompt"] + choice)
        pairs.append((context, whole[len(context) :]))
    return pairs


def score_choices(task: str, sample: Sample, likelihoods: Sequence[float]) -> tuple[float, float]:
    """Return whether the likeliest choice is the right one: by the task's own measure, and by the likelihood alone."""
    lengths = [len(choice.removeprefix(" ")) for choice in sample["choices"]]
    by_length = [likelihood / max(of, 1) for likelihood, of in zip(likelihoods, lengths, strict=True)]
    plain = float(_first_largest(likelihoods) == sample["answer"])
    return (float(_first_largest(by_length) == sample["answer"]) if task == HELLASWAG else plain), plain


def _first_largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def subject_group(task: str) -> str:
    """Return the group of an MMLU subject, as its tag in lm-eval says: stem, humanities, social_sciences, other."""
    load_yaml = importlib.import_module("lm_eval.tasks._yaml_loader").load_yaml
    tag = load_yaml(library_folder("mmlu/default") / f"{task}.yaml", resolve_func=False)["tag"]
    return str(tag).removeprefix("mmlu_").removesuffix("_tasks")
