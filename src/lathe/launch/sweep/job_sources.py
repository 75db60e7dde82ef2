"""The jobs of a sweep: a list, or trials that Optuna draws one after another."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lathe.config.metric_names import COSTS, cost_of, lower_is_better, objective_of
from lathe.config.values import shown
from lathe.errors import UserError, did_you_mean, refuse, require
from lathe.launch.sweep.progress_table import best_job
from lathe.launch.sweep.search_space import (
    all_values,
    brief,
    check_pruner,
    print_replaced,
    repeats_of,
    space_of,
    word,
)
from lathe.launch.sweep.sweep_dir import ENDED, Job, SweepDir
from lathe.runs.optuna_study import open_storage, prune_now, pruner_of, sampler_of, trial_id
from lathe.runs.rundir import RunDir

LESS = (*COSTS, "latency", "seconds", "parameters", "steps")  # lower is better


class Listed:
    """Jobs that are known from the start, by their overrides. Failed ones are tried again by the same command.

    `compose` returns the first job's configuration, which names the objective.
    """

    names: list[str]  # the objectives
    directions: list[str]  # max or min of each

    def __init__(self, jobs: Sequence[list[str]], compose: Callable[[], dict[str, Any]]) -> None:
        self.jobs, self.total = jobs, len(jobs)
        self.names, self.directions = [], ["min"]
        with suppress(Exception):  # a job reports by itself what is wrong with its task
            name, is_lower = objective_of(compose())
            if name is not None:
                is_lower = lower_is_better(name) if is_lower is None else is_lower
                self.names, self.directions = [name], ["min" if is_lower else "max"]
        shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
        self.labels = [" ".join(word for word in words if word not in shared) or "as it is" for words in jobs]

    def prepare(self, folder: SweepDir) -> None:
        """Open the study, and add a trial for each job that has none or has failed."""
        import optuna

        self.folder = folder
        folder.open(self.directions)
        with folder.adding():
            there = {job.number: job for job in folder.jobs()}
            for number, jobs in enumerate(zip(self.jobs, self.labels, strict=True)):
                before = there.get(number)
                if before is None or before.state == "failed":
                    attributes = {"jobs": [[number, *jobs]], "job0": {"tries": before.tries if before else 0}}
                    waiting = optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING, user_attrs=attributes)
                    folder.study.add_trial(waiting)
            self.settle_all()

    def settle_all(self) -> None:
        """End the trials whose jobs had ended before a kill, and show all jobs."""
        finished = {trial.number for trial in self.folder.trials() if trial.state.is_finished()}
        for trial, jobs in itertools.groupby(self.folder.jobs(), key=lambda job: job.trial):
            if trial not in finished:
                self.settle(list(jobs))
        for job in self.folder.jobs():
            self.folder.write_page(job)

    def more(self) -> bool:
        """Return False: all jobs exist."""
        return False

    def is_due(self, job: Job) -> bool:
        """Return whether a waiting job may start."""
        return True

    def end(self, job: Job) -> None:
        """Record a job that has ended, and with it its trial, whose other jobs may not be run then."""
        with self.folder.adding():
            self.folder.save(job)
            self.settle(self.folder.jobs_of(job.trial))

    def settle(self, jobs: list[Job]) -> None:
        """End the trial of a list's job with its objective; ±inf, the worst, for a run without a number."""
        (job,) = jobs
        if job.state in ENDED:
            worst = math.inf if self.directions == ["min"] else -math.inf
            value = job.objective if job.objective is not None and math.isfinite(job.objective) else worst
            self.tell(job.trial, job.state, [value])

    def tell(self, trial: int, state: str, values: Sequence[float] | None = None) -> None:
        """End a trial in the study; one that has ended is left as it is."""
        import optuna

        kinds = optuna.trial.TrialState
        kind = {"complete": kinds.COMPLETE, "pruned": kinds.PRUNED, "failed": kinds.FAIL}[state]
        self.folder.study.tell(trial, values if state == "complete" else None, state=kind, skip_if_finished=True)

    def concluded(self, is_over: bool) -> None:
        """Print the best job, and mark the sweep as done if all of its jobs are.

        Raises:
            UserError: jobs failed.
        """
        jobs = self.folder.jobs()
        if is_over and not any(job.state == "failed" for job in jobs):
            self.folder.finish()
        best = best_job(jobs, self.directions)
        if best is not None and self.names:
            print(f"Best {self.names[0]}, {best.objective:.4g}: job {best.number}, {best.label}")
        refuse(failures(jobs, "The same command tries them again, and keeps the others."))


class Search(Listed):
    """Trials of the overrides `words` with points of `options["space"]`: one job, or one per repeat.

    `compose` composes the configuration of overrides, `is_group` tells whether a key is a configuration group, and
    `cfg` is a job's configuration.
    """

    def __init__(self, compose: Any, is_group: Any, words: list[str], options: dict[str, Any], cfg: Any) -> None:
        self.words, self.options, self.storage = words, options, options["storage"]
        if self.storage:  # before anything is written
            open_storage(Path(), self.storage)
        self.space = space_of(options["space"])
        typed = [key for key, entry in self.space.items() if not entry.when]
        print_replaced(words, typed, "sweep.space", wins=False)
        self.repeats = repeats_of(options["repeats"], words, self.space)
        self.grid: list[dict[str, Any]] = []
        if options["sampler"] == "grid":
            values = [all_values(key, entry) for key, entry in self.space.items()]
            self.grid = [dict(zip(self.space, point, strict=True)) for point in itertools.product(*values)]
            if options["pruner"] != "none":  # it would keep each that is better than its predecessor
                random.Random(options["seed"]).shuffle(self.grid)  # noqa: S311 (no secret)
        self.trials: int = len(self.grid) or options["trials"]
        self.total = self.trials * len(self.repeats)
        self._check_keys(compose, is_group)
        self.hopeless = False  # no trial can have a value
        self.names, self.directions = objectives_of(options, cfg)
        sampler_of(options, 0)
        require(
            len(self.directions) == 1 or options["pruner"] == "none",
            f"sweep.pruner={shown(options['pruner'])} compares runs by one number, and sweep.objectives names "
            f"{len(self.directions)}: set sweep.pruner=none.",
        )
        self.compares = check_pruner(options, len(self.repeats))

    def _check_keys(self, compose: Any, is_group: Any) -> None:
        """Compose a job with each value of a list and each end of a range, so that unknown keys raise."""
        for key, entry in self.space.items():
            require(
                entry.choices is not None or not is_group(key),
                f"sweep.space.{key}: {key} is a group, which takes a list of its choices.",
            )
            for value in entry.choices or [entry.distribution.low, entry.distribution.high]:
                when = [word(other, wanted, self.space.get(other)) for other, wanted in entry.when.items()]
                compose([*self.words, *when, word(key, value, entry)])
        for repeat in self.repeats:
            compose([*self.words, *repeat])

    def prepare(self, folder: SweepDir) -> None:
        """Open or create the study, and end the trials whose jobs had ended before a kill."""
        self.folder = folder
        folder.open(self.directions)
        with folder.adding():
            for trial in folder.trials():
                unnamed = "jobs" not in trial.user_attrs and (not self.storage or self._is_here(trial))
                if trial.state.name == "RUNNING" and unnamed:  # killed before it was drawn
                    self.tell(trial.number, "failed")
            self.settle_all()

    def _is_here(self, trial: Any) -> bool:
        return str(trial.user_attrs.get("place", "")).endswith(self.folder.path.name)

    def is_due(self, job: Job) -> bool:
        """Return whether a waiting job may start: compared runs (sweep.pruner=wilcoxon) wait for the previous one."""
        return not self.compares or job.repeat == 0 or bool(self.folder.job(job.number - 1).values)

    def more(self) -> bool:
        """Draw a trial and add its jobs; return False if all have begun."""
        if self.hopeless:
            return False
        with self.folder.adding():
            study, before = self.folder.study, self.folder.trials()
            if _begun(before) >= self.trials:
                return False
            study.sampler, study.pruner = sampler_of(self.options, len(before)), pruner_of(self.options)
            trial = study.ask()
            if self.storage:
                trial.set_user_attr("place", self.folder.place)
            index = _begun(self.folder.trials()[: trial.number])
            if index >= self.trials:  # another machine has just begun the last one
                self.tell(trial.number, "failed")
                return False
            point = self.grid[index] if self.grid else None
            study.sampler = sampler_of(self.options, trial.number, point)  # its number may differ from that above
            prune_now(study, trial.number)
            drawn = list(self._drawn(trial))
            jobs = [[*drawn, *repeat] for repeat in self.repeats]
            first = trial.number * len(jobs)
            named = [[first + at, [*self.words, *own], brief(own)] for at, own in enumerate(jobs)]
            trial.set_user_attr("jobs", named)
            for job in self.folder.jobs_of(trial.number):
                self.folder.write_page(job)
        return True

    def _drawn(self, trial: Any) -> Iterator[str]:
        chosen: dict[str, Any] = {}
        for key, entry in self.space.items():
            if all(chosen.get(other) == wanted for other, wanted in entry.when.items()):
                chosen[key] = entry.drawn(trial, key)
                yield word(key, chosen[key], entry)

    def end(self, job: Job) -> None:
        """Record a job that has ended, and end its trial once its result is known."""
        if job.state == "complete":
            try:
                job.values = reached(job, self.options["objectives"])
            except UserError as error:
                job.state, job.sentence = "failed", str(error)
                self.hopeless = not any(trial.state.name == "COMPLETE" for trial in self.folder.trials())
        if job.state == "failed" and len(self.repeats) > 1:
            job.sentence = f"{str(job.sentence).rstrip('.')}. Trial {job.trial} fails with it."
        super().end(job)

    def settle(self, jobs: list[Job]) -> None:
        """End a trial in the study once its result is known; jobs that can't change it are not run."""
        why = self._cut_short(jobs)
        if why is not None:
            for job in jobs:
                if job.state == "waiting":
                    job.state, job.sentence = "pruned", why
                    self.folder.save(job)
        states = {job.state for job in jobs}
        if states <= set(ENDED):
            state = next(state for state in ("failed", "pruned", "complete") if state in states)
            means = [statistics.fmean(values) for values in zip(*(job.values for job in jobs), strict=False)]
            self.tell(jobs[0].trial, state, means)

    def _cut_short(self, jobs: list[Job]) -> str | None:
        """Return the reason to end a trial before all of its runs, or None."""
        number = jobs[0].trial
        ended = {state: next((job for job in jobs if job.state == state), None) for state in ("failed", "pruned")}
        if ended["failed"] is not None:
            return f"not run, as job {ended['failed'].number} failed, and trial {number} with it."
        if ended["pruned"] is not None:
            return ended["pruned"].sentence or ""
        complete = [job for job in jobs if job.state == "complete"]
        if self.compares and complete and self._falls_behind(number, complete) and len(complete) < len(jobs):
            return f"not run, as trial {number} fell behind in {len(complete)} of its {len(jobs)} runs."
        return None

    def _falls_behind(self, number: int, complete: Sequence[Job]) -> bool:
        """Report the values of a trial's repeats, and ask the pruner whether to end it."""
        study = self.folder.study
        for job in complete:
            study._storage.set_trial_intermediate_value(trial_id(study, number), job.repeat, job.values[0])
        return prune_now(study, number)

    def concluded(self, is_over: bool) -> None:
        """Print the best trials, the number of failed ones, and those that other machines have not ended.

        Raises:
            UserError: all trials failed.
        """
        if is_over:
            self.folder.finish()
        trials, jobs, count = self.folder.trials(), self.folder.jobs(), len(self.repeats)
        complete, failed, running = (
            [trial for trial in trials if trial.state.name == state] for state in ("COMPLETE", "FAIL", "RUNNING")
        )
        study = self.folder.study
        best = [] if not complete else study.best_trials if len(self.directions) > 1 else [study.best_trial]

        for trial in best[:5]:
            values = ", ".join(f"{value:.4g}" for value in trial.values)
            words = " ".join(word(key, value, self.space.get(key)) for key, value in trial.params.items())
            which = f"job {trial.number}" if count == 1 else f"trial {trial.number}, mean of {count}"
            print(f"Best {', '.join(self.names)}, {values}: {which}, {words}")
        if failed and complete:
            first = f"the first of them trial {failed[0].number}"
            print(f"{len(failed)} of {len(trials)} trials failed, {first}. They are not tried again.")
        for trial in running:
            place = trial.user_attrs.get("place")
            print(f"Trial {trial.number} runs at {place}, or was ended there: the same command there resumes it.")
        if {job.trial for job in jobs} == {job.trial for job in jobs if job.state == "failed"}:
            refuse(failures(jobs, "No trial is left to go by."))


def failures(jobs: Sequence[Job], way: str) -> list[str]:
    """Return a sentence about the failed jobs with a `way` to continue; none without such jobs."""
    failed = [job for job in jobs if job.state == "failed"]
    if not failed:
        return []
    told = str(failed[0].sentence)
    told = told if told.endswith("?") else f"{told.rstrip('.')}."
    return [f"{len(failed)} of {len(jobs)} jobs failed, the first of them ({failed[0].label}) with: {told} {way}"]


def _begun(trials: Sequence[Any]) -> int:
    """Return the number of trials that have jobs, or are being drawn by another process."""
    return sum("jobs" in trial.user_attrs or trial.state.name == "RUNNING" for trial in trials)


def objectives_of(options: Mapping[str, Any], cfg: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the objectives of runs of `cfg`, and max or min for each; raise UserError if unknown."""
    asked, (own, _) = options["directions"], objective_of(cfg)
    names = list(options["objectives"] or ([] if own is None else [own]))
    require(bool(names), "sweep.objectives: the run names none: set objective= to a metric, and sweep.directions.")
    if asked != "auto":
        listed = [asked] * len(names) if isinstance(asked, str) else list(asked)
        require(len(listed) == len(names), f"sweep.directions={shown(asked)}: expected one for each of {shown(names)}.")
        return names, listed
    minimised = {name: True if name in LESS else objective_of({**cfg, "objective": name})[1] for name in names}
    unknown = next((name for name, lower in minimised.items() if lower is None), None)
    require(unknown is None, f"sweep.directions: the direction of {unknown} is unknown: set max or min.")
    return names, ["min" if lower else "max" for lower in minimised.values()]


def reached(job: Job, names: Sequence[str] | None) -> list[float]:
    """Return the values of a complete job's run, or its own objective if `names` is None.

    Raises:
        UserError: the run lacks one of them.
    """
    if not names and job.objective is not None:
        return [float(job.objective)]
    found: dict[str, Any] = {}
    if job.run_dir is not None:
        run = RunDir(job.run_dir)
        costs = cost_of(run.receipt if (run.path / "receipt.json").exists() else {})
        found = {**(run.result if run.complete else {}), **costs, "latency": costs["latency_ms"]}
    missing = [name for name in names or ["objective"] if found.get(name) is None]
    known = sorted(name for name, value in found.items() if isinstance(value, float) and name != "objective")
    hint = did_you_mean(missing[0], known) if missing else ""
    require(not missing, f"its run has no {' and no '.join(missing)}; {hint}")
    return [float(found[name]) for name in names or ()]
