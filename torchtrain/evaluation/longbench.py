"""LongBench: the benchmark's own prompts, cuts and scores, of what the installed lm-eval carries of them.

What lm-eval has as LongBench's own code has it is taken from there by import: 15 of 21 prompts, the room for answers,
eight of nine scores. What is not is put right here (THUDM/LongBench, commit 2e00731):

    triviaqa, samsum                      an empty line stands between the examples and the question
    passage_count, passage_retrieval_en   the prompt ends with a space
    lcc, repobench-p                      the prompt ends with a line break; code_sim looks at the first line without
                                          a comment, one of blanks too, once line breaks before it are gone
    trec, triviaqa, samsum, lsht          the first line that is not empty counts; lm-eval stops at the first break,
                                          and an answer that begins with one is empty. Only samsum stops at a break
    all                                   what is too long is cut in its middle, not on its left

Source: LongBench/pred.py, eval.py and metrics.py, config/dataset2prompt.json.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from anchorline.errors import UserError, quoted_reason
from torchtrain.evaluation.materials import Materials
from torchtrain.evaluation.suite import LONGBENCH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Sample = dict[str, Any]

FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
_ENDS = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}
_EMPTY_LINE = ("triviaqa", "samsum")
_COMMENTS = ("`", "#", "//")


def name_of(task: str) -> str:
    """Return what LongBench calls one of our tasks."""
    return task.removeprefix("longbench_")


def group_name(task: str) -> str:
    """Return the group of a task."""
    return next(group for group, tasks in LONGBENCH.items() if name_of(task) in tasks)


def room_of(task: str) -> int:
    """Return the most tokens of an answer.

    Raises:
        UserError: lm-eval is missing or another.
    """
    return int(_library("_generate_config", "dataset2maxlen")[name_of(task)])


def prompt_template(name: str) -> str:
    """Return a task's prompt, with {context} and {input} to be filled in.

    Raises:
        UserError: lm-eval is missing or another.
    """
    text = str(_library("_generate_config", "dataset2prompt")[name]).replace("{question}", "{input}")
    if name in _EMPTY_LINE:
        text = text.replace("{context}\n{input}", "{context}\n\n{input}")
    return text + _ENDS.get(name, "")


def make_prompts(
    task: str, length: int, samples: int, tokenizer: "PreTrainedTokenizerFast", materials: Materials
) -> list[Sample]:
    """Make the first prompts of a task, each cut in its middle where it leaves no room for its answer.

    Args:
        task: `longbench_` and a name of LongBench's.
        length: tokens, prompt, one of anchor and answer together.
        samples: how many, at most.
        tokenizer: of the model.
        materials: the published questions.

    Returns:
        Of each: `index`, `prompt`, `outputs` (the answers), `classes`, `cut`, `length` (tokens of prompt, anchor and
        answer), `max_length`.

    Raises:
        MissingMaterialError: the questions are not there.
        UserError: they are damaged; lm-eval is missing or another; or the length leaves no room.
    """
    questions = materials.published(task).questions[:samples]
    template, room = prompt_template(name_of(task)), room_of(task)
    most = length - room - 1
    if materials.suite.longbench_prompt is not None:
        if materials.suite.longbench_prompt > most:
            raise UserError(
                f"longbench_prompt {materials.suite.longbench_prompt}: {task} leaves {max(most, 0):,} tokens of "
                f"{length:,} beside its answer; give no more, or a greater length"
            )
        most = materials.suite.longbench_prompt
    if most < 64:
        raise UserError(f"{task} at {length:,} tokens: an answer of {room} leaves no room; give a greater length")
    made = []
    for index, record in enumerate(questions):
        prompt = template.format(context=record["context"], input=record["input"])
        text, tokens = cut_in_the_middle(prompt, most, tokenizer)
        made.append(
            {
                "index": index,
                "prompt": text,
                "outputs": record["answers"],
                "classes": record["all_classes"] or [],
                "cut": text != prompt,
                "length": tokens + room + 1,
                "max_length": length,
            }
        )
    return made


def cut_in_the_middle(prompt: str, most: int, tokenizer: "PreTrainedTokenizerFast") -> tuple[str, int]:
    """Return a prompt of at most `most` tokens, its two ends as text put together, and its tokens.

    As LongBench does it, but that text which comes to more tokens when it is put together is cut again, shorter.
    """
    ids = tokenizer(prompt, verbose=False).input_ids
    text, tokens, goal = prompt, len(ids), most
    while tokens > most:
        half = goal // 2
        text = "".join(
            str(tokenizer.decode(part, skip_special_tokens=True)) for part in (ids[:half], ids[len(ids) - half :])
        )
        tokens = len(tokenizer(text, verbose=False).input_ids)
        goal -= max(tokens - most, 1)
    return text, tokens


def metric_of(task: str) -> Callable[..., float]:
    """Return LongBench's score of a task: from (prediction, answer, all_classes=) to 0..1.

    Raises:
        UserError: lm-eval or a package that it scores with is missing, or it is another.
    """
    name = _library("_generate_config", "dataset2metric")[name_of(task)]
    if name == "code_sim_score":
        return _code_similarity
    return getattr(_metrics(), name)


def score_answer(task: str, prediction: str, sample: Sample) -> float:
    """Return the best score of a prediction over a sample's answers."""
    if name_of(task) in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = metric_of(task)
    return max(float(metric(prediction, str(answer), all_classes=sample["classes"])) for answer in sample["outputs"])


def newline_stops(task: str, tokenizer: "PreTrainedTokenizerFast") -> Sequence[int]:
    """Return the ids that end an answer besides EOS: of samsum the line break, which must not come first either."""
    return tokenizer("\n", add_special_tokens=False).input_ids[-1:] if name_of(task) == "samsum" else []


def _code_similarity(prediction: str, answer: str, **_: Any) -> float:
    lines = prediction.lstrip("\n").split("\n")
    first = next((line for line in lines if not any(mark in line for mark in _COMMENTS)), "")
    return _metrics().fuzz.ratio(first, answer) / 100


def _metrics() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fuzzywuzzy says that it is slow
        try:
            return importlib.import_module("lm_eval.tasks.longbench.metrics")
        except ImportError:
            raise UserError(
                "LongBench is scored with the packages jieba, fuzzywuzzy and rouge: pip install 'anchorline[longbench]'"
            ) from None


def _library(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"lm_eval.tasks.longbench.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name == "lm_eval":
            raise UserError("LongBench needs the package lm_eval: pip install 'anchorline[eval]'") from None
        reason = error
    except AttributeError as error:
        reason = error
    raise UserError(
        f"longbench: lm-eval's tasks are not those of 0.4.13 ({quoted_reason(reason)}); pip install lm_eval==0.4.13"
    ) from None
