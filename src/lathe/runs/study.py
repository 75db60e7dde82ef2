"""The study of a search, which its sweep and each of its runs open: Optuna's, by ask and tell. Imports no torch."""

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lathe.errors import UserError, require, uninstalled

# Classes of Optuna, and what they are given here beside their defaults. A rung is three times the one before.
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tpe": ("TPESampler", {}),
    "gp": ("GPSampler", {}),
    "cmaes": ("CmaEsSampler", {}),
    "random": ("RandomSampler", {}),
    "qmc": ("QMCSampler", {}),
    "grid": ("RandomSampler", {}),  # which is never asked: each point is put in line
    "nsga2": ("NSGAIISampler", {}),
}
PRUNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("NopPruner", {}),
    "asha": ("SuccessiveHalvingPruner", {"min_resource": 1, "reduction_factor": 3}),
    "hyperband": ("HyperbandPruner", {"min_resource": 1, "reduction_factor": 3}),
    "median": ("MedianPruner", {}),
    "percentile": ("PercentilePruner", {"percentile": 25.0}),
}
_LOGIN = re.compile(r"(?<=//)[^/@]*@")


def check_installed() -> None:
    """Raises UserError where Optuna is not installed."""
    reason = uninstalled("sweep", "optuna")
    require(reason is None, f"sweep=optuna: {reason}")


def storage_of(folder: Path, options: Mapping[str, Any]) -> Any:
    """Where the study of the sweep in `folder` lies.

    Raises:
        UserError: it can't be opened.
    """
    import optuna
    from optuna.storages import journal

    address = options.get("storage")
    if address is None:
        return journal.JournalStorage(journal.JournalFileBackend(str(folder / "study.log")))
    try:
        return optuna.storages.RDBStorage(address)
    except Exception as error:
        reason = _LOGIN.sub("", " ".join(str(error).split()))[:200] or type(error).__name__
        raise UserError(
            f"sweep.storage={_LOGIN.sub('', str(address))} can't be opened ({reason}): give a database's address, such "
            "as sqlite:///study.db, or leave it out."
        ) from error


def study_name(facts: Mapping[str, Any]) -> str:
    """The study's name in its storage, which machines that share one find by the same command."""
    told = json.dumps([facts["words"], facts["sweep"].get("space")], sort_keys=True)
    return f"{facts['name']}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def open_study(folder: Path, facts: Mapping[str, Any], directions: Sequence[str] | None = None) -> Any:
    """The study of the sweep in `folder`, of which sweep.yaml says `facts`; made with `directions` if it is not there.

    Raises:
        UserError: its storage can't be opened, or a class of Optuna's that was named can't be made.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    options, name = facts["sweep"], study_name(facts)
    parts: dict[str, Any] = {
        "study_name": name,
        "storage": storage_of(folder, options),
        "pruner": _made("pruner", options, PRUNERS),
    }
    if directions is None:
        return optuna.load_study(**parts)
    ways = optuna.study.StudyDirection
    words = [ways.MAXIMIZE if direction == "max" else ways.MINIMIZE for direction in directions]
    return optuna.create_study(**parts, directions=words, load_if_exists=True)


def sampler_of(options: Mapping[str, Any], number: int) -> Any:
    """Draws trial `number`, whatever process draws it: its random numbers depend on (seed, number) alone.

    Raises:
        UserError: its class can't be made.
    """
    name, seed = options["sampler"], options["seed"]
    drawn = int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")
    return _made("sampler", options, SAMPLERS, {"seed": seed if name == "qmc" else drawn})  # qmc counts along


def _made(key: str, options: Mapping[str, Any], known: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> Any:
    import optuna
    from hydra.utils import instantiate

    node = options[key]
    try:
        if isinstance(node, str):
            name, arguments = known[node]
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of qmc: it is chosen by name
            return getattr(getattr(optuna, f"{key}s"), name)(**arguments, **(more or {}))
        made = instantiate(OmegaConf.create(node))
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(f"sweep.{key}={node if isinstance(node, str) else node['_target_']}: {said}") from error
    base = optuna.samplers.BaseSampler if key == "sampler" else optuna.pruners.BasePruner
    require(isinstance(made, base), f"sweep.{key}={node['_target_']}: that is no {key} of Optuna's.")
    return made


def trial_of(folder: Path, number: int) -> Any | None:
    """The trial that a run of the sweep in `folder` reports to, or None where nothing asks for its validations."""
    facts: Any = OmegaConf.to_container(OmegaConf.load(folder / "sweep.yaml"))
    if facts["sweep"].get("space") is None or facts["sweep"]["pruner"] == "none":
        return None
    import optuna

    study = open_study(folder, facts)
    trial_id = study._storage.get_trial_id_from_study_id_trial_number(study._study_id, number)
    return optuna.trial.Trial(study, trial_id)
