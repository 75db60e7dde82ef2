"""From a composed configuration to a training run: one process, or one per device under torch's elastic agent.

Hydra has composed once, in this process. Every rank receives the resolved configuration as plain data; none runs Hydra
again. torch is imported only when the configuration has passed all checks.
"""

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lathe import trust
from lathe.config.resolve import differences, resolve, with_absolute_paths
from lathe.config.validate import CrossCheck, check
from lathe.errors import Stopped, UserError, refuse
from lathe.launch.command_checks import (
    check_command,
    check_sweep_words,
    launch_checks,
    make_paths_absolute,
    saved_overrides,
    take_sweep_job,
    typed_overrides,
)
from lathe.launch.devices import Nodes, choose_threads, count_processes, read_nodes
from lathe.launch.elastic import call_job, run_job
from lathe.launch.error_reporting import report_error
from lathe.launch.external_launch import ExternalLaunch, detect_external_launch
from lathe.runs import rundir
from lathe.runs.rundir import RunDir


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
    """Run `job` as `launch` does; returns rank 0's objective and the run directory."""
    external = detect_external_launch()
    checks = launch_checks(external)
    requested, sweep_job = _checked_command(cfg, external, checks)
    trust.allow(requested)
    nodes = read_nodes(requested["launch"], external)
    external = None if nodes.several else external  # srun's task on each node is that node's agent
    if sweep_job is not None and requested["resume"] is None:  # a restart of the job finds its run by this name
        nodes = replace(nodes, launch_id=f"{sweep_job[0].name}-{sweep_job[1]:05}")
    if external is not None and external.rank != 0:
        with external:
            received = external.broadcast(requested)
            return (None, "") if received is None else (call_job(job, received), received["paths"]["run_dir"])

    with ExitStack() as locks:
        with _lookup_lock(requested, nodes):
            previous, resolved = _find_previous(cfg, requested, external, nodes, checks)
            processes = count_processes(resolved, external, nodes)
            # a resumed run computes with the number of threads that it was started with
            recorded = None if previous is None else previous.known_config["launch"].get("threads")
            threads, reason = choose_threads(resolved["launch"]["threads"], processes, recorded)
            resolved["launch"]["threads"] = threads
            if previous is None:
                resolved = {**with_absolute_paths(resolved), "resume": None}
                launch_id = external.launch_id if external else nodes.launch_id
                log_dir = Path(resolved["paths"]["log_dir"])
                run = rundir.create(log_dir, resolved, saved_overrides(resolved), launch_id)
            else:
                run = previous
            if sweep_job is not None:
                from lathe.runs.optuna_study import write_result  # of a sweep alone

                write_result(*sweep_job, "run_dir", str(run.path))
            is_complete = run.complete and not differences(run.config, resolved, rundir.NOT_THE_EXPERIMENT)
            if not is_complete or run.lacks_receipt(resolved):
                locks.enter_context(run.locked(shared=nodes.several))
        if is_complete:
            _report_complete(run, resolved, external)
            return run.result.get("objective"), str(run.path)
        if reason:
            print(f"CPU threads per process: {threads} ({reason})", flush=True)
        reopened = nullcontext() if previous is None else _reopened(run, requested, resolved, nodes)
        if sweep_job is not None:  # for what a run reports to its search; not saved with the run
            resolved = {**resolved, "sweep": {"folder": str(sweep_job[0]), "job": sweep_job[1]}}
        try:
            with external or nullcontext(), reopened:
                if external is not None:
                    external.broadcast(resolved, resolved)
                result = run_job(job, resolved, 1 if external else processes, resolved["launch"], nodes)
        except BaseException as error:  # also Ctrl-C
            if isinstance(error, FileNotFoundError) and not run.path.is_dir():
                raise UserError(f"{run.path} was moved or removed during training. Resume it where it is.") from error
            if previous is None and not run.begun:
                run.remove()
            raise
    return (result or {}).get("objective"), str(run.path)


def _checked_command(
    cfg: DictConfig, external: ExternalLaunch | None, checks: tuple[CrossCheck, ...]
) -> tuple[dict[str, Any], tuple[Path, int] | None]:
    """Check the command and return its resolved configuration, and its job in a sweep as by `take_sweep_job`."""
    check_sweep_words(typed_overrides())
    requested = resolve(cfg)
    # A run that is resumed or joined brings its own configuration, which is checked instead.
    has_own_config = requested.get("resume") is not None or (external is not None and external.rank != 0)
    check_command(cfg, requested, None if has_own_config else checks)
    sweep_job = take_sweep_job(cfg)
    make_paths_absolute(cfg)
    return resolve(cfg), sweep_job


def _lookup_lock(requested: dict[str, Any], nodes: Nodes) -> AbstractContextManager[Any]:
    """Return a lock for looking up a run, as other nodes or commands may look up the same run at the same time."""
    if nodes.launch_id is None and requested["resume"] != "auto":
        return nullcontext()
    from filelock import FileLock

    log_dir = Path(requested["paths"]["log_dir"])
    log_dir.mkdir(parents=True, exist_ok=True)
    return FileLock(log_dir / ".arriving")


def _find_previous(
    cfg: DictConfig,
    requested: dict[str, Any],
    external: ExternalLaunch | None,
    nodes: Nodes,
    checks: tuple[CrossCheck, ...],
) -> tuple[RunDir | None, dict[str, Any]]:
    """Return the run to continue, if there is one, and the configuration to use, which is checked."""
    if requested["resume"] is None and nodes.launch_id is None and external is None:
        return None, requested
    from lathe.launch import resume  # few runs continue another

    previous, resolved = resume.find_run(requested, external, nodes)
    if previous is not None:
        refuse(check(resolved, "train", checks, saved="run"))
    elif requested["resume"] is not None or nodes.several:  # not checked yet
        check_command(cfg, resolve(cfg), checks)
    return previous, resolved


def _report_complete(run: RunDir, resolved: dict[str, Any], external: ExternalLaunch | None) -> None:
    """Print that nothing is left to train, or measure the receipt that a complete run lacks."""
    if external is not None:
        with external:
            external.broadcast(resolved)
    if run.lacks_receipt(resolved):
        print(f"{run.path} is complete but for its receipt, which is measured now.")
        call_job("lathe.training.compression_finalize:complete_receipt", resolved)
    else:
        print(f"{run.path} is complete; raise {run.stopping_key} to train it further.")


def _reopened(
    run: RunDir, requested: dict[str, Any], resolved: dict[str, Any], nodes: Nodes
) -> AbstractContextManager[None]:
    """Return the context in which a previous run is continued; of several nodes, only the first reopens it."""
    from lathe.launch import resume

    run.warn_of_changes()
    if nodes.several and not run.complete:
        return nullcontext()
    changed = resume.resume_overrides(resolved) if requested["resume"] not in (None, "auto") else []
    return run.reopened(resolved, changed)
