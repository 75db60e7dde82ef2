"""The jobs of a sweep as overrides: a list of combinations, or trials that Optuna draws one after another."""

import itertools
import math
import random
import re
import shlex
import socket
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from lathe.config.metric_names import COSTS, cost_of, lower_is_better, objective_of
from lathe.config.override_parsing import as_typed, key_of
from lathe.config.values import shown
from lathe.errors import UserError, did_you_mean, refuse, require
from lathe.launch.sweep.sweep_dir import ENDED, Job, SweepDir, best_job
from lathe.runs.optuna_study import is_own, open_storage, prune_now, pruner_of, sampler_of, trial_id
from lathe.runs.rundir import NOT_THE_EXPERIMENT, RunDir

LESS = (*COSTS, "latency", "seconds", "parameters", "steps")  # lower is better


def planned(
    overrides: Sequence[str], options: Mapping[str, Any], params: Mapping[str, Any], loader: Any
) -> list[list[str]]:
    """Return the overrides of every job of a grid, list or ablation, in order."""
    removed, axes = options["remove"] or [], options["axes"] or {}
    for word in removed:
        hint = did_you_mean(word, overrides, "type it too")
        require(word in overrides, f"sweep.remove={word}: that was not typed; {hint}.")
    typed = {key_of(word): word for word in overrides}
    for key in axes:
        if key in typed:
            print(f"sweep.axes.{key} is replaced by {typed[key]}.", flush=True)
    first = [f"{key}={value}" for key, value in params.items()]
    first += [f"{key}={','.join(map(as_typed, values))}" for key, values in axes.items()]
    jobs = []
    for run in options["runs"] or [""]:
        more = shlex.split(run) if isinstance(run, str) else list(run)
        wrong = next((word for word in more if "=" not in word and not word.startswith("~")), None)
        require(wrong is None, f"sweep.runs={run}: {wrong} is no override, such as model=mlp.")
        command = [*overrides, *more]
        for variant in (command, *([item for item in command if item != word] for word in removed)):
            values = {}  # of a repeated key, the last counts
            for item in OverridesParser.create(config_loader=loader).parse_overrides([*first, *variant]):
                key, several = item.get_key_element(), item.is_sweep_override()
                message = f"{item.input_line} names no values: give some, such as 0.1,0.01, or use sweep=optuna."
                require(not several or item.is_discrete_sweep(), message)
                points = item.sweep_string_iterator() if several else ()
                values[key] = [f"{key}={value}" for value in points] if several else [str(item.input_line)]
                require(bool(values[key]), f"{item.input_line}: no choice has that name: write the choices by commas.")
            jobs += list(itertools.product(*values.values()))
    once = list(dict.fromkeys(jobs))
    if len(once) < len(jobs):
        print(f"{len(jobs) - len(once)} jobs are listed twice and run once.")
    return [list(job) for job in once]


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
        self.labels = [" ".join(word for word in overrides if word not in shared) or "as it is" for overrides in jobs]

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
        return False  # all jobs exist

    def is_due(self, job: Job) -> bool:
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
        """Print the best job, mark the sweep as done if all of its jobs are, and raise UserError if some failed."""
        jobs = self.folder.jobs()
        if is_over and not any(job.state == "failed" for job in jobs):
            self.folder.finish()
        best = best_job(jobs, self.directions)
        if best is not None and self.names:
            print(f"Best {self.names[0]}, {best.objective:.4g}: job {best.number}, {best.label}")
        refuse(failures(jobs, "The same command tries them again, and keeps the others."))


class Search(Listed):
    """Trials of the overrides `words` with points of `options["space"]`: one job, or one per repeat.

    `compose` composes the configuration of overrides, and `cfg` is a job's configuration.
    """

    def __init__(self, compose: Any, overrides: list[str], options: dict[str, Any], cfg: Any) -> None:
        self.words, self.options, self.storage = overrides, options, options["storage"]
        if self.storage:  # before anything is written
            open_storage(Path(), self.storage)
        self.space = space_of(options["space"])
        for word_typed in overrides:
            key = key_of(word_typed)
            if key in self.space and not self.space[key].when:
                print(f"{word_typed} is replaced by sweep.space.{key}.", flush=True)
        self.repeats = repeats_of(options["repeats"], overrides, self.space)
        self.grid: list[dict[str, Any]] = []
        if options["sampler"] == "grid":
            values = [all_values(key, entry) for key, entry in self.space.items()]
            self.grid = [dict(zip(self.space, point, strict=True)) for point in itertools.product(*values)]
            if options["pruner"] != "none":  # it would keep each that is better than its predecessor
                random.Random(options["seed"]).shuffle(self.grid)  # noqa: S311 (no secret)
        self.trials: int = len(self.grid) or options["trials"]
        self.total = self.trials * len(self.repeats)
        # compose a job with each value of a list and each end of a range, so that unknown keys raise
        for key, entry in self.space.items():
            for value in entry.choices or [entry.distribution.low, entry.distribution.high]:
                when = [word(other, wanted, self.space.get(other)) for other, wanted in entry.when.items()]
                compose([*self.words, *when, word(key, value, entry)])
        for repeat in self.repeats:
            compose([*self.words, *repeat])
        self.hopeless = False  # no trial can have a value
        self.names, self.directions = objectives_of(options, cfg)
        sampler_of(options, 0)  # raises for a class that is none
        message = f"sweep.pruner={shown(options['pruner'])} compares one objective. Set sweep.pruner=none."
        require(len(self.directions) == 1 or options["pruner"] == "none", message)
        self.compares = check_pruner(options, len(self.repeats))

    def prepare(self, folder: SweepDir) -> None:
        """Open or create the study, and end the trials whose jobs had ended before a kill."""
        self.folder = folder
        folder.open(self.directions)
        with folder.adding():
            for trial in folder.trials():
                known = trial.user_attrs
                own = not self.storage or ("place" in known and is_own(trial, folder.path))
                if trial.state.name == "RUNNING" and "jobs" not in known and own:  # killed before it was drawn
                    self.tell(trial.number, "failed")
            self.settle_all()

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
                trial.set_user_attr("place", f"{socket.gethostname()}:{self.folder.path}")
            index = _begun(self.folder.trials()[: trial.number])
            if index >= self.trials:  # another machine has just begun the last one
                self.tell(trial.number, "failed")
                return False
            point = self.grid[index] if self.grid else None
            study.sampler = sampler_of(self.options, trial.number, point)  # its number may differ from that above
            prune_now(study, trial.number)
            chosen: dict[str, Any] = {}
            for key, entry in self.space.items():
                if all(chosen.get(other) == wanted for other, wanted in entry.when.items()):
                    value = trial._suggest(key, entry.distribution)
                    chosen[key] = value if getattr(entry.distribution, "step", None) is None else _exact(value)
            drawn = [word(key, value, self.space[key]) for key, value in chosen.items()]
            jobs = [[*drawn, *repeat] for repeat in self.repeats]
            first = trial.number * len(jobs)
            named = [[first + at, [*self.words, *own], brief(own)] for at, own in enumerate(jobs)]
            trial.set_user_attr("jobs", named)
            for job in self.folder.jobs_of(trial.number):
                self.folder.write_page(job)
        return True

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
        number, why, study = jobs[0].trial, None, self.folder.study
        first = {job.state: job for job in reversed(jobs)}  # of each state
        complete = [job for job in jobs if job.state == "complete"]
        if "failed" in first:
            why = f"not run, as job {first['failed'].number} failed, and trial {number} with it."
        elif "pruned" in first:
            why = first["pruned"].sentence or ""
        elif self.compares and complete:
            for job in complete:
                study._storage.set_trial_intermediate_value(trial_id(study, number), job.repeat, job.values[0])
            if len(complete) < len(jobs) and prune_now(study, number):
                why = f"not run, as trial {number} fell behind in {len(complete)} of its {len(jobs)} runs."
        if why is not None:
            for job in jobs:
                if job.state == "waiting":
                    job.state, job.sentence = "pruned", why
                    self.folder.save(job)
        states = {job.state for job in jobs}
        if states <= set(ENDED):
            state = next(state for state in ("failed", "pruned", "complete") if state in states)
            means = [statistics.fmean(values) for values in zip(*(job.values for job in jobs), strict=False)]
            self.tell(number, state, means)

    def concluded(self, is_over: bool) -> None:
        """Print the best trials, the number of failed ones, and those of other machines; raise if all failed."""
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
            point = " ".join(word(key, value, self.space.get(key)) for key, value in trial.params.items())
            which = f"job {trial.number}" if count == 1 else f"trial {trial.number}, mean of {count}"
            print(f"Best {', '.join(self.names)}, {values}: {which}, {point}")
        if failed and complete:
            first = f"the first of them trial {failed[0].number}"
            print(f"{len(failed)} of {len(trials)} trials failed, {first}. They are not tried again.")
        for trial in running:
            machine = trial.user_attrs.get("place")
            print(f"Trial {trial.number} runs at {machine}, or was ended there: the same command there resumes it.")
        if {job.trial for job in jobs} == {job.trial for job in jobs if job.state == "failed"}:
            refuse(failures(jobs, "No trial is left to go by."))


def failures(jobs: Sequence[Job], way: str) -> list[str]:
    """Return a sentence about the failed jobs with a `way` to continue; none without such jobs."""
    failed = [job for job in jobs if job.state == "failed"]
    if not failed:
        return []
    reason = str(failed[0].sentence)
    reason = reason if reason.endswith("?") else f"{reason.rstrip('.')}."
    return [f"{len(failed)} of {len(jobs)} jobs failed, the first of them ({failed[0].label}) with: {reason} {way}"]


def _begun(trials: Sequence[Any]) -> int:
    """Count the trials that have jobs, or are being drawn by another process."""
    return sum("jobs" in trial.user_attrs or trial.state.name == "RUNNING" for trial in trials)


def objectives_of(options: Mapping[str, Any], cfg: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the objectives of runs of `cfg`, and max or min for each; raise UserError if unknown."""
    directions, (own, _) = options["directions"], objective_of(cfg)
    names = list(options["objectives"] or ([] if own is None else [own]))
    require(bool(names), "sweep.objectives: the run names none: set objective= to a metric, and sweep.directions.")
    if directions != "auto":
        listed = [directions] * len(names) if isinstance(directions, str) else list(directions)
        message = f"sweep.directions={shown(directions)}: expected one for each of {shown(names)}."
        require(len(listed) == len(names), message)
        return names, listed
    minimised = {name: True if name in LESS else objective_of({**cfg, "objective": name})[1] for name in names}
    unknown = next((name for name, lower in minimised.items() if lower is None), None)
    require(unknown is None, f"sweep.directions: the direction of {unknown} is unknown: set max or min.")
    return names, ["min" if lower else "max" for lower in minimised.values()]


def reached(job: Job, names: Sequence[str] | None) -> list[float]:
    """Return the values of a complete job's run, or its own objective without `names`; raise if one is missing."""
    if not names and job.objective is not None:
        return [float(job.objective)]
    metrics: dict[str, Any] = {}
    if job.run_dir is not None:
        run = RunDir(job.run_dir)
        costs = cost_of(run.receipt if (run.path / "receipt.json").exists() else {})
        metrics = {**(run.result if run.complete else {}), **costs, "latency": costs["latency_ms"]}
    missing = [name for name in names or ["objective"] if metrics.get(name) is None]
    known = sorted(name for name, value in metrics.items() if isinstance(value, float) and name != "objective")
    hint = did_you_mean(missing[0], known) if missing else ""
    require(not missing, f"its run has no {' and no '.join(missing)}; {hint}")
    return [float(metrics[name]) for name in names or ()]


# -- the space of a search


@dataclass(frozen=True)
class Entry:
    """One key of `sweep.space`: its Optuna distribution, and the values of other keys `when` it is drawn.

    `lists` has the lists and mappings among its values by their spelling, which is what Optuna can store.
    """

    distribution: Any
    when: Mapping[str, Any]
    lists: Mapping[str, Any]

    @property
    def choices(self) -> Any:
        """The values of a list; None for a range."""
        return getattr(self.distribution, "choices", None)


def word(key: str, value: Any, entry: Entry | None = None) -> str:
    """Return the override `key=value`; in a study, the value of a list `entry` is its spelling."""
    if entry is not None and isinstance(value, str):
        value = entry.lists.get(value, value)
    bare = isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value, re.ASCII) and shown(value) == value
    return f"{key}={value if bare else as_typed(value)}"


def brief(overrides: Sequence[str]) -> str:
    """Return overrides for a table, with four significant digits of numbers that are not whole."""
    pairs = []
    for key, _, value in (word.partition("=") for word in overrides):
        with suppress(ValueError):
            value = value if value.lstrip("-").isdigit() else f"{float(value):.4g}"
        pairs.append(f"{key}={value}")
    return " ".join(pairs)


def space_of(space: Mapping[str, Any]) -> dict[str, Entry]:
    """Return `sweep.space`, checked. An entry may depend on the value of a key before it."""
    require(bool(space), "sweep.space is empty: name a key and its values, {optimizer.lr: [0.1, 0.3]}.")
    entries: dict[str, Entry] = {}
    for key, value in space.items():
        entry = entry_of(key, value)
        for other, wanted in entry.when.items():
            is_above = other in entries and wanted in (entries[other].choices or [wanted])
            require(is_above, f"sweep.space.{key}.when: no key of sweep.space above it has {other}={shown(wanted)}.")
        entries[key] = entry
    return entries


def entry_of(key: str, content: Any) -> Entry:
    """Return one key's entry in `sweep.space`; raise UserError if Optuna can't draw from it."""
    import optuna

    name, part = f"sweep.space.{key}={shown(content)}", key_of(f"{key}=").split(".")[0]
    require(part not in NOT_THE_EXPERIMENT, f"{name}: {part} is not a part of an experiment.")
    entry: dict[str, Any] = dict(content) if isinstance(content, Mapping) else {"values": content}
    when = {other: _plain(value) for other, value in (entry.pop("when", None) or {}).items()}
    listed = entry.get("values")
    kinds = optuna.distributions
    try:
        if listed is not None:
            require(isinstance(listed, list) and len(entry) == 1, f"{name}: expected a list of values.")
            values = [_plain(value) for value in listed]
            require(len(set(map(shown, values))) == len(values), f"{name}: a value is there twice.")
            lists = {_plain(value): value for value in listed if isinstance(value, (list, Mapping))}
            return Entry(kinds.CategoricalDistribution(values), when, lists)
        ends = {option: value for option, value in entry.items() if value is not None}
        require(math.isfinite(ends["high"] - ends["low"]), f"{name}: a range has two ends, which are finite numbers.")
        is_whole = all(isinstance(value, int) for value in ends.values())
        return Entry((kinds.IntDistribution if is_whole else kinds.FloatDistribution)(**ends), when, {})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name}: expected a list of values, or {{low: ..., high: ...}} ({error}).") from error


def _plain(value: Any) -> Any:
    """Return a value that Optuna can store: for a list or a mapping, its spelling on the command line."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else as_typed(value)


def all_values(key: str, entry: Entry) -> list[Any]:
    """Return every value of `key`; raise UserError if there are infinitely many."""
    require(not entry.when, f"sweep.space.{key}.when: sweep.sampler=grid takes every combination: choose tpe.")
    if entry.choices is not None:
        return list(entry.choices)
    ends = entry.distribution
    if ends.step is None or ends.log:
        raise UserError(f"sweep.space.{key}: sweep.sampler=grid takes all values: give a list, or a step.")
    return [_exact(ends.low + index * ends.step) for index in range(int((ends.high - ends.low) / ends.step + 1e-9) + 1)]


def _exact(value: float) -> float:
    """Remove the rounding error of added steps: 0.3, not 0.30000000000000004."""
    return value if isinstance(value, int) else float(f"{value:.12g}")


def repeats_of(values: Mapping[str, Any] | None, overrides: Sequence[str], space: Iterable[str]) -> list[list[str]]:
    """Return the overrides of each run of a trial; one run without overrides if sweep.repeats is None."""
    if values is None:
        return [[]]
    typed = [*space, *map(key_of, overrides)]
    both = next((key for key in values if key in typed), None)
    require(both is None and bool(values), f"sweep.repeats={shown(values)}: name keys that are not set otherwise.")
    return [[word(*item) for item in zip(values, point, strict=True)] for point in itertools.product(*values.values())]


def check_pruner(options: Mapping[str, Any], count: int) -> bool:
    """Return whether the pruner compares the `count` repeats of a trial; raise UserError if it would do nothing."""
    import optuna

    pruner, name = options["pruner"], f"sweep.pruner={shown(options['pruner'])}"
    built = pruner_of(options)
    if not isinstance(built, optuna.pruners.WilcoxonPruner):
        alone = options.get("repeats") is None or pruner == "none"
        require(alone, f"{name} compares single runs, and each trial has {count}: choose wilcoxon or none.")
        return False
    least = math.floor(-math.log2(built._p_threshold)) + 1  # repeats that all fall behind have p = 2 ** -least
    message = f"{name} can end a trial after {least} runs, and sweep.repeats has {count}. Give {least + 1} or more."
    require(count > least, message)
    return True
