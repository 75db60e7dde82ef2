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
from lathe.config.validate import check
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
from lathe.launch.devices import choose_threads, count_processes, read_nodes
from lathe.launch.elastic import call_job, run_job
from lathe.launch.error_reporting import report_error
from lathe.launch.external_launch import detect_external_launch
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
    """Run `job` as `launch` does; returns rank 0's objective and the run directory."""
    check_sweep_words(typed_overrides())
    typed, external = resolve(cfg), detect_external_launch()
    checks = launch_checks(external)
    # A run that is resumed or joined brings its own configuration, which is checked instead.
    has_own_config = typed.get("resume") is not None or (external is not None and external.rank != 0)
    check_command(cfg, typed, None if has_own_config else checks)
    sweep_job = take_sweep_job(cfg)
    make_paths_absolute(cfg)
    typed = resolve(cfg)
    trust.allow(typed)
    nodes = read_nodes(typed["launch"], external)
    external = None if nodes.several else external  # srun's task on each node is that node's agent
    if sweep_job is not None and typed["resume"] is None:  # a restart of the job finds its run by this name
        nodes = replace(nodes, launch_id=f"{sweep_job[0].name}-{sweep_job[1]:05}")

    if external is not None and external.rank != 0:
        with external:
            received = external.broadcast(typed)
            return (None, "") if received is None else (call_job(job, received), received["paths"]["run_dir"])

    log_dir, found, resolved = Path(typed["paths"]["log_dir"]), None, typed
    lookup: AbstractContextManager[Any] = nullcontext()
    if nodes.launch_id is not None or typed["resume"] == "auto":
        from filelock import FileLock

        log_dir.mkdir(parents=True, exist_ok=True)
        lookup = FileLock(log_dir / ".arriving")  # other nodes or commands may look up the same run at the same time
    with ExitStack() as locks:
        with lookup:
            if typed["resume"] is not None or nodes.launch_id is not None or external is not None:
                from lathe.launch import resume  # few runs continue another

                found, resolved = resume.find_run(typed, external, nodes)
            if found is not None:
                refuse(check(resolved, "train", checks, saved="run"))
            elif has_own_config:
                check_command(cfg, resolve(cfg), checks)
            processes = count_processes(resolved, external, nodes)
            # a resumed run computes with the number of threads that it was started with
            recorded = None if found is None else found.known_config["launch"].get("threads")
            threads, reason = choose_threads(resolved["launch"]["threads"], processes, recorded)
            resolved["launch"]["threads"] = threads
            if found is None:
                resolved = {**with_absolute_paths(resolved), "resume": None}
                launch_id = external.launch_id if external else nodes.launch_id
                run = rundir.create(log_dir, resolved, saved_overrides(resolved), launch_id)
            else:
                run = found
            if sweep_job is not None:
                from lathe.runs.optuna_study import write_result  # of a sweep alone

                write_result(*sweep_job, "run_dir", str(run.path))
            complete = run.complete and not differences(run.config, resolved, rundir.NOT_THE_EXPERIMENT)
            lacks_receipt = complete and resume.needs_receipt(run, resolved)
            if not complete or lacks_receipt:
                locks.enter_context(run.locked(shared=nodes.several))

        if complete:  # nothing is left to train
            if external is not None:
                with external:
                    external.broadcast(resolved)
            if lacks_receipt:
                print(f"{run.path} is complete but for its receipt, which is measured now.")
                call_job("lathe.training.compression_finalize:complete_receipt", resolved)
            else:
                print(f"{run.path} is complete; raise {resume.stopping_key(run)} to train it further.")
            return run.result.get("objective"), str(run.path)

        if reason:
            print(f"CPU threads per process: {threads} ({reason})", flush=True)
        reopened: AbstractContextManager[Any] = nullcontext()
        if found is not None:
            run.warn_of_changes()
            if run.complete or not nodes.several:
                words = resume.resume_overrides(resolved) if typed["resume"] not in (None, "auto") else []
                reopened = run.reopened(resolved, words)
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
            if found is None and not run.begun:
                run.remove()
            raise
    return (result or {}).get("objective"), str(run.path)
