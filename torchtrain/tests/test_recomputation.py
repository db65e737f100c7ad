"""`model.activation_checkpointing: auto`: decided by the memory that is free, said, and the same everywhere."""

import pytest
import torch

import torchtrain.distributed.free_memory as memory_module
from torchtrain.config import load_config
from torchtrain.distributed.free_memory import free_memory
from torchtrain.distributed.world import World
from torchtrain.modeling.source import open_config
from torchtrain.planning import budget
from torchtrain.run import setup as recomputation
from torchtrain.run.setup import choose_recomputation, set_up

CPU = torch.device("cpu")


@pytest.fixture
def config(tree, write_config):
    return lambda *overrides: load_config(write_config(tree), ["model.activation_checkpointing=auto", *overrides])


def needed(config, model_folder, recomputed):
    """Bytes of a run, on a CPU, where device and host are one."""
    model = config.model.model_copy(update={"activation_checkpointing": recomputed})
    shapes = budget.Shapes(open_config(str(model_folder())))
    held = budget.count_memory(config.model_copy(update={"model": model}), shapes, 1)
    return held.gpu + held.host


@pytest.mark.parametrize(
    ("kept", "share", "engine", "recomputed", "told"),
    [
        (False, 0.99, "sdpa", False, "none recomputed: "),
        (False, 1.01, "sdpa", "keep_attention", "recomputed in the backward pass, but for attention: "),
        ("keep_attention", 0.99, "sdpa", "keep_attention", "recomputed in the backward pass, but for attention: "),
        ("keep_attention", 1.01, "sdpa", True, "recomputed in the backward pass: "),
        ("keep_attention", 0.99, "flex", True, "recomputed in the backward pass: "),
    ],
)
def test_what_is_kept_must_fit_with_room_to_spare(
    config, model_folder, monkeypatch, kept, share, engine, recomputed, told
):
    loaded = config("pack.sequence_length=4096")
    free = needed(loaded, model_folder, kept) / recomputation._SHARE / share
    monkeypatch.setattr(recomputation, "free_memory", lambda device: int(free))
    settings, said = choose_recomputation(loaded, open_config(str(model_folder())), engine, World())
    assert settings == loaded.model.model_copy(update={"activation_checkpointing": recomputed})
    assert said.startswith(f"{told}keeping them takes {needed(loaded, model_folder, False) / 2**30:.1f} GiB")
    assert said.endswith("GiB are free")


def test_all_processes_do_as_the_one_with_least_memory_must(config, model_folder, monkeypatch):
    monkeypatch.setattr(recomputation, "free_memory", lambda device: 2**40)
    monkeypatch.setattr(World, "sum", lambda self, values: [values[0] * self.size - 1])  # of another, it does not fit
    settings, _ = choose_recomputation(config(), open_config(str(model_folder())), "sdpa", World(0, 2))
    assert settings.activation_checkpointing is True


@pytest.mark.parametrize("free", [0, 2**40])
def test_the_run_does_what_was_chosen_and_says_so(config, monkeypatch, free):
    monkeypatch.setattr(recomputation, "free_memory", lambda device: free)
    said = []
    setup = set_up(config(), said.append)
    assert any(layer.gradient_checkpointing for layer in setup.model.model.layers) is (free == 0)
    assert setup.record["activation_checkpointing"] is (free == 0)
    (line,) = [line for line in said if line.startswith("layers    ")]
    assert line.endswith("GiB are free" if free else "the free memory is not known")


def test_free_memory_is_the_least_that_the_system_tells(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\nHugePages_Total:       0\n")
    assert memory_module._available(meminfo) == 5000 * 1024
    for name, text in (("memory.max", "max\n"), ("memory.current", "1000\n"), ("memory.stat", "anon 1\n")):
        (tmp_path / name).write_text(text)
    assert memory_module._left_of_limit(tmp_path) == -1, "max is no limit"
    (tmp_path / "memory.max").write_text("6000\n")
    assert memory_module._left_of_limit(tmp_path) == -1, "it does not tell what it could let go"
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    assert memory_module._left_of_limit(tmp_path) == 5500
    assert memory_module._available(tmp_path / "memory.max") == memory_module._available(tmp_path / "none") == -1
    for here, least in (((3000, 2000), 2000), ((3000, -1), 3000), ((-1, -1), 0)):
        monkeypatch.setattr(memory_module, "_available", lambda _, told=here[0]: told)
        monkeypatch.setattr(memory_module, "_left_of_limit", lambda _, told=here[1]: told)
        assert free_memory(CPU) == least
    monkeypatch.setattr(memory_module, "read_local_size", lambda: 2)
    monkeypatch.setattr(memory_module, "_available", lambda _: 3000)
    assert free_memory(CPU) == 1500
