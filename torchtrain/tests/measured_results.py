"""Results of made-up numbers, for tests of what is made from them."""

from torchtrain.evaluation.results import (
    Answer,
    Bucket,
    PerplexityResult,
    Settings,
    TaskResult,
    save_result,
)


def settings_of(samples="s", **more) -> Settings:
    return Settings(**{"weights": "w", "samples": samples, "anchor": [], "dtype": "float32"} | more)


def task_result(task="fwe", scores=(1.0, 0.0), samples="s", length=1024, checkpoint="model", **more) -> TaskResult:
    return TaskResult(
        task=task,
        length=length,
        checkpoint=checkpoint,
        step=None,
        source="x",
        settings=more.pop("settings", None) or settings_of(samples),
        identity={"materials": {"haystack": "folder essays"}},
        attention="causal, sdpa",
        device="cpu",
        shares_prefixes=True,
        prompt_tokens=1,
        computed_tokens=1,
        seconds=1.0,
        versions={},
        created="2026-11-22T00:00:00+00:00",
        answers=[Answer(index=i, prediction="", score=of) for i, of in enumerate(scores)],
        **more,
    )


def save_results(folder, *results):
    for result in results:
        save_result(folder / result.checkpoint / f"{result.task}-{result.length}.json", result)


def perplexity_result(shift=0.0, samples="d") -> PerplexityResult:
    losses = [[2.0 + shift, 2.1 + shift], [1.9 + shift, 2.0 + shift]]
    return PerplexityResult(
        length=1024,
        checkpoint="model",
        step=3,
        source="x",
        settings=Settings(weights="w", samples=samples, anchor=[], dtype="float32"),
        text="speeches",
        buckets=[Bucket(first=1, end=256, losses=losses[0]), Bucket(first=256, end=1024, losses=losses[1])],
        strided=None,
        seconds=1.0,
        versions={},
        created="",
    )


def save_seeds(folder, name: str, each: list[list[float]]) -> str:
    for seed, scores in enumerate(each):
        at_step = {"checkpoint": "model"}
        save_results(folder / f"{name}-{seed}", task_result(scores=scores, **at_step), perplexity_result(0.1 * seed))
    return f"{name}=" + ",".join(str(folder / f"{name}-{seed}") for seed in range(len(each)))
