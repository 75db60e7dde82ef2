"""The run that a command resumes or joins, and the configuration it continues with. Imports no torch.

Few runs continue another, so the launcher imports this module only then.
"""

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.types import RunMode

from lathe.config.override_parsing import as_typed, key_of
from lathe.config.resolve import (
    changes,
    data_folder_of,
    differences,
    flatten,
    resolve,
    set_data_folder,
    with_absolute_paths,
)
from lathe.errors import UserError, require
from lathe.launch.command_checks import saved_overrides, typed_overrides
from lathe.launch.devices import Nodes
from lathe.launch.external_launch import ExternalLaunch
from lathe.runs import run_discovery
from lathe.runs.rundir import ENDS, NOT_THE_EXPERIMENT, RunDir, display_path, open_run

NOT_THE_RUNS = ("resume", "launch", "hydra", "sweep", "trusted")  # groups that belong to the command
FOLDERS = ("data.folder", "data.source.folder")


def find_run(
    cfg: dict[str, Any], external: ExternalLaunch | None, nodes: Nodes
) -> tuple[RunDir | None, dict[str, Any]]:
    """The run to resume or to join, if there is one, and the configuration to use."""
    log_dir, resume = Path(cfg["paths"]["log_dir"]), cfg["resume"]
    if resume not in (None, "auto"):
        run = open_run(resume, "resume")
        if run.complete:
            _ = run.result  # fails for a damaged file
        else:
            _report_restart(run)
        return run, _relocated(run, _resumed_config(run, resume), cfg)
    previous = None
    if resume == "auto":
        message = f"resume=auto and launch.id={nodes.launch_id} both look up a run. Leave resume out."
        require(nodes.launch_id is None, message)
        previous = _find_same(log_dir, cfg)
    elif nodes.launch_id is not None:
        previous = _find_joined(log_dir, cfg, nodes.launch_id)
    elif external is not None and external.restarted:
        previous = run_discovery.find_launch(log_dir, str(cfg["name"]), external.launch_id)
    if previous is None:
        return None, cfg
    if nodes.several and not previous.complete and not previous.last.exists():
        print(f"Joining {previous.path}")
    elif not previous.complete:
        _report_restart(previous)
    return previous, _relocated(previous, previous.config, cfg)


def _find_same(log_dir: Path, cfg: dict[str, Any]) -> RunDir | None:
    """The run that resume=auto continues: an unfinished one of this configuration.

    A complete one is taken for a job of a sweep that is started again, or if it lacks its receipt.
    """
    unfinished = run_discovery.find_same(log_dir, cfg)
    if unfinished is not None:
        return unfinished
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    complete = run_discovery.find_same(log_dir, cfg, complete=True)
    if complete is not None and (is_sweep or complete.lacks_receipt(cfg)):
        return complete
    if complete is not None:
        print(f"{complete.path} is a complete run of this configuration; resume=auto starts another.")
    unlike = None if is_sweep else run_discovery.find_unlike(log_dir, cfg)
    if unlike is not None:
        run, keys = unlike
        named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more keys" if len(keys) > 3 else "")
        print(f"resume=auto: {display_path(run.path)} is unfinished but differs in {named}. A new run begins.")
    return None


def _find_joined(log_dir: Path, cfg: dict[str, Any], launch_id: str) -> RunDir | None:
    """The run of this launch, which another node has created or an earlier start of the same command."""
    run = run_discovery.find_launch(log_dir, str(cfg["name"]), launch_id, unfinished=False)
    changed = changes(run.config, cfg, str(run.path), NOT_THE_EXPERIMENT) if run else []
    if run and changed:
        require(
            not run.complete, f"launch.id={launch_id} is the name of {run.path}, which is complete. Choose another."
        )
        print(f"{run.path} keeps its own configuration; this command differs in {'; '.join(changed)}")
    return run


def _report_restart(run: RunDir) -> None:
    if run.begun and not run.last.exists():
        print(f"{run.path} has no checkpoints/last.ckpt to continue from: it starts again at step 0.")


def _relocated(run: RunDir, saved: dict[str, Any], cfg: dict[str, Any]) -> dict[str, Any]:
    """The run's configuration with the directory where it is now, and the `launch` group of this command."""
    saved["launch"], saved["paths"] = cfg["launch"], {**saved["paths"], "run_dir": str(run.path)}
    return saved


def resume_overrides(cfg: dict[str, Any]) -> list[str]:
    """The overrides of a command with resume=<run> that its run keeps, since they may have changed it."""
    return [word for word in saved_overrides(cfg) if key_of(word).split(".")[0] not in (*NOT_THE_RUNS, "paths")]


def _resumed_config(run: RunDir, resume: str) -> dict[str, Any]:
    """The run's own configuration; the command may raise its end, change its tags, and say where its data are now."""
    saved = run.config
    typed = [item for item in typed_overrides() if key_of(item).split(".")[0] not in NOT_THE_RUNS]
    if not typed:
        return saved
    data_is_missing = not os.path.exists(data_folder_of(saved) or os.curdir)
    moved = {key_of(word): word for word in typed if key_of(word) in FOLDERS and data_is_missing}
    own, flat = [], flatten(saved)
    for word in run.overrides:
        key = key_of(word)
        if key in moved:
            word = moved[key]
        elif key in FOLDERS and isinstance(folder := flat.get(key), str):
            word = f"{word.partition('=')[0]}={as_typed(folder)}"  # it may be relative to another working directory
        own.append(word)
    try:
        before, requested = (
            with_absolute_paths(resolve(compose(config_name=HydraConfig.get().job.config_name, overrides=overrides)))
            for overrides in (own, own + typed)
        )
    except MissingConfigException as error:
        choice = "=".join(str(error.missing_cfg_file).rsplit("/", 1))
        message = f"resume={resume}: the run was started with {choice}, which is missing here. Add its --config-dir."
        raise UserError(message) from error
    if requested.get("tags") != before.get("tags"):
        saved["tags"] = requested["tags"]
    if moved:
        set_data_folder(saved, data_folder_of(requested))
    raised, refused = [], []
    for line in differences(before, requested, NOT_THE_EXPERIMENT):
        group, _, rest = line.split(":", 1)[0].partition(".")
        name = rest.partition(".")[0]
        old, new = (tree["trainer"].get(name) for tree in (saved, requested))
        if group == "trainer" and name in ENDS and _is_later(name, old, new):
            saved["trainer"][name] = new
            raised.append(name)
        else:
            refused.append(line)
    only_devices = all(re.match(r"trainer\.(devices|num_nodes|accelerator):|strategy\b", line) for line in refused)
    other = f"ckpt_path={resume} ckpt_mode=trainer" if only_devices else f"ckpt_path={resume}"
    problem = f"resume={resume} keeps the run's own configuration, but the command changes {'; '.join(refused)}"
    require(not refused, f"{problem}. Leave that out, or start a new run with {other}.")
    if run.complete and raised:
        end = run.stopping_key
        message = f"resume={resume}: {end} ended this run, so trainer.{raised[0]} has no effect. Raise {end} as well."
        require(end.removeprefix("trainer.") in raised, message)
        can_continue = run.last.exists() or not run.result.get("steps")
        require(can_continue, f"resume={resume}: its checkpoints/last.ckpt is missing. Start a new run with ckpt_path.")
    return saved


def _is_later(name: str, old: Any, new: Any) -> bool:
    if name != "max_time":
        return isinstance(new, int) and (new == -1 or (old or 0) <= new)
    if old is None or new is None:
        return new is None
    old, new = (
        timedelta(**limit)  # units, or DD:HH:MM:SS
        if isinstance(limit, dict)
        else timedelta(**dict(zip(("days", "hours", "minutes", "seconds"), map(int, limit.split(":")), strict=True)))
        for limit in (old, new)
    )
    return bool(new >= old)
