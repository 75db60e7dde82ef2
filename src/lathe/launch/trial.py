"""From the configuration of a run to a job that tries it out, and leaves no run. Imports no torch."""

import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lathe import trust
from lathe.config.composed import pinned, resolve
from lathe.config.stages import methods
from lathe.errors import require
from lathe.launch.agent import execute
from lathe.launch.continued import typed_words
from lathe.launch.devices import count_processes
from lathe.launch.nodes import read_nodes
from lathe.launch.outer import detect_outer
from lathe.launch.start import check_together, check_typed
from lathe.launch.stops import stoppable
from lathe.launch.sweep import check_sweep_words
from lathe.launch.telling import tell


def launch_trial(cfg: DictConfig, job: str, alone: bool = False) -> Any:
    """Runs `job` on the configuration of the run that train.py would make of the same overrides, without a run
    directory. The verb's own keys stand under `find`; one that is to be `alone` takes one device.

    Raises:
        UserError: as `launch`; or the run can't be tried out by itself.
    """
    try:
        verb = str(HydraConfig.get().job.config_name)
        require(HydraConfig.get().mode != RunMode.MULTIRUN, f"-m: {verb}.py tries one configuration: leave -m out.")
        require(detect_outer() is None, f"{verb}.py starts its processes itself: start it with python.")
        check_sweep_words(typed_words())
        check_typed(cfg, resolve(cfg), check_together(None))
        for key in ("data_dir", "log_dir"):
            cfg.paths[key] = os.path.abspath(cfg.paths[key])
        resolved = pinned(resolve(cfg))
        trust.allow(resolved)
        _check_trial(resolved, verb)
        if resolved["find"]["output"] is None:
            resolved["find"]["output"] = str(Path(resolved["paths"]["log_dir"]) / verb / str(resolved["name"]))
        processes = count_processes(resolved)
        require(
            processes == 1 or not alone,
            f"{verb}.py tries one device, and this run takes {processes}: add trainer.devices=1, and give each device "
            "what fits there.",
        )
        with stoppable():
            return execute(job, resolved, processes, resolved["launch"])
    except Exception as error:
        sys.exit(tell(error))


def _check_trial(cfg: dict[str, Any], verb: str) -> None:
    require(cfg["resume"] is None, f"resume={cfg['resume']}: {verb}.py tries a new run: leave resume out.")
    require(
        cfg["ckpt_mode"] == "weights",
        f"ckpt_mode={cfg['ckpt_mode']} takes over the optimizer with its rate: {verb}.py takes ckpt_mode=weights.",
    )
    names = ",".join(methods(cfg.get("compression") or {}))
    require(not names, f"compression={names} acts in the course of a whole run: {verb}.py tries the dense one.")
    nodes = read_nodes(cfg["launch"])
    require(not nodes.several and nodes.launch_id is None, f"launch.nodes and launch.id: {verb}.py takes one machine.")
    output = cfg["find"]["output"]
    require(output is None or not Path(output).is_file(), f"find.output={output} is a file: name a folder.")
