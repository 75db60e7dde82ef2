"""The run that a command resumes or joins, and the configuration it continues with. Imports no torch."""

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.types import RunMode

from lathe.config.compression_plan import methods
from lathe.config.override_parsing import as_typed, key_of
from lathe.config.resolve import changes, data_folder_of, differences, resolve, set_data_folder, with_absolute_paths
from lathe.errors import UserError, require
from lathe.launch.command_checks import saved_overrides, typed_overrides
from lathe.launch.devices import Nodes
from lathe.launch.external_launch import ExternalLaunch
from lathe.runs.rundir import ENDS, NOT_THE_EXPERIMENT, RunDir, display_path, open_run

NOT_THE_RUNS = ("resume", "launch", "hydra", "sweep", "trusted")  # groups that belong to the command
FOLDERS = ("data.folder", "data.source.folder")


def find_run(
    cfg: dict[str, Any], external: ExternalLaunch | None, nodes: Nodes
) -> tuple[RunDir | None, dict[str, Any]]:
    """The run to resume or to join, if there is one, and the configuration to use.

    Raises:
        UserError: `cfg` names a run in two ways, or one that can't be resumed like this.
    """
    log_dir, resume = Path(cfg["paths"]["log_dir"]), cfg["resume"]
    if resume is None and nodes.launch_id is None and external is None:
        return None, cfg
    from lathe.runs import run_discovery  # few runs continue another

    found = None
    if resume == "auto":
        require(
            nodes.launch_id is None,
            f"resume=auto and launch.id={nodes.launch_id} both look up a run. Leave resume out.",
        )
        found = run_discovery.find_unfinished(log_dir, cfg)
        found = found or _unless_done(run_discovery.find_complete(log_dir, cfg), cfg)
        if found is None and HydraConfig.get().mode != RunMode.MULTIRUN:
            _report_differences(run_discovery.find_unlike(log_dir, cfg))
    elif resume is not None:
        run = open_run(resume, "resume")
        if run.complete:
            _ = run.result  # fails for a damaged file
        else:
            _report_restart(run)
        return run, _resumed_config(run, cfg)
    elif nodes.launch_id is not None:
        found = run_discovery.find_launch(log_dir, str(cfg["name"]), nodes.launch_id, unfinished=False)
        changed = changes(found.config, cfg, str(found.path), NOT_THE_EXPERIMENT) if found else []
        if found and changed:
            require(
                not found.complete,
                f"launch.id={nodes.launch_id} is the name of {found.path}, which is complete. Choose another.",
            )
            print(f"{found.path} keeps its own configuration; this command differs in {'; '.join(changed)}")
    elif external is not None and external.restarted:
        found = run_discovery.find_launch(log_dir, str(cfg["name"]), external.launch_id)
    if found is None:
        return None, cfg
    if nodes.several and not found.complete and not found.last.exists():
        print(f"Joining {found.path}")
    elif not found.complete:
        _report_restart(found)
    return found, _relocated(found, found.config, cfg)


def _report_restart(run: RunDir) -> None:
    if run.begun and not run.last.exists():
        print(f"{run.path} has no checkpoints/last.ckpt to continue from: it starts again at step 0.")


def _report_differences(unlike: tuple[RunDir, list[str]] | None) -> None:
    """Print in which keys the most similar unfinished run differs."""
    if unlike is not None:
        run, keys = unlike
        named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more keys" if len(keys) > 3 else "")
        print(
            f"resume=auto: no unfinished run has this configuration; {display_path(run.path)} differs in {named}. A "
            "new run begins."
        )


def resume_overrides(cfg: dict[str, Any]) -> list[str]:
    """The overrides of a command with resume=<run> that its run keeps, since they may have changed it."""
    return [word for word in saved_overrides(cfg) if key_of(word).split(".")[0] not in (*NOT_THE_RUNS, "paths")]


def _unless_done(found: RunDir | None, cfg: dict[str, Any]) -> RunDir | None:
    """A complete run, if it is of a job of a sweep that is started again, or its receipt is missing."""
    if found is None or HydraConfig.get().mode == RunMode.MULTIRUN or needs_receipt(found, cfg):
        return found
    print(f"{found.path} is a complete run of this configuration; resume=auto starts another (-m keeps the first).")
    return None


def needs_receipt(run: RunDir, cfg: dict[str, Any]) -> bool:
    """True if the complete run of `cfg` was compressed and ended before its receipt was measured."""
    compression = cfg.get("compression") or {}
    wanted = bool(methods(compression)) and compression.get("receipt", "none") != "none"
    return wanted and run.best.exists() and not (run.path / "receipt.json").exists()


def stopping_key(run: RunDir) -> str:
    """The key whose value ended a complete run, according to its result."""
    trainer, result = run.known_config["trainer"], run.result
    epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps", -1)
    epochs_left = epochs in (None, -1) or result.get("epochs", 0) < epochs
    if trainer.get("max_time") is not None and epochs_left and result.get("steps") != steps:
        return "trainer.max_time"
    return "trainer.max_steps" if result.get("steps") == steps else "trainer.max_epochs"


def _relocated(run: RunDir, saved: dict[str, Any], cfg: dict[str, Any]) -> dict[str, Any]:
    """The run's configuration with the directory where it is now, and the `launch` group of this command."""
    saved["launch"], saved["paths"] = cfg["launch"], {**saved["paths"], "run_dir": str(run.path)}
    return saved


def _resumed_config(run: RunDir, cfg: dict[str, Any]) -> dict[str, Any]:
    """The run's own configuration; the command may raise its end, change its tags, and say where its data are now.

    Raises:
        UserError: the command changes anything else, raises an end that did not stop the run, or the run has no
            checkpoint to continue from.
    """
    saved, resume = run.config, cfg["resume"]
    typed = [item for item in typed_overrides() if key_of(item).split(".")[0] not in NOT_THE_RUNS]
    raised = _take_changes(run, saved, typed, resume) if typed else []
    if run.complete and raised:
        end = stopping_key(run)
        require(
            end.removeprefix("trainer.") in raised,
            f"resume={resume}: {end} ended this run, so trainer.{raised[0]} has no effect. Raise {end} as well.",
        )
        require(
            run.last.exists() or not run.result.get("steps"),
            f"resume={resume}: its checkpoints/last.ckpt is missing. Start a new run from its best weights with "
            "ckpt_path.",
        )
    return _relocated(run, saved, cfg)


def _take_changes(run: RunDir, saved: dict[str, Any], typed: list[str], resume: str) -> list[str]:
    """Put what the overrides `typed` may change into the `saved` configuration; returns the ends that are raised."""
    data_is_missing = not os.path.exists(data_folder_of(saved) or os.curdir)
    moved = {key_of(word): word for word in typed if key_of(word) in FOLDERS and data_is_missing}
    own = [moved.get(key_of(word)) or _with_absolute_folder(word, saved) for word in run.overrides]
    try:
        before, asked = with_absolute_paths(_compose(own)), with_absolute_paths(_compose(own + typed))
    except MissingConfigException as error:
        choice = "=".join(str(error.missing_cfg_file).rsplit("/", 1))
        message = f"resume={resume}: the run was started with {choice}, which is missing here. Add its --config-dir."
        raise UserError(message) from error
    if asked.get("tags") != before.get("tags"):
        saved["tags"] = asked["tags"]
    if moved:
        set_data_folder(saved, data_folder_of(asked))
    raised, refused = [], []
    for line in differences(before, asked, NOT_THE_EXPERIMENT):
        group, _, rest = line.split(":", 1)[0].partition(".")
        name = rest.partition(".")[0]
        key = f"trainer.{name}"
        if group == "trainer" and name in ENDS and _is_later(name, _lookup(saved, key), _lookup(asked, key)):
            saved["trainer"][name] = _lookup(asked, key)
            raised.append(name)
        else:
            refused.append(line)
    only_devices = all(re.match(r"trainer\.(devices|num_nodes|accelerator):|strategy\b", line) for line in refused)
    other = f"ckpt_path={resume} ckpt_mode=trainer" if only_devices else f"ckpt_path={resume}"
    require(
        not refused,
        f"resume={resume} keeps the run's own configuration, but the command changes {'; '.join(refused)}. Leave that "
        f"out, or start a new run with {other}.",
    )
    return raised


def _compose(overrides: list[str]) -> dict[str, Any]:
    return resolve(compose(config_name=HydraConfig.get().job.config_name, overrides=overrides))


def _with_absolute_folder(word: str, saved: dict[str, Any]) -> str:
    """An override of a data folder with the path that the run has saved: it may be relative to another directory."""
    key, kept = word.partition("=")[0], _lookup(saved, key_of(word))
    return f"{key}={as_typed(kept)}" if key_of(word) in FOLDERS and isinstance(kept, str) else word


def _is_later(name: str, old: Any, new: Any) -> bool:
    if name == "max_time":
        return new is None or (old is not None and _seconds(new) >= _seconds(old))
    return isinstance(new, int) and (new == -1 or (old or 0) <= new)


def _seconds(limit: str | dict[str, int]) -> float:
    """Seconds of `trainer.max_time`: DD:HH:MM:SS, or a dict of units."""
    if isinstance(limit, str):
        limit = dict(zip(("days", "hours", "minutes", "seconds"), map(int, limit.split(":")), strict=True))
    return timedelta(**limit).total_seconds()


def _lookup(tree: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name, {}) if isinstance(tree, dict) else {}
    return tree
