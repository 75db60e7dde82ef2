"""Runs found by what they are: their name, their configuration, their launch. Imports no torch."""

from pathlib import Path
from typing import Any

from lathe.config.resolve import changes
from lathe.errors import require
from lathe.runs.rundir import NOT_THE_EXPERIMENT, RunDir


def find_runs(log_dir: Path, name: str) -> list[RunDir]:
    """Return all runs called `name`, newest first."""
    runs = [RunDir(path.parent.absolute()) for path in (log_dir / name).glob("[!.]*/config.yaml")]
    return sorted(runs, key=lambda run: (run.started, run.path.name), reverse=True)


def find_unfinished(log_dir: Path, cfg: dict[str, Any]) -> RunDir | None:
    """The newest run of exactly this configuration that has no result yet.

    Raises:
        UserError: a live process is at it: another run of the same would be a duplicate.
    """
    for run in find_runs(log_dir, str(cfg["name"])):
        if not run.complete and run.readable and not changes(run.known_config, cfg, str(run.path), NOT_THE_EXPERIMENT):
            require(not run.busy, f"resume=auto: another process is at {run.path}: wait for it, or leave resume out.")
            return run
    return None


def find_unlike(log_dir: Path, cfg: dict[str, Any]) -> tuple[RunDir, list[str]] | None:
    """The run without a result that differs from this configuration in the fewest keys, and these keys."""
    unlike = []
    for run in find_runs(log_dir, str(cfg["name"])):
        if not run.complete and run.readable and not run.busy:
            lines = changes(run.known_config, cfg, str(run.path), NOT_THE_EXPERIMENT)
            unlike.append((run, [line.split(":")[0] for line in lines]))
    return min(unlike, key=lambda pair: len(pair[1]), default=None)


def find_complete(log_dir: Path, cfg: dict[str, Any]) -> RunDir | None:
    """The newest complete run of exactly this configuration."""
    for run in find_runs(log_dir, str(cfg["name"])):
        if run.complete and run.readable and not changes(run.config, cfg, str(run.path), NOT_THE_EXPERIMENT):
            return run
    return None


def find_launch(log_dir: Path, name: str, launch_id: str, unfinished: bool = True) -> RunDir | None:
    """The newest run that was started under `launch_id`; of the `unfinished` ones, it is the one that a restart
    continues.
    """
    for run in find_runs(log_dir, name):
        if not (unfinished and run.complete) and run.readable and run.environment.get("launch_id") == launch_id:
            return run
    return None
