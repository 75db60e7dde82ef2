"""The Optuna study of a sweep, opened by its sweep and by each of its runs. Imports no torch.

Each job of a list is a trial; a trial of a search has one job for each of `sweep.repeats`. A trial's attribute `jobs`
lists its jobs' numbers, overrides and labels; `job<repeat>` is what the sweep records of a job, and `run_dir<repeat>`
and `result<repeat>` are written by the job itself.
"""

import hashlib
import json
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lathe.errors import UserError, require

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


def open_storage(folder: Path, address: str | None) -> Any:
    """Open the database at `address`, or study.log of the sweep in `folder`."""
    import optuna
    from optuna.storages import journal

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if address is None:
        return journal.JournalStorage(journal.JournalFileBackend(str(folder / "study.log")))
    waits = {"connect_args": {"timeout": LOCKED}} if address.startswith("sqlite") else {}
    for attempt in range(5):
        try:
            return optuna.storages.RDBStorage(address, engine_kwargs=waits)
        except Exception as error:
            if attempt < 4 and any(text in str(error) for text in RACES):
                time.sleep(0.3)
                continue
            reason = _LOGIN.sub("", " ".join(str(error).split()))[:200] or type(error).__name__
            problem = f"sweep.storage={_LOGIN.sub('', str(address))} can't be opened ({reason})"
            raise UserError(f"{problem}: give a database's address, such as sqlite:///study.db.") from error


def study_name(facts: Mapping[str, Any]) -> str:
    """Return the study's name in its storage.

    It does not depend on the folders of runs and data, so that machines find it by the same command.
    """
    overrides = [word for word in facts["words"] if not word.startswith(("paths.", "sweep.storage="))]
    text = json.dumps([overrides, facts["sweep"].get("space")], sort_keys=True)
    return f"{facts['name']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def open_study(folder: Path, facts: Mapping[str, Any], directions: Sequence[str] | None = None) -> Any:
    """Open the study of the sweep in `folder`; `facts` are the content of sweep.yaml.

    With `directions` it is created if it does not exist.
    """
    storage = open_storage(folder, facts["sweep"].get("storage"))
    import optuna

    pruner = pruner_of({"pruner": "none", **facts["sweep"]})
    parts = {"study_name": study_name(facts), "storage": storage, "pruner": pruner}
    if directions is None:
        return optuna.load_study(**parts)
    ways = optuna.study.StudyDirection
    study_directions = [ways.MAXIMIZE if direction == "max" else ways.MINIMIZE for direction in directions]
    return optuna.create_study(**parts, directions=study_directions, load_if_exists=True)


def pruner_of(options: Mapping[str, Any]) -> Any:
    """Build the pruner of `sweep.pruner`."""
    return _build("pruner", options, PRUNERS, ARGUMENTS.get(str(options["pruner"]), {}))


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
        built = instantiate(OmegaConf.create({"_convert_": "all", **node}))
    except Exception as error:
        raise UserError(f"sweep.{key}={node['_target_']}: {' '.join(str(error).split())[:300]}") from error
    base = getattr(package, f"Base{key.title()}")
    require(isinstance(built, base), f"sweep.{key}={node['_target_']}: that is no {key} of Optuna's.")
    return built


def prune_now(study: Any, number: int) -> bool:
    """Ask the study's pruner whether to end trial `number`.

    Hyperband divides the trials into brackets at its first call, and samples trials from their brackets.
    """
    return bool(study.pruner.prune(study, study._storage.get_trial(trial_id(study, number))))


def trial_id(study: Any, number: int) -> int:
    """Return the id in the storage of the study's trial `number`."""
    number_in_storage: int = study._storage.get_trial_id_from_study_id_trial_number(study._study_id, number)
    return number_in_storage


def is_own(trial: Any, folder: Path) -> bool:
    """Return whether a trial belongs to the sweep in `folder`, and not to another machine that shares the study."""
    return str(trial.user_attrs.get("place", folder.name)).endswith(folder.name)


def trial_of(folder: Path, number: int) -> tuple[Any, int, dict[str, Any]]:
    """Return the trial of job `number` of the sweep in `folder`, the job's repeat, and the sweep's options."""
    import optuna

    facts: Any = OmegaConf.to_container(OmegaConf.load(folder / "sweep.yaml"))
    study = open_study(folder, facts)
    trials = [trial for trial in study.get_trials(deepcopy=False) if is_own(trial, folder)]
    jobs = {job[0]: (trial, at) for trial in trials for at, job in enumerate(trial.user_attrs.get("jobs", ()))}
    require(number in jobs, f"{folder} has no job {number}.")
    trial, repeat = jobs[number]  # the newest, if a failed job is tried again
    return optuna.trial.Trial(study, trial._trial_id), repeat, facts["sweep"]


def write_result(folder: Path, number: int, name: str, value: Any) -> None:
    """Record `run_dir` or `result` of a job, from its own process."""
    trial, repeat, _ = trial_of(folder, number)
    trial.set_user_attr(f"{name}{repeat}", value)
