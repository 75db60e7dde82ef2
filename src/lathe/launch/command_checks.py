"""The overrides of the running command, and the checks of its configuration. Imports no torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lathe.config.override_parsing import as_typed, key_of
from lathe.config.parallel_dims import data_replicas
from lathe.config.resolve import flatten
from lathe.config.schema import key_schemas
from lathe.config.validate import CrossCheck, check, check_compression, check_types, unused_keys
from lathe.errors import refuse, require
from lathe.launch.devices import count_processes, read_nodes
from lathe.launch.external_launch import ExternalLaunch

# Commands that do not write to paths.log_dir, which they have only for Hydra's own sweepers.
IGNORE_LOG_DIR = (
    *("compress", "evaluate", "export", "make_shards", "predict", "prepare_tokens", "profile", "receipt", "report"),
    *("sensitivity", "serve"),
)


def typed_overrides() -> list[str]:
    """The overrides of this command as they were typed, without Hydra's own."""
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(item) for item in typed]


def saved_overrides(cfg: dict[str, Any]) -> list[str]:
    """The overrides that a run directory keeps, with interpolations replaced by their values in `cfg`."""
    saved = []
    for item in typed_overrides():
        names = key_of(item).split(".")
        if names[0] in ("resume", "sweep"):
            continue
        if "${" in item:
            value: Any = cfg
            for name in names:
                known = isinstance(value, dict) and name in value
                require(known, f"{item}: a choice can't follow a key. Type the choice.")
                value = value[name]
            item = f"{item.partition('=')[0]}={as_typed(value)}"
        saved.append(item)
    return saved


def check_sweep_words(typed: Sequence[str]) -> None:
    """Raise UserError if there are overrides of `sweep` in a command without -m."""
    own = next((word for word in typed if key_of(word).split(".")[0] == "sweep"), None)
    alone = own is not None and HydraConfig.get().mode != RunMode.MULTIRUN
    require(not alone, f"{own} is for a sweep: add -m (python train.py -m {own} ...).")


def take_sweep_job(cfg: DictConfig) -> tuple[Path, int] | None:
    """Return the folder of this run's sweep and its number there, or None.

    Removes `sweep` from `cfg`: it is not part of the experiment.
    """
    with open_dict(cfg):
        node = cfg.pop("sweep", None)
    return None if node is None or node.get("job") is None else (Path(str(node.folder)), int(node.job))


def check_command(cfg: DictConfig, resolved: dict[str, Any], cross_checks: Sequence[CrossCheck] | None = ()) -> None:
    """Check the configuration of this command: each key, then what keys mean together.

    Keys that the schema does not know, of a user's component, need the type of their default.
    """
    hydra = HydraConfig.get()
    is_sweep = hydra.mode == RunMode.MULTIRUN
    command, choices = str(hydra.job.config_name), hydra.runtime.choices
    # a run's place in its sweep has been taken out of `cfg` by now
    typed = [item for item in typed_overrides() if "sweep" in cfg or not key_of(item).startswith("sweep.")]
    is_single_job = not is_sweep and choices.get("launch") == "slurm"
    require(not is_single_job, "launch=slurm submits the jobs of a sweep. Add -m, or use scripts/slurm/train.sbatch.")
    if command in IGNORE_LOG_DIR and not is_sweep:
        unused = next((item for item in typed if key_of(item) == "paths.log_dir"), None)
        require(unused is None, f"{unused} has no effect on {command}.py. Leave it out.")
    raw, known = OmegaConf.to_container(cfg, resolve=False), key_schemas(resolved, command)
    keys = [key_of(item) for item in typed if key_of(item) not in choices and not item.startswith("~")]
    unknown = [key for key in keys if key not in known]
    defaults: dict[str, Any] = {}
    if unknown:  # the flat configuration of the chosen groups
        groups = [item for item in typed if key_of(item) in choices]
        tree = compose(config_name=command, overrides=groups)
        defaults = flatten(OmegaConf.to_container(tree))
        for key, value in defaults.items():
            if isinstance(value, str) and ("${" in value or value == "???"):
                try:
                    node = OmegaConf.select(tree, key)
                    defaults[key] = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
                except OmegaConfBaseException:  # without the other overrides
                    defaults[key] = None
    more = [*check_types(unknown, resolved, defaults, command), *unused_keys(typed, resolved)]
    refuse(check(resolved, command, cross_checks, raw, more=more))


def launch_checks(external: ExternalLaunch | None) -> tuple[CrossCheck, ...]:
    """The checks of a training run across keys, in addition to those of the schema."""

    def check_sizes(cfg: dict[str, Any]) -> None:
        nodes = read_nodes(cfg["launch"], external)
        ranks = None if nodes.several else external
        processes = count_processes(cfg, ranks, nodes)
        for count in range(nodes.least, nodes.most + 1):
            check_batch_size(cfg, ranks.world_size if ranks else processes * count)

    return check_compression, check_sizes


def make_paths_absolute(cfg: DictConfig) -> None:
    """Make paths independent of the working directory, since a run directory is used from any."""
    for key in ("data_dir", "log_dir"):
        cfg.paths[key] = os.path.abspath(cfg.paths[key])


def check_batch_size(cfg: dict[str, Any], world: int) -> None:
    """Refuse a global batch that the data replicas of `world` processes can't share equally."""
    any_size = "max_batch_size" in cfg["data"]  # documents: batches of any size, filled up to equal shares
    batch_size = None if any_size else cfg["data"].get("batch_size")
    replicas = data_replicas(cfg["strategy"], world)
    processes = f"trainer.devices x trainer.num_nodes = {world}"
    by = processes if replicas == world else f"the {replicas} data replicas of {processes}"
    problem = f"data.batch_size={batch_size} is the global batch and does not divide by {by}"
    require(batch_size is None or batch_size % replicas == 0, f"{problem}. Choose a multiple of {replicas}.")
