"""Every kind of input, by name: each damages a copy of the valid files, and names the command."""

from benchmarks.fuzz.inputs import Make
from benchmarks.fuzz.kinds import command_line, folders, settings

KINDS: dict[str, Make] = {
    "config": settings.config,
    "override": settings.override,
    "option": command_line.option,
    "place": command_line.place,
    "environment": command_line.environment,
    "model": folders.model,
    "convert": folders.convert,
    "records": folders.records,
    "store": folders.store,
    "run": folders.run_folder,
    "checkpoint": folders.checkpoint,
}
