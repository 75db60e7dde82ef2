"""What a run goes on with: its own configuration, and a later end if the command gives one. Imports no torch."""

import os
import re
from datetime import timedelta
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from lathe.config.composed import data_at, differences, folder_of, pinned, resolve
from lathe.config.stages import methods
from lathe.config.typed import as_typed
from lathe.config.words import key_of
from lathe.errors import UserError, require
from lathe.runs import rundir
from lathe.runs.typed import ENDS

FREE_ON_RESUME = ("resume", "launch", "hydra", "sweep", "trusted")
FOLDERS = ("data.folder", "data.source.folder")


def typed_words() -> list[str]:
    """The overrides of this command as they were typed, Hydra's own apart."""
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)  # among which stands no key
    return [str(item) for item in typed]


def kept_words(cfg: dict[str, Any]) -> list[str]:
    """What of this command a run directory keeps. A value that follows another key stands there as what it is in `cfg`:
    nothing is resolved that somebody else's directory names.

    Raises:
        UserError: such a word is no value of a key.
    """
    words = [item for item in typed_words() if key_of(item).split(".")[0] not in ("resume", "sweep")]
    return [_settled(item, cfg) if "${" in item else item for item in words]


def _settled(item: str, cfg: dict[str, Any]) -> str:
    value: Any = cfg
    for part in key_of(item).split("."):
        there = isinstance(value, dict) and part in value
        require(there, f"{item}: a choice can't follow another key: type the choice itself.")
        value = value[part]
    return f"{item.partition('=')[0]}={as_typed(value)}"


def composed(overrides: list[str]) -> dict[str, Any]:
    """The resolved configuration of these overrides."""
    return resolve(compose(config_name=HydraConfig.get().job.config_name, overrides=overrides))


def at_home(run: rundir.RunDir, own: dict[str, Any], cfg: dict[str, Any]) -> dict[str, Any]:
    """The run's configuration `own` where it lies now, with the restarts of this command's `cfg`."""
    own["launch"], own["paths"] = cfg["launch"], {**own["paths"], "run_dir": str(run.path)}
    return own


def continued(run: rundir.RunDir, cfg: dict[str, Any]) -> dict[str, Any]:
    """The run's own configuration, longer if the command raises its end, with its data where the command says.

    Raises:
        UserError: the command would change anything else, or an end that is not the one that counts; or there is
            nothing to go on from.
    """
    saved = run.config
    raised = []
    typed = [item for item in typed_words() if key_of(item).split(".")[0] not in FREE_ON_RESUME]
    if typed:
        # other data would be another experiment: a folder that is where it was stays
        gone = not os.path.exists(folder_of(saved) or os.curdir)
        moved = {key_of(word): word for word in typed if key_of(word) in FOLDERS and gone}
        own = [moved.get(key_of(word)) or _from_anywhere(word, saved) for word in run.overrides]
        before, asked = pinned(_as_started(own, cfg["resume"])), pinned(composed(own + typed))
        lines = []
        if asked.get("tags") != before.get("tags"):
            saved["tags"] = asked["tags"]
        if moved:
            data_at(saved, folder_of(asked))
        for line in differences(before, asked, rundir.NOT_THE_EXPERIMENT):
            key = line.split(":", 1)[0]
            group, _, name = key.partition(".")
            name, below = name.partition(".")[0], f"trainer.{name.partition('.')[0]}"
            if group == "trainer" and name in ENDS and _later(name, _lookup(saved, below), _lookup(asked, below)):
                saved["trainer"][name] = _lookup(asked, below)
                raised.append(name)
            else:
                lines.append(line)
        devices = all(re.match(r"trainer\.(devices|num_nodes|accelerator):|strategy\b", line) for line in lines)
        elsewhere = f"go on elsewhere in a new run, by its other words and ckpt_path={cfg['resume']} ckpt_mode=trainer"
        require(
            not lines,
            f"resume={cfg['resume']} keeps the run's own configuration, but the command changes {'; '.join(lines)}: "
            f"leave that out, or {elsewhere if devices else 'start a new run from its weights with ckpt_path'}.",
        )
    if run.complete and raised:
        end = end_of(run)
        require(
            end.removeprefix("trainer.") in raised,
            f"resume={cfg['resume']}: {end} ended this run, so a later trainer.{raised[0]} trains nothing: raise "
            f"{end} as well.",
        )
        require(
            run.last.exists() or not run.result.get("steps"),
            f"resume={cfg['resume']}: its checkpoints/last.ckpt is not there, so "
            "nothing says where to go on: start a new run from its best weights with ckpt_path.",
        )
    return at_home(run, saved, cfg)


def _as_started(own: list[str], resume: str) -> dict[str, Any]:
    """What a run's `own` words compose; raises UserError where one of their choices, from a folder of the user's own,
    is not here.
    """
    try:
        return composed(own)
    except MissingConfigException as error:
        gone = str(error.missing_cfg_file)
        raise UserError(
            f"resume={resume}: the run was started with {'='.join(gone.rsplit('/', 1))}, which is not here, so nothing "
            "says what else the command changes: add the --config-dir that has it, or type no more than resume."
        ) from error


def _from_anywhere(word: str, saved: dict[str, Any]) -> str:
    """An override that names a folder of data, whose classes a configuration reads, with the path that the run has
    kept: it may have been typed in another working directory."""
    key, kept = word.partition("=")[0], _lookup(saved, key_of(word))
    return f"{key}={as_typed(kept)}" if key_of(word) in FOLDERS and isinstance(kept, str) else word


def end_of(run: rundir.RunDir) -> str:
    """The key whose value ended a complete run, as far as its result says."""
    trainer, result = run.known_config["trainer"], run.result
    epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps", -1)
    if (
        trainer.get("max_time") is not None
        and (epochs in (None, -1) or result.get("epochs", 0) < epochs)
        and result.get("steps") != steps
    ):
        return "trainer.max_time"
    return "trainer.max_steps" if result.get("steps") == steps else "trainer.max_epochs"


def owes_receipt(run: rundir.RunDir, cfg: dict[str, Any]) -> bool:
    """Whether the complete run of `cfg` was made small and ended before its receipt was measured."""
    compression = cfg.get("compression") or {}
    wanted = bool(methods(compression)) and compression.get("receipt", "none") != "none"
    return wanted and run.best.exists() and not (run.path / "receipt.json").exists()


def _later(name: str, old: Any, new: Any) -> bool:
    if name == "max_time":
        return new is None or (old is not None and _seconds(new) >= _seconds(old))
    return isinstance(new, int) and (new == -1 or (old or 0) <= new)


def _seconds(limit: str | dict[str, int]) -> float:
    """Seconds of a time limit as `trainer.max_time` takes it: DD:HH:MM:SS, or a group of units."""
    if isinstance(limit, str):
        limit = dict(zip(("days", "hours", "minutes", "seconds"), map(int, limit.split(":")), strict=True))
    return timedelta(**limit).total_seconds()


def _lookup(tree: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part, {}) if isinstance(tree, dict) else {}
    return tree
