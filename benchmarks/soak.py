"""The work of soak.sh: SIGKILL at random moments of a tiny run, alone and as two processes, until it is through; then compare.

Every run is killed at moments drawn evenly over the time that the undisturbed run took, each time resumed, until one attempt is
let through after `PER_RUN` kills. All it leaves must be the same bits: metrics, weights, moments, generators, exports.
"""

import argparse
import collections
import json
import random
import signal
import tempfile
from pathlib import Path

from torchtrain.tests.conftest import tiny_model, tiny_tokenizer
from torchtrain.tests.forks import Forks, forks
from torchtrain.tests.runs import Place, content, make_place
from torchtrain.training.metrics import read_metrics

PER_RUN = 5
LAYOUTS = {"alone": (), "two": ("distributed.zero_stage=3", "distributed.sequence_parallel=2")}


def prepare(folder: Path, server: Forks) -> Place:
    """A model, a corpus and a config in a folder."""
    tiny_model().save_pretrained(folder / "source")
    tiny_tokenizer().save_pretrained(folder / "source")
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for i in range(48):
            text = " ".join(str(i * n) for n in range(5 + i % 20))
            file.write(json.dumps({"text": text, "domain": "even" if i % 2 else "odd"}) + "\n")
    train = {"steps": 16, "learning_rate": 0.02}
    return make_place(folder, server, folder / "source", folder / "documents.jsonl", train=train, save={"last": 4})


def where(folder: Path) -> str:
    """Where a run was when it was killed, from what it left."""
    if not folder.exists():
        return "before the folder"
    left = {path.name for path in folder.rglob("*")}
    for sign, place in ((".deleted", "removing a checkpoint"), (".partial", "writing a folder")):
        if any(name.endswith(sign) for name in left):
            return place
    events = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    if not events:
        return "before the first loss"
    return "after the last step" if events[-1].get("step") == 16 else "between two saves"


def main() -> None:
    """Kill, resume, compare, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    moments: collections.Counter[str] = collections.Counter()
    different, failed, resumed, saves, firsts = [], [], 0, [], []
    with tempfile.TemporaryDirectory() as name:
        place = prepare(Path(name), forks())
        straight, seconds = {}, {}
        for layout, overrides in LAYOUTS.items():
            processes = {"processes": 2} if layout == "two" else {}
            place.train(f"warm-{layout}", *overrides, **processes)  # makes the corpus
            place.train(f"straight-{layout}", *overrides, **processes)
            seconds[layout] = place.seconds
            straight[layout] = content(place.folder / f"straight-{layout}")
        kills = runs = 0
        while kills < arguments.kills:
            runs += 1
            layout = "two" if runs % 3 == 0 else "alone"
            run, processes = f"run-{runs}", {"processes": 2} if layout == "two" else {}
            folder = place.folder / run
            ended = False
            for _ in range(PER_RUN):
                go = place.resume if folder.exists() else lambda n, **k: place.train(n, *LAYOUTS[layout], **k)  # noqa: B023
                codes = go(run, signal_after=draw.uniform(0, seconds[layout]), **processes)
                codes = codes if isinstance(codes, list) else [codes]
                if codes == [0] * len(codes):
                    ended = True
                    break
                if -signal.SIGKILL not in codes:
                    failed.append((run, codes, place.log(run)[-2000:]))
                kills += 1
                moments[where(folder)] += 1
            if not ended:
                go = place.resume if folder.exists() else lambda n, **k: place.train(n, *LAYOUTS[layout], **k)  # noqa: B023
                codes = go(run, **processes)
                if codes not in (0, [0, 0]):
                    failed.append((run, codes, place.log(run)[-2000:]))
                    continue
            resumed += 1
            mine = content(folder)
            if mine != straight[layout]:
                names = {*mine, *straight[layout]}
                different.append((run, sorted(n for n in names if mine.get(n) != straight[layout].get(n))))
            for event in read_metrics(folder / "timing.jsonl"):
                if event["event"] == "save":
                    saves.append(event["seconds"])
                elif event.get("resumed"):
                    firsts.append(event["since_start"])
    report = {
        "seed": arguments.seed,
        "kills": kills,
        "runs": runs,
        "runs_that_ended_the_same": resumed - len(different),
        "runs_that_ended_different": different,
        "failures": failed,
        "killed": dict(moments.most_common()),
        "seconds_of_a_save": _spread(saves),
        "seconds_to_the_first_step_after_resuming": _spread(firsts),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "soak.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    raise SystemExit(1 if different or failed else 0)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"smallest": ordered[0], "median": ordered[len(ordered) // 2], "largest": ordered[-1]} if ordered else {}


if __name__ == "__main__":
    main()
