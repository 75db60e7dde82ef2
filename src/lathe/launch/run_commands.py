"""Commands that do not train: on a run directory, on a configuration, or in this process. Imports no torch."""

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lathe import trust
from lathe.config.compression_plan import methods
from lathe.config.override_parsing import key_of
from lathe.config.resolve import resolve, set_data_folder, with_absolute_paths
from lathe.config.validate import check
from lathe.errors import refuse, require
from lathe.launch.command_checks import (
    check_command,
    check_sweep_words,
    launch_checks,
    make_paths_absolute,
    typed_overrides,
)
from lathe.launch.devices import count_processes, read_nodes
from lathe.launch.elastic import call_job, run_job
from lathe.launch.error_reporting import raise_on_signal, report_error
from lathe.launch.external_launch import detect_external_launch
from lathe.launch.launcher import is_sweep_failure
from lathe.runs import rundir


def launch_on_run(cfg: DictConfig, job: str) -> Any:
    """Run `job`, a function named `module:function`, on the run directory `cfg.run`, which it only reads.

    The job gets the run's own configuration with the device, strategy, precision and evaluation batch of `cfg`, and
    `cfg` itself as `request`.
    """
    try:
        if "export" in cfg:  # the choice of the group `target`; commands on a run use only its name
            typed = cfg.get("export")
            require(typed is None, f"export={typed} is set by target. Use target={typed}.")
            cfg.export = HydraConfig.get().runtime.choices.get("target")
            require(bool(cfg.export), "target: expected one choice such as target=onnx, not a list.")
        _split_checkpoint_path(cfg)
        request = resolve(cfg)
        check_command(cfg, request)
        trust.allow(request)
        run = rundir.open_run(request["run"], "run")
        run.warn_of_changes()
        resolved = run.config
        resolved["paths"]["run_dir"] = str(run.path)
        resolved["trainer"] |= {key: value for key, value in request["trainer"].items() if value is not None}
        resolved["strategy"] = request["strategy"]
        if request.get("precision") is not None:
            resolved["precision"] = request["precision"]
        if request["batch_size"] is not None:
            resolved["data"]["eval_batch_size"] = request["batch_size"]
        set_data_folder(resolved, (request.get("data") or {}).get("folder"))
        resolved["request"] = request
        refuse(check(resolved, saved="parts"))
        _check_one_machine(request)
        with raise_on_signal():
            return run_job(job, resolved, count_processes(resolved), request["launch"])
    except Exception as error:
        if is_sweep_failure(error):
            raise
        sys.exit(report_error(error))


def _split_checkpoint_path(cfg: DictConfig) -> None:
    """Split run=<directory>/checkpoints/<name>.ckpt into run=<directory> and checkpoint=<name>."""
    path = Path("" if OmegaConf.is_missing(cfg, "run") else str(cfg.run))
    run = next((above.parent for above in path.parents if above.name == "checkpoints"), None)
    if path.suffix != ".ckpt" or run is None or not (run / "config.yaml").is_file():
        return
    name = str(path.relative_to(run / "checkpoints").with_suffix(""))  # own/... for a user's own ModelCheckpoint
    other = any(key_of(word) == "checkpoint" for word in typed_overrides()) and cfg.get("checkpoint") != name
    require("checkpoint" in cfg, f"run={path}: expected a run directory, not a checkpoint. Use run={run}.")
    require(not other, f"run={path} is another checkpoint than checkpoint={cfg.get('checkpoint')}. Leave one out.")
    cfg.run, cfg.checkpoint = str(run), name


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
        run = resolved["resume"]
        require(run is None, f"resume={run}: {command}.py starts a new run. Leave resume out.")
        mode, names = resolved["ckpt_mode"], ",".join(methods(resolved.get("compression") or {}))
        require(mode == "weights", f"ckpt_mode={mode} restores the optimizer's learning rate. Use ckpt_mode=weights.")
        require(not names, f"compression={names} needs a whole run. Leave it out.")
        _check_one_machine(resolved)
        if resolved["find"]["output"] is None:
            resolved["find"]["output"] = str(Path(resolved["paths"]["log_dir"]) / command / str(resolved["name"]))
        processes = count_processes(resolved)
        message = f"{command}.py takes one device, and this run has {processes}. Add trainer.devices=1."
        require(processes == 1 or not one_device, message)
        with raise_on_signal():
            return run_job(job, resolved, processes, resolved["launch"])
    except Exception as error:
        sys.exit(report_error(error))


def _check_one_machine(cfg: dict[str, Any]) -> None:
    nodes = read_nodes(cfg["launch"])
    require(
        not nodes.several and nodes.launch_id is None, "launch.nodes and launch.id are for training. Leave them out."
    )


def run_inline(cfg: DictConfig, job: str) -> None:
    """Call `job`, a function named `module:function`, in this process with the resolved `cfg`.

    Exits with the code that the function returns, or 0 if it returns something else.
    """
    code: Any
    try:
        with raise_on_signal():
            request = resolve(cfg)
            check_command(cfg, request)
            code = call_job(job, request)
    except Exception as error:  # before Hydra prints a line
        code = report_error(error)
    sys.exit(code if isinstance(code, int) else 0)
