"""`torchtrain prepare`: one store, whoever makes it and wherever that is interrupted; nothing half-written counts."""

import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from anchorline.errors import UserError
from torchtrain import cli
from torchtrain.config import DataConfig, Preparation, PrepareConfig, Source, TokenizerConfig, load_config
from torchtrain.config.data import FilterConfig
from torchtrain.data import TokenStore, identity, prepare, prepare_store
from torchtrain.data.clusters import LOGS
from torchtrain.data.prepare import PLAN, Submitted
from torchtrain.data.shards import SHARDS
from torchtrain.errors import TasksUnfinished
from torchtrain.run.folder import RunFolder
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl
from torchtrain.tests.runs import TIME_LIMIT, flip
from torchtrain.tests.tiny import tiny_tokenizer

FILES = 5


@pytest.fixture
def preparation(tmp_path, monkeypatch) -> Preparation:
    """Five files of two domains in turn, with bad records and short documents, and another source behind them."""
    monkeypatch.setattr("torchtrain.data.corpus.TASK_BYTES", 1)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(FILES):
        records = [
            {"text": f"w{number} " + f"w{i % 40} " * (1 + i % 9), "domain": f"d{(number + i) % 2}"} for i in range(40)
        ]
        write_jsonl(folder / f"{number}.jsonl", [*records, {"domain": "d0"}, {"text": "w1", "domain": "d1"}])
    write_jsonl(tmp_path / "other.jsonl", [{"text": f"w{i} w{i} w3"} for i in range(20)])
    sources = [
        Source(files=f"{folder}/*.jsonl", domain_field="domain", rename={"d1": "renamed"}),
        Source(files=f"{tmp_path}/other.jsonl"),
    ]
    data = DataConfig(sources=sources, cache=f"{tmp_path}/cache", bad_record_share=0.1, min_tokens=2)
    return Preparation(tokenizer=TokenizerConfig(source="none"), data=data, prepare=PrepareConfig(workers=1))


def change(preparation: Preparation, **settings) -> Preparation:
    return preparation.model_copy(update={"prepare": preparation.prepare.model_copy(update=settings)})


def filtered(preparation: Preparation, name: str, **options: str) -> Preparation:
    """Pass the records through a filter of `torchtrain.tests.filters`."""
    setting = FilterConfig(name=f"torchtrain.tests.filters.{name}", options=options)
    sources = [source.model_copy(update={"filters": [setting]}) for source in preparation.data.sources]
    return preparation.model_copy(update={"data": preparation.data.model_copy(update={"sources": sources})})


def contents(store: TokenStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.folder.iterdir())}


def test_it_holds_what_one_process_makes_in_a_run(preparation, tmp_path):
    store = prepare_store(preparation, word_tokenizer(), tmp_path / "out")
    assert isinstance(store, TokenStore)
    plain = prepare(preparation.data, word_tokenizer())
    assert len(store.shards) == FILES + 1
    assert plain.domains == store.domains == ["d0", "renamed", "other"]
    for name in ("offsets", "document_domains", "hashes"):
        np.testing.assert_array_equal(getattr(store, name), getattr(plain, name))
    for i in range(len(plain)):
        np.testing.assert_array_equal(store.document(i), plain.document(i))
    assert store.header.summaries == plain.header.summaries
    assert store.header.sources == plain.header.sources
    assert store.bad_records.read_bytes() == plain.bad_records.read_bytes()
    assert store.header.largest_token == plain.header.largest_token
    store.verify()
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*store.header.files, "store.json"])
    assert not (tmp_path / "out.partial").exists()


def test_how_files_are_grouped_into_shards_moves_no_document(preparation, tmp_path, monkeypatch):
    largest = max(path.stat().st_size for path in (tmp_path / "corpus").iterdir())
    stores = []
    for size in (1, 2 * largest, 2**28):
        monkeypatch.setattr("torchtrain.data.corpus.TASK_BYTES", size)
        stores.append(prepare_store(preparation, word_tokenizer(), tmp_path / f"out{size}"))
    assert [len(store.shards) for store in stores] == [6, 4, 2]
    assert len({store.header.fingerprint for store in stores}) == 3  # files are others, so the store is another
    for store in stores[1:]:
        np.testing.assert_array_equal(store.hashes, stores[0].hashes)
        np.testing.assert_array_equal(store.offsets, stores[0].offsets)
    assert all(np.array_equal(store.document(i), stores[0].document(i)) for store in stores for i in range(len(store)))


def test_two_workers_make_the_same_bytes_as_one_and_read_nothing_twice(preparation, tmp_path):
    one = prepare_store(preparation, word_tokenizer(), tmp_path / "one")
    seen = []
    two = prepare_store(change(preparation, workers=2), word_tokenizer(), tmp_path / "two", on_progress=seen.append)
    assert contents(two) == contents(one)
    assert seen[-1].state == "task 6 of 6"
    again = []
    prepare_store(change(preparation, workers=2), word_tokenizer(), tmp_path / "two", on_progress=again.append)
    assert [progress.state for progress in again] == ["tokens reused"]


def test_interrupted_it_goes_on_where_it_was(preparation, tmp_path):
    expected = contents(prepare_store(preparation, word_tokenizer(), tmp_path / "expected"))

    class Stop(BaseException):
        pass

    def stop(progress):
        if progress.state.startswith("task 3"):
            raise Stop

    out, lines = tmp_path / "out", []
    with pytest.raises(Stop):
        prepare_store(preparation, word_tokenizer(), out, on_progress=stop)
    assert not out.exists()
    work = out.with_name("out.partial")
    times = {path.name: path.stat().st_mtime_ns for path in (work / SHARDS).iterdir()}
    assert len(times) == 3
    # What a killed worker leaves, and a shard that is cut off: neither counts as done.
    (work / SHARDS / "00004.host-1-aaaa.partial").mkdir()
    (work / SHARDS / "00000" / "offsets.npy").write_bytes(b"")
    store = prepare_store(preparation, word_tokenizer(), out, lines.append)
    assert "going on  2 of 6 tasks are done" in lines
    assert contents(store) == expected
    assert not work.exists()


def test_a_worker_that_is_killed_is_noticed_and_its_task_done_again(preparation, tmp_path):
    mark = tmp_path / "killed"
    killing = filtered(preparation, "KillOnce", place=f"{tmp_path}/corpus/3.jsonl:21", mark=str(mark))
    with pytest.raises(TasksUnfinished, match=r"a worker was killed .*: \d of 6 tasks are not done; the others are k"):
        prepare_store(change(killing, workers=2), word_tokenizer(), tmp_path / "out")
    assert mark.exists()
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.partial" / SHARDS).glob("00003.*.partial"))
    store = prepare_store(killing, word_tokenizer(), tmp_path / "out")
    assert contents(store) == contents(prepare_store(killing, word_tokenizer(), tmp_path / "expected"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_preparation_that_is_killed_leaves_no_process_behind(preparation, tmp_path):
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    given = (change(filtered(preparation, "Wait", folder=str(waiting)), workers=2), word_tokenizer(), tmp_path / "out")
    process = multiprocessing.get_context("spawn").Process(target=prepare_store, args=given)
    process.start()
    wait_until(lambda: len(os.listdir(waiting)) == 2)
    process.kill()
    process.join()
    pids = {int(pid) for name in os.listdir(waiting) for pid in name.split("-")}
    assert len(pids) == 3, "two workers and the fork server"
    wait_until(lambda: not any(map(is_alive, pids)))


def test_what_another_preparation_left_is_not_gone_on_with(preparation, tmp_path):
    out = tmp_path / "out"
    store = prepare_store(preparation, word_tokenizer(), out)
    with pytest.raises(UserError, match=r"out: holds a store of other sources, settings or tokenizer; choose"):
        prepare_store(preparation, word_tokenizer(words=60), out)
    # A file that is touched does not make a finished store another one, but an unfinished one is begun anew.
    os.utime(tmp_path / "other.jsonl", ns=(1, 1))
    assert prepare_store(preparation, word_tokenizer(), out).header.fingerprint == store.header.fingerprint
    work = tmp_path / "new.partial"
    work.mkdir()
    (work / PLAN).write_text("{}")
    (work / SHARDS / "00000").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"new\.partial: holds a preparation of something else .*; remove it, or choose"
    ):
        prepare_store(preparation, word_tokenizer(), tmp_path / "new")
    assert sorted(os.listdir(work)) == [PLAN, SHARDS]
    # One that ended before it began is no other; and what a user laid there stays.
    (work / PLAN).unlink()
    (work / SHARDS / "00000").rmdir()
    prepare_store(preparation, word_tokenizer(), tmp_path / "new", lambda line: (work / "mine").touch() or None)
    assert os.listdir(work) == ["mine"]


def test_an_out_that_is_something_of_the_users_is_refused_and_stays(preparation, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        with pytest.raises(UserError, match=rf"--out .*{name}: is there, and no token store; give the name of a new"):
            prepare_store(preparation, word_tokenizer(), tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(UserError, match=r"--out /proc/store cannot be written: .*; choose another folder"):
        prepare_store(preparation, word_tokenizer(), Path("/proc/store"))


def test_a_source_that_breaks_off_is_named_and_costs_no_other_task(preparation, tmp_path):
    whole = (tmp_path / "corpus" / "2.jsonl").read_bytes()
    import gzip

    (tmp_path / "corpus" / "2.jsonl").unlink()
    path = tmp_path / "corpus" / "2.jsonl.gz"
    path.write_bytes(gzip.compress(whole)[:-100])
    files = f"{tmp_path}/corpus/*"
    sources = [preparation.data.sources[0].model_copy(update={"files": files}), preparation.data.sources[1]]
    broken = preparation.model_copy(update={"data": preparation.data.model_copy(update={"sources": sources})})
    with pytest.raises(
        UserError, match=r"2\.jsonl\.gz breaks off after line \d+: .*: 1 of 6 tasks are not done; the others are kept"
    ):
        prepare_store(broken, word_tokenizer(), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out.partial" / SHARDS).iterdir()) == [
        f"{i:05d}" for i in (0, 1, 3, 4, 5)
    ]


def test_too_many_bad_records_of_all_tasks_together_are_refused(preparation, tmp_path):
    strict = preparation.model_copy(update={"data": preparation.data.model_copy(update={"bad_record_share": 0.01})})
    with pytest.raises(
        UserError, match=r"corpus: 5 of 210 records are bad, a share above .*the first: .*0\.jsonl:41: "
    ):
        prepare_store(strict, word_tokenizer(), tmp_path / "out")
    # The share is not of the tokens: with a larger one nothing is done again.
    lines = []
    prepare_store(preparation, word_tokenizer(), tmp_path / "out", lines.append)
    assert "going on  6 of 6 tasks are done" in lines


def test_one_flipped_bit_of_a_shard_is_found_before_it_is_joined_and_after(preparation, tmp_path):
    def stop(progress):
        if progress.state.startswith("task 6"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(preparation, word_tokenizer(), tmp_path / "out", on_progress=stop)
    flip(tmp_path / "out.partial" / SHARDS / "00002" / "tokens-00000.bin")
    with pytest.raises(
        TasksUnfinished, match=r"00002 is damaged \(tokens-00000.bin: its content has changed.*was removed"
    ):
        prepare_store(preparation, word_tokenizer(), tmp_path / "out")
    store = prepare_store(preparation, word_tokenizer(), tmp_path / "out")
    flip(store.folder / "tokens-00004.bin")
    with pytest.raises(UserError, match=r"tokens-00004\.bin: its content has changed"):
        TokenStore.open(store.folder).verify()


def test_slurms_script_is_shown_and_nothing_written(preparation, tmp_path):
    slurm = preparation.prepare.slurm.model_copy(
        update={"sbatch": {"partition": "cpu", "time": "2:00:00", "account": "me"}}
    )
    shown = prepare_store(
        change(preparation, executor="slurm", slurm=slurm, memory=3), word_tokenizer(), tmp_path / "out", dry_run=True
    )
    assert isinstance(shown, Submitted)
    assert shown.tasks == FILES + 1
    assert shown.script is not None
    lines = shown.script.splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in ("partition=cpu", "time=2:00:00", "account=me", "mem-per-cpu=3G", "array=0-5%1", "cpus-per-task=1"):
        assert f"#SBATCH --{option}" in lines
    assert any("launch_pickled_pipeline" in line and "out.partial/logs/executor.pik" in line for line in lines)
    assert not [name for name in os.listdir(tmp_path) if "out" in name]
    with pytest.raises(UserError, match=r"prepare.executor is local; only Slurm's script is shown"):
        prepare_store(preparation, word_tokenizer(), tmp_path / "out", dry_run=True)
    with pytest.raises(UserError, match="there is no sbatch here"):
        prepare_store(change(preparation, executor="slurm"), word_tokenizer(), tmp_path / "out")


def test_slurms_task_makes_the_shard(preparation, tmp_path, monkeypatch):
    """What `launch_pickled_pipeline` does in a job of the array, with sbatch in its place."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, answer in (("sbatch", "Submitted batch job 17"), ("scontrol", "one")):
        (binaries / name).write_text(f"#!/bin/sh\necho {answer}\n")
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    (mark := tmp_path / "out.partial" / LOGS / "completions" / "00005").parent.mkdir(parents=True)
    mark.touch()  # a mark of datatrove's without a shard, which does not count
    submitted = prepare_store(change(preparation, executor="slurm"), word_tokenizer(), tmp_path / "out")
    assert submitted == Submitted(FILES + 1)
    import dill

    monkeypatch.setenv("SLURM_NODELIST", "one")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    for job in range(FILES + 1):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(job))
        with (tmp_path / "out.partial" / LOGS / "executor.pik").open("rb") as file:
            dill.load(file).run()
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    store = prepare_store(change(preparation, executor="slurm"), word_tokenizer(), tmp_path / "out")
    assert contents(store) == contents(prepare_store(preparation, word_tokenizer(), tmp_path / "expected"))


# --- runs that read it ------------------------------------------------------------------------------------------------


def test_a_run_trains_on_it_with_the_same_bits(tree, write_config, tmp_path):
    """One file is one shard; then all that a run writes of its tokens is the same as if it had made them itself."""
    config = write_config(tree | {"train": tree["train"] | {"steps": 3}})
    call = CliRunner().invoke
    prepared = call(cli.app, ["prepare", str(config), "--out", str(tmp_path / "store"), "prepare.workers=1"])
    assert prepared.exit_code == 0, prepared.output
    made = call(cli.app, ["train", str(config)])
    assert made.exit_code == 0, made.output
    whole = (Path(tree["run"]["folder"]) / "metrics.jsonl").read_text().splitlines()

    tree["data"].pop("sources")
    tree["run"]["folder"] += "2"
    tree["data"]["prepared"] = str(tmp_path / "store")
    read = call(cli.app, ["train", str(write_config(tree | {"train": tree["train"] | {"steps": 3}}))])
    assert read.exit_code == 0, read.output
    assert "tokens reused" in read.stderr
    found = (Path(tree["run"]["folder"]) / "metrics.jsonl").read_text().splitlines()
    kept = ("event", "step", "loss", "gradient_norm", "tokens_seen")
    assert [[json.loads(line).get(key) for key in kept] for line in found] == [
        [json.loads(line).get(key) for key in kept] for line in whole
    ]
    records = [json.loads((Path(f"{tmp_path}/{name}") / "run.json").read_text()) for name in ("run", "run2")]
    assert records[0]["identity"]["tokens"] == records[1]["identity"]["tokens"]
    # Of what its tokens are made, whether or not it is told the sources.
    of_store = RunFolder(tree["run"]["folder"]).check_run().training().data
    assert {"sources", "min_tokens"} <= of_store.keys()
    assert of_store == records[1]["corpus"]["made_of"]
    assert call(cli.app, ["verify", tree["run"]["folder"]]).exit_code == 0


def open_as_a_run(data: DataConfig, tokenizer: Any) -> None:
    identity(data, tokenizer)
    prepare(data, tokenizer)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.prepared=nowhere", r"data\.prepared 'nowhere': is not there; make one: torchtrain prepare CONFIG --out"),
        (
            "data.min_tokens=3",
            r"is of other sources or settings than this config's; prepare it again, or remove data\.s",
        ),
        ("data.sources.0.domain_field=null", r"is of other sources or settings"),
        (
            "data.prepared=cache",
            r"data\.prepared 'cache': holds no finished token store \(store\.json .*; make one: ",
        ),
    ],
)
def test_a_store_of_something_else_is_refused(tree, write_config, tmp_path, monkeypatch, override, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    tokenizer = tiny_tokenizer()
    data = DataConfig.model_validate(tree["data"])
    preparation = Preparation(tokenizer=TokenizerConfig(source="none"), data=data, prepare=PrepareConfig(workers=1))
    prepare_store(preparation, tokenizer, tmp_path / "store")
    config = load_config(write_config(tree), [f"data.prepared={tmp_path}/store", override])
    with pytest.raises(UserError, match=message):
        open_as_a_run(config.data, tokenizer)
    with pytest.raises(UserError, match=r"was tokenised by another tokenizer; prepare it with that of model\.source"):
        prepare(data.model_copy(update={"prepared": str(tmp_path / "store")}), word_tokenizer())


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(preparation, tmp_path):
    freed, fork = tmp_path / "freed", multiprocessing.get_context("fork")
    limited = filtered(preparation, "LimitFiles", unless=str(freed))
    said = fork.Queue()
    process = fork.Process(target=say_how_it_ends, args=(limited, tmp_path / "out", said))
    process.start()
    message = said.get(timeout=TIME_LIMIT)
    process.join()
    assert re.search(r"out\.partial cannot be written: file too large.*: 6 of 6 tasks are not done", message), message
    assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path / "out.partial" / SHARDS) == []
    freed.touch()
    store = prepare_store(limited, word_tokenizer(), tmp_path / "out")
    assert contents(store) == contents(prepare_store(limited, word_tokenizer(), tmp_path / "expected"))


def say_how_it_ends(preparation: Preparation, out: Path, said: Any) -> None:
    try:
        prepare_store(preparation, word_tokenizer(), out)
        said.put("made")
    except UserError as error:
        said.put(str(error))


def test_without_ray_it_is_named(preparation, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"prepare\.executor ray needs the package ray: pip install ray"):
        prepare_store(change(preparation, executor="ray"), word_tokenizer(), tmp_path / "out")
