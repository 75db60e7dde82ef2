"""Try out the configuration of a run without leaving a run directory: lr_find, batch_find. Imports no torch."""

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lathe import trust
from lathe.config.compression_plan import methods
from lathe.config.resolve import resolve, with_absolute_paths
from lathe.errors import require
from lathe.launch.command_checks import check_command, launch_checks, make_paths_absolute, typed_overrides
from lathe.launch.devices import count_processes
from lathe.launch.elastic import run_job
from lathe.launch.error_reporting import report_error
from lathe.launch.external_launch import detect_external_launch
from lathe.launch.multi_node import read_nodes
from lathe.launch.signals import raise_on_signal
from lathe.launch.sweep import check_sweep_words


def launch_dry_run(cfg: DictConfig, job: str, one_device: bool = False) -> Any:
    """Run `job` on the configuration that train.py would use for the same overrides; the command's keys are in `find`.

    A job for `one_device` refuses a run of several.
    """
    try:
        command = str(HydraConfig.get().job.config_name)
        require(HydraConfig.get().mode != RunMode.MULTIRUN, f"{command}.py takes one configuration. Leave -m out.")
        require(detect_external_launch() is None, f"{command}.py starts its processes itself. Start it with python.")
        check_sweep_words(typed_overrides())
        check_command(cfg, resolve(cfg), launch_checks(None))
        make_paths_absolute(cfg)
        resolved = with_absolute_paths(resolve(cfg))
        trust.allow(resolved)
        _check_dry_run(resolved, command)
        if resolved["find"]["output"] is None:
            resolved["find"]["output"] = str(Path(resolved["paths"]["log_dir"]) / command / str(resolved["name"]))
        processes = count_processes(resolved)
        require(
            processes == 1 or not one_device,
            f"{command}.py takes one device, and this run has {processes}. Add trainer.devices=1.",
        )
        with raise_on_signal():
            return run_job(job, resolved, processes, resolved["launch"])
    except Exception as error:
        sys.exit(report_error(error))


def _check_dry_run(cfg: dict[str, Any], command: str) -> None:
    require(cfg["resume"] is None, f"resume={cfg['resume']}: {command}.py starts a new run. Leave resume out.")
    require(
        cfg["ckpt_mode"] == "weights",
        f"ckpt_mode={cfg['ckpt_mode']} restores the optimizer's learning rate. Use ckpt_mode=weights.",
    )
    names = ",".join(methods(cfg.get("compression") or {}))
    require(not names, f"compression={names} needs a whole run. Leave it out.")
    nodes = read_nodes(cfg["launch"])
    require(
        not nodes.several and nodes.launch_id is None,
        f"launch.nodes and launch.id: {command}.py runs on one machine. Leave them out.",
    )
    output = cfg["find"]["output"]
    require(output is None or not Path(output).is_file(), f"find.output={output} is a file. Give a folder.")
