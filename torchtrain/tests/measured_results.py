"""Results of made-up numbers and small data sets, for tests of what is made from them."""

import json

import yaml

from torchtrain.evaluation.results import Answer, Settings, TaskResult, save_result


def settings_of(**more) -> Settings:
    return Settings(**{"weights": "w", "anchor": [], "dtype": "float32"} | more)


def _facts(samples, **more) -> dict:
    known = {"length": 1024, "checkpoint": "model", "source": "x", "settings": settings_of(), "samples": samples}
    known |= {"device": "cpu", "seconds": 1.0, "versions": {}, "created": "2026-11-22T00:00:00+00:00"}
    return known | more


def task_result(task="fwe", scores=(1.0, 0.0), samples="s", **more) -> TaskResult:
    facts = {"step": None, "identity": {"materials": {"haystack": "folder essays"}}, "metric": "score"} | more
    return TaskResult(
        **_facts(samples, **facts),
        task=task,
        values={facts["metric"]: sum(scores) / len(scores)},
        cut_prompts=0,
        prompt_tokens=1,
        computed_tokens=1,
        answers=[Answer(index=i, prediction="", score=of) for i, of in enumerate(scores)],
    )


def save_results(folder, *results):
    for result in results:
        save_result(folder, result)


def perplexity_result(shift=0.0, samples="d", losses=((2.0, 2.1, 2.2), (1.9, 2.0, 2.3)), **more) -> TaskResult:
    parts = zip(("1 to 255", "256 to 1,023", "1 to 1,023"), (*losses, losses[-1]), strict=True)
    return TaskResult(
        **_facts(samples, **({"step": None, "identity": {"text": "speeches"}} | more)),
        task="perplexity",
        metric="loss",
        values={"loss": losses[-1][0]},
        answers=[
            Answer(index=i, prediction="", score=loss + shift, part=part)
            for part, each in parts
            for i, loss in enumerate(each)
        ],
    )


def save_seeds(folder, name: str, each: list[list[float]]) -> str:
    for seed, scores in enumerate(each):
        save_results(folder / f"{name}-{seed}", task_result(scores=scores), perplexity_result(0.1 * seed))
    return f"{name}=" + ",".join(str(folder / f"{name}-{seed}") for seed in range(len(each)))


def as_on_the_hub(folder, records: dict[tuple[str, str], list[dict]]) -> None:
    """Write a data set as the hub has it: a file of records for each config and split."""
    folder.mkdir()
    files = {}
    for (config, split), rows in records.items():
        name = f"{config}-{split}.jsonl"
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.setdefault(config, []).append({"split": split, "path": name})
    configs = [{"config_name": config, "data_files": splits} for config, splits in files.items()]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
