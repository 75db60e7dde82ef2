"""The objectives of a sweep, and the values that its runs reached."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lathe.config.compression_plan import methods
from lathe.config.sweep_direction import objective_of
from lathe.config.values import shown
from lathe.errors import UserError, did_you_mean, require
from lathe.launch.sweep.place import Job
from lathe.runs.metric_names import COSTS, best_of, cost_of, objective_name, without_split
from lathe.runs.rundir import RunDir

OF_RECEIPT = (*COSTS, "latency")
LESS = (*OF_RECEIPT, "seconds", "parameters", "steps")  # lower is better


def check_objectives(names: Sequence[str], cfg: Mapping[str, Any], space: Collection[str]) -> None:
    """Raise UserError if a name is repeated, or needs a receipt that runs of `cfg` don't have."""
    again = next((name for index, name in enumerate(names) if name in names[:index]), None)
    require(again is None, f"sweep.objectives={shown(names)}: {again} is there twice: leave one out.")
    costs = [name for name in names if name in OF_RECEIPT]
    made_small = methods(cfg.get("compression") or {}) or any(key.split(".")[0] == "compression" for key in space)
    require(
        not costs or bool(made_small),
        f"sweep.objectives: {', '.join(costs)} stands in the receipt of runs that were made small, and these are not: "
        "choose a compression, or leave it out.",
    )


def objectives_of(options: Mapping[str, Any], cfg: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the objectives of runs of `cfg`, and max or min for each; raise UserError if unknown."""
    asked = options["directions"]
    name, minimised = objective_of(cfg)
    names = options["objectives"] or ([] if name is None else [name])
    require(
        bool(names),
        "sweep.objectives: the run names no objective: set objective= to a metric that it logs, such as "
        "objective=val/accuracy, and sweep.directions=max, or min.",
    )
    if asked != "auto":
        listed = [asked] * len(names) if isinstance(asked, str) else asked
        require(
            len(listed) == len(names),
            f"sweep.directions={shown(asked)}: expected one for each of {len(names)} objectives, or one for all.",
        )
        return list(names), list(listed)
    if not options["objectives"]:
        return list(names), [_way(names[0], minimised)]
    return list(names), [_way(one, one in LESS or objective_of({**cfg, "objective": one})[1]) for one in names]


def _way(name: str, minimised: bool | None) -> str:
    if minimised is None:
        raise UserError(
            f"sweep.directions: nothing says whether more {name} is better: set it to max or min, if the runs have "
            "such a metric."
        )
    return "min" if minimised else "max"


def reached(job: Job, names: Sequence[str] | None) -> list[float]:
    """Return the values of a complete job's run, or its own objective if `names` is None.

    Raises:
        UserError: the run lacks one of them.
    """
    if not names and job.objective is not None:
        return [float(job.objective)]
    found = _told(job)
    missing = [name for name in names or ["objective"] if found.get(name) is None]
    known = sorted(name for name, value in found.items() if isinstance(value, float) and name != "objective")
    hint = did_you_mean(missing[0], known) if missing else ""
    require(not missing, f"its run has no {' and no '.join(missing)}; {hint}")
    return [float(found[name]) for name in names or ()]


def _told(job: Job) -> dict[str, Any]:
    if job.run_dir is None:
        return {}
    run = RunDir(job.run_dir)
    costs = cost_of(run.receipt if (run.path / "receipt.json").exists() else {})
    return {**(run.result if run.complete else {}), **costs, "latency": costs["latency_ms"]}


def metric_of(jobs: Sequence[Job]) -> list[str]:
    """Return the name of the first complete job's metric; empty without one."""
    done = next((job for job in jobs if job.state == "complete"), None)
    name = objective_name(_result(done), done.overrides) if done is not None else ""
    return [name] if name else []


def best_job(jobs: Sequence[Job], names: Sequence[str], directions: Sequence[str] = ()) -> Job | None:
    """Return the best of several complete jobs with one objective; their results give missing `directions`."""
    done = [job for job in jobs if job.state == "complete"]
    if len(names) != 1 or not done:
        return None
    result = {"directions": {without_split(names[0]): directions[0]}} if directions else _result(done[0])
    at = best_of([job.values[0] if job.values else job.objective for job in done], names[0], result)
    return None if at is None else done[at]


def _result(job: Job) -> Mapping[str, Any]:
    """Return the result.json of a job's run; empty if it can't be read."""
    with suppress(UserError, OSError):
        return RunDir(job.run_dir).result if job.run_dir is not None else {}
    return {}
