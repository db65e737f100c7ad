"""Our tasks of RULER for lm-eval itself:

    lm_eval --model hf --model_args pretrained=FOLDER,max_length=4096 --include_path FOLDER_OF_THIS_FILE \\
        --tasks anchorline_vt,anchorline_cwe --metadata '{"length": 4096, "suite": "configs/eval/ruler.yaml"}'

The tokenizer is the model's (`pretrained`), or `tokenizer` of the metadata; `samples` overrides the suite's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from anchorline.errors import UserError, quoted
from torchtrain.evaluation.materials import Materials, MissingMaterialError
from torchtrain.evaluation.samples import open_samples
from torchtrain.evaluation.scoring import score
from torchtrain.evaluation.suite import TASKS, load_suite
from torchtrain.modeling.source import open_tokenizer, resolve_source


def _dataset(task: str, **metadata: Any) -> dict[str, Any]:
    """Return the samples of a task as lm-eval takes a data set.

    Raises:
        UserError: no tokenizer, length or suite in the metadata, or its material is missing.
    """
    import datasets

    source = metadata.get("tokenizer") or metadata.get("pretrained")
    for name, value in (("pretrained", source), ("length", metadata.get("length")), ("suite", metadata.get("suite"))):
        if not value:
            raise UserError(f"anchorline_{task}: {name} is not in --metadata or --model_args; add it")
    samples = metadata.get("samples")
    suite = load_suite(metadata["suite"], [] if samples is None else [f"samples={samples}"])
    tokenizer = open_tokenizer(resolve_source(str(source), suite.cache, needs="tokenizer"))
    try:
        made = open_samples(task, int(metadata["length"]), suite.samples, tokenizer, Materials(suite))
    except MissingMaterialError as error:
        raise UserError(f"anchorline_{task}: {error} in {quoted(metadata['suite'])}") from None
    return {"test": datasets.Dataset.from_list(made.samples, split=datasets.Split.TEST)}


def score_all(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the share of answers that stand in what the model said."""
    return {"score": score(results[0], doc["outputs"], "all")}


def score_any(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return whether one of the answers stands in what the model said."""
    return {"score": score(results[0], doc["outputs"], "any")}


_BY_TASK: dict[str, Callable[..., dict[str, Any]]] = {task: partial(_dataset, task) for task in TASKS}
globals().update(_BY_TASK)  # `!function ruler.TASK` of a YAML file names one
