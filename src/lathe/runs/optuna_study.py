"""The Optuna study of a search, opened by its sweep and by each of its runs. Imports no torch."""

import hashlib
import json
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lathe.errors import UserError, require, uninstalled

# Optuna's classes, and the arguments that differ from its defaults. A rung is three times the previous one.
SAMPLERS = {
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "random": "RandomSampler",
    "qmc": "QMCSampler",
    "grid": "RandomSampler",  # not asked: each trial is given its point
    "nsga2": "NSGAIISampler",
}
PRUNERS = {
    "none": "NopPruner",
    "asha": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "wilcoxon": "WilcoxonPruner",
}
RUNGS = {"min_resource": 1, "reduction_factor": 3}
ARGUMENTS: dict[str, dict[str, Any]] = {"asha": RUNGS, "hyperband": RUNGS, "percentile": {"percentile": 25.0}}
RACES = ("already exists", "UNIQUE constraint", "duplicate key")  # two processes create the same tables
LOCKED = 120.0  # seconds to wait for other writers of an SQLite file, which has one lock
_LOGIN = re.compile(r"(?<=//)[^/@]*@")


def check_installed() -> None:
    """Raise UserError if Optuna is not installed."""
    reason = uninstalled("sweep", "optuna")
    require(reason is None, f"sweep=optuna: {reason}")


def storage_of(folder: Path, options: Mapping[str, Any]) -> Any:
    """Open the storage of the study of the sweep in `folder`."""
    from optuna.storages import journal

    if options.get("storage") is not None:
        return open_database(options["storage"])
    return journal.JournalStorage(journal.JournalFileBackend(str(folder / "study.log")))


def open_database(address: str) -> Any:
    """Open the database at `address`, and create its tables, which several processes may do at once."""
    import optuna

    waits = {"connect_args": {"timeout": LOCKED}} if address.startswith("sqlite") else {}
    for attempt in range(5):
        try:
            return optuna.storages.RDBStorage(address, engine_kwargs=waits)
        except Exception as error:
            if attempt < 4 and any(words in str(error) for words in RACES):
                time.sleep(0.3)
                continue
            reason = _LOGIN.sub("", " ".join(str(error).split()))[:200] or type(error).__name__
            raise UserError(
                f"sweep.storage={_LOGIN.sub('', str(address))} can't be opened ({reason}): give a database's address, "
                "such as sqlite:///study.db, or leave it out."
            ) from error


def study_name(facts: Mapping[str, Any]) -> str:
    """Return the study's name in its storage.

    It does not depend on the folders of runs and data, so that machines find it by the same command.
    """
    words = [word for word in facts["words"] if not word.startswith(("paths.", "sweep.storage="))]
    text = json.dumps([words, facts["sweep"].get("space")], sort_keys=True)
    return f"{facts['name']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def open_study(folder: Path, facts: Mapping[str, Any], directions: Sequence[str] | None = None) -> Any:
    """Open the study of the sweep in `folder`; `facts` are the content of sweep.yaml.

    With `directions` it is created if it does not exist.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = storage_of(folder, facts["sweep"])
    parts: dict[str, Any] = {
        "study_name": study_name(facts),
        "storage": storage,
        "pruner": pruner_of(facts["sweep"]),
    }
    if directions is None:
        return optuna.load_study(**parts)
    ways = optuna.study.StudyDirection
    words = [ways.MAXIMIZE if direction == "max" else ways.MINIMIZE for direction in directions]
    return optuna.create_study(**parts, directions=words, load_if_exists=True)


def pruner_of(options: Mapping[str, Any]) -> Any:
    """Build the pruner of `sweep.pruner`."""
    return _build("pruner", options, PRUNERS, ARGUMENTS.get(str(options["pruner"]), {}))


def compares_repeats(pruner: Any) -> bool:
    """Return whether the pruner compares the repeats of a trial instead of the validations of a run."""
    import optuna

    return isinstance(pruner, optuna.pruners.WilcoxonPruner)


def should_prune(study: Any, number: int, values: Mapping[int, float]) -> bool:
    """Report the values of trial `number` by repeat, and return whether the pruner ends the trial."""
    trial_id = _trial_id(study, number)
    trial = study._storage.get_trial(trial_id)
    if trial.state.is_finished():
        return False
    known = trial.intermediate_values
    for repeat, value in values.items():
        if repeat not in known:
            study._storage.set_trial_intermediate_value(trial_id, repeat, value)
    return bool(study.pruner.prune(study, study._storage.get_trial(trial_id)))


def make_brackets(study: Any, number: int) -> None:
    """Let Hyperband divide the trials into brackets, so that trial `number` is sampled from its bracket.

    Optuna does so at the pruner's first call, which in a search would only happen in the runs.
    """
    import optuna

    if isinstance(study.pruner, optuna.pruners.HyperbandPruner):
        study.pruner.prune(study, study._storage.get_trial(_trial_id(study, number)))


def _trial_id(study: Any, number: int) -> int:
    found: int = study._storage.get_trial_id_from_study_id_trial_number(study._study_id, number)
    return found


def sampler_of(options: Mapping[str, Any], number: int, point: Mapping[str, Any] | None = None) -> Any:
    """Build the sampler for trial `number`, whose random numbers depend on (seed, number) only.

    For sampler=grid it returns `point`.
    """
    if point is not None:
        import optuna

        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.PartialFixedSampler(dict(point), optuna.samplers.RandomSampler())
    name, seed = options["sampler"], options["seed"]
    drawn = int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")
    return _build("sampler", options, SAMPLERS, {"seed": seed if name == "qmc" else drawn})  # qmc counts trials itself


def _build(key: str, options: Mapping[str, Any], names: Mapping[str, str], arguments: Mapping[str, Any]) -> Any:
    """Build the sampler or pruner at a key of the sweep: one of `names` with `arguments`, or a node with a class."""
    import optuna
    from hydra.utils import instantiate

    node, package = options[key], getattr(optuna, f"{key}s")
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # qmc and wilcoxon
    if isinstance(node, str):
        return getattr(package, names[node])(**arguments)
    try:
        made = instantiate(OmegaConf.create({"_convert_": "all", **node}))
    except Exception as error:
        raise UserError(f"sweep.{key}={node['_target_']}: {' '.join(str(error).split())[:300]}") from error
    base = getattr(package, f"Base{key.title()}")
    require(isinstance(made, base), f"sweep.{key}={node['_target_']}: that is no {key} of Optuna's.")
    return made


def trial_of(folder: Path, number: int) -> Any | None:
    """Return the trial that job `number` of the sweep in `folder` reports to; None if nothing prunes runs."""
    facts: Any = OmegaConf.to_container(OmegaConf.load(folder / "sweep.yaml"))
    options = facts["sweep"]
    if options.get("space") is None or options["pruner"] == "none" or options.get("repeats") is not None:
        return None
    import optuna

    study = open_study(folder, facts)
    return optuna.trial.Trial(study, _trial_id(study, number))
