"""From a composed configuration to a training run: one process, or one per device under torch's elastic agent.

Hydra has composed once, in this process. Every rank receives the resolved configuration as plain data; none runs Hydra
again. torch is imported only when the configuration has passed all checks.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lathe import trust
from lathe.config.resolve import differences, resolve, with_absolute_paths
from lathe.config.validate import check
from lathe.errors import Stopped, UserError, refuse
from lathe.launch.command_checks import (
    check_command,
    launch_checks,
    make_paths_absolute,
    saved_overrides,
    typed_overrides,
)
from lathe.launch.devices import count_processes, read_nodes, run_lookup_lock
from lathe.launch.elastic import call_job, run_job
from lathe.launch.error_reporting import report_error
from lathe.launch.external_launch import ExternalLaunch, detect_external_launch
from lathe.launch.resume import find_run, needs_receipt, resume_overrides, stopping_key
from lathe.launch.sweep import check_sweep_words, job_of
from lathe.launch.threads import choose_threads
from lathe.runs import rundir


def launch(cfg: DictConfig, job: str) -> Any:
    """Run `job`, a training function named `module:function`, on the resolved `cfg`, and return rank 0's objective.

    The job gets a run directory first: a new one, or the one that `resume` names.
    """
    try:
        return launch_run(cfg, job)[0]
    except Exception as error:
        if is_sweep_failure(error):
            raise
        sys.exit(report_error(error))


def is_sweep_failure(error: Exception) -> bool:
    """True if `error` ends one job of a sweep, which Hydra handles; a signal ends the whole sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN and not isinstance(error, Stopped)


def launch_run(cfg: DictConfig, job: str) -> tuple[Any, str]:
    """Run `job` as `launch` does; returns rank 0's objective and the run directory.

    Raises:
        UserError: the configuration is invalid, before data or devices are used.
    """
    check_sweep_words(typed_overrides())
    typed, external = resolve(cfg), detect_external_launch()
    checks = launch_checks(external)
    # A run that is resumed or joined brings its own configuration, which is checked instead.
    has_own_config = typed.get("resume") is not None or (external is not None and external.rank != 0)
    check_command(cfg, typed, None if has_own_config else checks)
    sweep_job = job_of(cfg)
    make_paths_absolute(cfg)
    typed = resolve(cfg)
    trust.allow(typed)
    nodes = read_nodes(typed["launch"], external)
    external = None if nodes.several else external  # srun's task on each node is that node's agent
    if sweep_job is not None and typed["resume"] is None:
        nodes = replace(nodes, launch_id=sweep_job.launch_id)
    if external is not None and external.rank != 0:
        with external:
            received = external.receive(typed)
            return (None, "") if received is None else (call_job(job, received), received["paths"]["run_dir"])
    log_dir = Path(typed["paths"]["log_dir"])
    shares_run = nodes.launch_id is not None or typed["resume"] == "auto"  # with other nodes or commands
    with ExitStack() as locks:
        with run_lookup_lock(log_dir) if shares_run else nullcontext():
            found, resolved = find_run(typed, external, nodes)
            if found is not None:
                refuse(check(resolved, "train", checks, saved="run"))
            elif has_own_config:
                check_command(cfg, resolve(cfg), checks)
            processes = count_processes(resolved, external, nodes)
            complete = found is not None and _is_complete(found, resolved)
            _set_threads(resolved, processes, found, silent=complete)
            if found is None:
                resolved = {**with_absolute_paths(resolved), "resume": None}
                launch_id = external.launch_id if external else nodes.launch_id
                run = rundir.create(log_dir, resolved, saved_overrides(resolved), launch_id)
            else:
                run = found
            if sweep_job is not None:
                sweep_job.found(run.path)
            if complete and not needs_receipt(run, resolved):
                print(f"{run.path} is complete; raise {stopping_key(run)} to train it further.")
            else:
                locks.enter_context(run.locked(shared=nodes.several))
        if complete:
            return _finish_complete(run, resolved, external)
        if found is not None:
            run.warn_of_changes()
        reopened: AbstractContextManager[Any] = nullcontext()
        if found is not None and (run.complete or not nodes.several):
            words = resume_overrides(resolved) if typed["resume"] not in (None, "auto") else []
            reopened = run.reopened(resolved, words)
        if sweep_job is not None:  # for what a run reports to its search; not saved with the run
            resolved = {**resolved, "sweep": {"folder": str(sweep_job.folder), "job": sweep_job.number}}
        with _removing_unbegun(run, is_new=found is None), external or nullcontext(), reopened:
            if external is not None:
                external.send(resolved)
            result = run_job(job, resolved, 1 if external else processes, resolved["launch"], nodes)
    return (result or {}).get("objective"), str(run.path)


def _is_complete(run: rundir.RunDir, cfg: dict[str, Any]) -> bool:
    """True if there is nothing left to train."""
    return run.complete and not differences(run.config, cfg, rundir.NOT_THE_EXPERIMENT)


def _set_threads(cfg: dict[str, Any], processes: int, run: rundir.RunDir | None, silent: bool) -> None:
    """Choose launch.threads: for a resumed run the number that it was started with."""
    recorded = None if run is None else run.known_config["launch"].get("threads")
    cfg["launch"]["threads"], reason = choose_threads(cfg["launch"]["threads"], processes, recorded)
    if reason and not silent:
        print(f"CPU threads per process: {cfg['launch']['threads']} ({reason})", flush=True)


def _finish_complete(run: rundir.RunDir, cfg: dict[str, Any], external: ExternalLaunch | None) -> tuple[Any, str]:
    """Measure the receipt of a complete run, if it lacks one; return the run's objective and path."""
    if external is not None:
        with external:
            external.dismiss(cfg)
    if needs_receipt(run, cfg):
        print(f"{run.path} is complete but for its receipt, which is measured now.")
        call_job("lathe.training.compression_finalize:complete_receipt", cfg)
    return run.result.get("objective"), str(run.path)


@contextmanager
def _removing_unbegun(run: rundir.RunDir, is_new: bool) -> Iterator[None]:
    """Leave no directory of a new run that fails before it has begun."""
    try:
        yield
    except BaseException as error:  # also Ctrl-C
        if isinstance(error, FileNotFoundError) and not run.path.is_dir():
            raise UserError(f"{run.path} was moved or removed during training. Resume it where it is.") from error
        if is_new and not run.begun:
            run.remove()
        raise
