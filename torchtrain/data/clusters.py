"""Tasks of `torchtrain prepare` on a cluster: datatrove hands them out by Slurm or Ray.

Its own pool of processes is not used, because it waits for ever for a worker that was killed. Its readers are not used
either: they drop empty documents without counting them, leave out a line that is not JSON with a line in a log, and
end a file at the first byte that is not UTF-8 (datatrove 0.10.1, `readers/base.py`, `readers/jsonl.py`).
"""

import os
import sys
import tempfile
from collections.abc import Container
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, quoted_reason
from torchtrain.config import PrepareConfig
from torchtrain.data.shards import MakeShard
from torchtrain.errors import TasksUnfinished

LOGS = "logs"


def submit_to_slurm(settings: PrepareConfig, maker: MakeShard, name: str, done: Container[int]) -> None:
    """Submit the tasks that are not done as the job `name`. Raises UserError: there is no Slurm."""
    _mark(maker, done)
    try:
        _slurm_executor(settings, maker, maker.work / LOGS, name).run()
    except FileNotFoundError:
        raise UserError("prepare.executor slurm: there is no sbatch here; run it where Slurm is") from None


def slurm_script(settings: PrepareConfig, maker: MakeShard, name: str) -> str:
    """Return the script that is given to sbatch."""
    with tempfile.TemporaryDirectory() as scratch:  # for the folder of logs that datatrove makes
        executor = _slurm_executor(settings, maker, Path(scratch), name)
        pickled = executor.logging_dir.resolve_paths("executor.pik")
        script = executor.get_launch_file_contents(
            executor.get_sbatch_args(min(len(maker.tasks), executor.max_array_size)),
            f"srun  -l -n {executor.nodes_per_task} launch_pickled_pipeline {pickled}",
        )
        return script.replace(scratch, str(maker.work / LOGS))


def run_by_ray(settings: PrepareConfig, maker: MakeShard, done: Container[int]) -> None:
    """Run the tasks that are not done. Raises UserError: Ray is missing. Raises TasksUnfinished: it does not start."""
    _mark(maker, done)
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        raise UserError("prepare.executor ray needs the package ray: pip install ray") from None
    from datatrove.executor import RayPipelineExecutor

    own = not ray.is_initialized()
    if own:  # the cluster that RAY_ADDRESS names, or one of our own
        alone = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": settings.workers, "include_dashboard": False}
        try:
            ray.init(**alone, log_to_driver=False)
        except Exception as error:  # ray raises that itself, where a machine is too slow for it
            raise TasksUnfinished(
                f"Ray does not start: {quoted_reason(error)}; run the command again, or take prepare.executor local"
            ) from None
    try:
        spread = _executor_options(settings, maker, maker.work / LOGS)
        RayPipelineExecutor([maker], mem_per_cpu_gb=settings.memory, **spread).run()
    finally:
        if own:
            ray.shutdown()


def _mark(maker: MakeShard, done: Container[int]) -> None:
    marks = maker.work / LOGS / "completions"
    marks.mkdir(parents=True, exist_ok=True)
    for rank in range(len(maker.tasks)):
        if rank in done:
            (marks / f"{rank:05d}").touch()
        else:
            (marks / f"{rank:05d}").unlink(missing_ok=True)


def _executor_options(settings: PrepareConfig, maker: MakeShard, logs: Path) -> dict[str, Any]:
    from datatrove.utils.logging import logger

    logger.remove()  # this process has lines of its own
    return {"tasks": len(maker.tasks), "workers": settings.workers or -1, "logging_dir": str(logs)}


def _slurm_executor(settings: PrepareConfig, maker: MakeShard, logs: Path, name: str) -> Any:
    from datatrove.executor import SlurmPipelineExecutor

    class SlurmExecutor(SlurmPipelineExecutor):
        def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
            return {name: value for name, value in super().get_sbatch_args(max_array).items() if value is not None}

    slurm, activate = settings.slurm, Path(sys.prefix) / "bin" / "activate"
    unset: Any = None
    return SlurmExecutor(
        [maker],
        time="24:00:00",
        partition=unset,
        qos=unset,
        mem_per_cpu_gb=settings.memory,
        job_name=name,
        env_command=slurm.environment or (f"source {activate}" if activate.exists() else unset),
        sbatch_args=dict(slurm.sbatch),  # they win over those above
        **_executor_options(settings, maker, logs),
    )
