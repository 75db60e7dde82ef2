"""A search: Optuna draws trials one after another, and gets the results of their jobs."""

import itertools
import json
import random
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from lathe.config.metric_names import COSTS, cost_of, objective_of
from lathe.config.resolve import resolve
from lathe.config.values import shown
from lathe.errors import UserError, did_you_mean, require
from lathe.launch.sweep.search_space import (
    all_values,
    brief,
    check_pruner,
    print_replaced,
    repeats_of,
    space_of,
    suggested,
    word,
)
from lathe.launch.sweep.sweep_dir import Job, SweepDir
from lathe.runs.optuna_study import (
    check_installed,
    make_brackets,
    open_database,
    open_study,
    pruner_of,
    sampler_of,
    should_prune,
)
from lathe.runs.rundir import RunDir

SAME = ("space", "repeats", "objectives", "directions")  # must be equal on machines that share a study
LESS = (*COSTS, "latency", "seconds", "parameters", "steps")  # lower is better


class Search:
    """Trials of the overrides `words` with points of `options["space"]`: one job, or one per repeat.

    `compose` composes the configuration of overrides, `is_group` tells whether a key is a configuration group.
    """

    again = False  # a trial has one result

    def __init__(self, compose: Any, is_group: Any, words: list[str], options: dict[str, Any]) -> None:
        check_installed()
        self.words, self.options = words, options
        self.shared = options["storage"] is not None
        if self.shared:  # before anything is written
            open_database(options["storage"])
        self.space = space_of(options["space"])
        print_replaced(
            words, [key for key, entry in self.space.items() if not entry["when"]], "sweep.space", wins=False
        )
        self.repeats = repeats_of(options["repeats"], words, self.space)
        self.trials: int = options["trials"]
        self.grid: list[dict[str, Any]] = []
        if options["sampler"] == "grid":
            values = [all_values(key, entry) for key, entry in self.space.items()]
            self.grid = [dict(zip(self.space, point, strict=True)) for point in itertools.product(*values)]
            if options["pruner"] != "none":  # it would keep each that is better than its predecessor
                random.Random(options["seed"]).shuffle(self.grid)  # noqa: S311 (no secret)
            self.trials = len(self.grid)
        self.total = self.trials * len(self.repeats)
        self._check_keys(compose, is_group)
        self.hopeless = False  # no trial can have a value
        config = compose(words)
        cfg = resolve(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
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
                "low" not in entry or not is_group(key),
                f"sweep.space.{key}: {key} is a group, which takes a list of its choices.",
            )
            for value in entry.get("values") or [entry["low"], entry["high"]]:
                when = [word(other, wanted, self.space.get(other)) for other, wanted in entry["when"].items()]
                compose([*self.words, *when, word(key, value, entry)])
        for repeat in self.repeats:
            compose([*self.words, *repeat])

    def prepare(self, folder: SweepDir) -> None:
        """Open or create the study, and complete it with the results of jobs before a kill."""
        self.folder = folder
        self.study = open_study(folder.path, folder.facts, self.directions)
        self._check_same()
        with folder.adding():
            there = folder.trials()
            for trial in self._trials():
                if trial.state.name != "RUNNING":
                    continue
                if trial.number in there:
                    self._settle(there[trial.number])
                elif not self.shared or _place(trial).endswith(folder.path.name):  # killed before its job was written
                    self._tell(trial.number, failed=True)

    def _check_same(self) -> None:
        told = self.study.user_attrs
        mine = {**{key: self.options[key] for key in SAME}, "directions": self.directions}
        for key in SAME:
            text = json.dumps(mine[key], sort_keys=True)
            if key not in told:
                self.study.set_user_attr(key, text)
            require(
                told.get(key, text) == text,
                f"sweep.storage={self.options['storage']} has a study under this name whose sweep.{key} is another "
                f"({told.get(key)}): choose another name=..., or say the same.",
            )

    def _trials(self) -> list[Any]:
        return list(self.study.get_trials(deepcopy=False))

    def more(self, folder: SweepDir) -> Job | None:
        """Return the next run of a started trial, or the first of a new one; None if all trials have begun.

        Runs that are compared (sweep.pruner=wilcoxon) wait for the trial's previous one.
        """
        if self.hopeless:
            return None
        with folder.adding():
            trials = folder.trials()
            for number, jobs in trials.items():
                if self._lacking(jobs) and (not self.compares or all(job.values for job in jobs)):
                    return self._added(number, self._lacking(jobs)[0], self._point(jobs[0]))
            return self._new_trial(trials)

    def unfinished(self, folder: SweepDir) -> int:
        """Return the number of jobs that started trials still lack."""
        return sum(len(self.repeats) - len(jobs) for jobs in folder.trials().values())

    def _lacking(self, jobs: list[Job]) -> list[int]:
        begun = {job.repeat for job in jobs}
        return [repeat for repeat in range(len(self.repeats)) if repeat not in begun]

    def _point(self, job: Job) -> list[str]:
        """Return the overrides that were drawn for the job's trial."""
        return job.overrides[len(self.words) : len(job.overrides) - len(self.repeats[job.repeat])]

    def _added(self, trial: int, repeat: int, point: list[str], **more: Any) -> Job:
        own = [*point, *self.repeats[repeat]]
        number = trial * len(self.repeats) + repeat
        job = Job(number, [*self.words, *own], brief(own), trial=trial, repeat=repeat, **more)
        self.folder.save(job)
        return job

    def _new_trial(self, trials: dict[int, list[Job]]) -> Job | None:
        known = len(self._trials())
        if (known if self.shared else len(trials)) >= self.trials:
            return None
        self.study.sampler, self.study.pruner = sampler_of(self.options, known), pruner_of(self.options)
        trial = self.study.ask()
        if self.shared:
            if trial.number >= self.trials:  # another machine has just begun the last one
                self._tell(trial.number, failed=True)
                return None
            trial.set_user_attr("sweep", f"{socket.gethostname()}:{self.folder.path}")
        point = self.grid[trial.number if self.shared else len(trials)] if self.grid else None
        self.study.sampler = sampler_of(self.options, trial.number, point)  # its number may differ from `known`
        make_brackets(self.study, trial.number)
        return self._added(trial.number, 0, list(self._drawn(trial)))

    def _drawn(self, trial: Any) -> Iterator[str]:
        chosen: dict[str, Any] = {}
        for key, entry in self.space.items():
            if all(chosen.get(other) == wanted for other, wanted in entry["when"].items()):
                chosen[key] = suggested(trial, key, entry)
                yield word(key, chosen[key], entry)

    def told(self, job: Job) -> list[Job]:
        """Process a finished job, report its trial to the study if known, and return the skipped jobs."""
        with self.folder.adding():
            self._read(job)
            if job.state == "failed" and len(self.repeats) > 1:
                job.sentence = f"{str(job.sentence).rstrip('.')}. Trial {job.of_trial} fails with it."
            self.folder.save(job)
            return self._settle(self.folder.trials()[job.of_trial])

    def _read(self, job: Job) -> None:
        if job.state != "complete" or job.values:
            return
        try:
            job.values = reached(job, self.options["objectives"])
        except UserError as error:
            job.state, job.sentence = "failed", str(error)
            self.hopeless = not any(trial.state.name == "COMPLETE" for trial in self._trials())

    def _settle(self, jobs: list[Job]) -> list[Job]:
        """Report a trial's result to the study, if known, and return the jobs that are skipped because of it."""
        for job in jobs:
            if job.state == "complete" and not job.values:  # killed before it was read
                self._read(job)
                self.folder.save(job)
        number, why = jobs[0].of_trial, self._cut_short(jobs)
        if why is not None:
            point = self._point(jobs[0])
            left = [self._added(number, repeat, point, state="pruned", sentence=why) for repeat in self._lacking(jobs)]
            self._tell(number, failed=any(job.state == "failed" for job in jobs), pruned=True)
            return left
        if all(job.state == "complete" for job in jobs) and not self._lacking(jobs):
            self._tell(number, [statistics.fmean(values) for values in zip(*(job.values for job in jobs), strict=True)])
        return []

    def _cut_short(self, jobs: list[Job]) -> str | None:
        """Return the reason to end a trial before all of its runs, or None."""
        number = jobs[0].of_trial
        ended = {state: next((job for job in jobs if job.state == state), None) for state in ("failed", "pruned")}
        if ended["failed"] is not None:
            return f"not run, as job {ended['failed'].number} failed, and trial {number} with it."
        if ended["pruned"] is not None:
            return ended["pruned"].sentence or ""
        complete = {job.repeat: job.values[0] for job in jobs if job.state == "complete"}
        if self.compares and should_prune(self.study, number, complete) and len(complete) < len(self.repeats):
            return f"not run, as trial {number} fell behind in {len(complete)} of its {len(self.repeats)} runs."
        return None

    def concluded(self) -> None:
        """Print the best trials, the number of failed ones, and those that other machines have not ended."""
        trials, own, count = self._trials(), self.folder.trials(), len(self.repeats)
        complete, failed, running = (
            [trial for trial in trials if trial.state.name == state] for state in ("COMPLETE", "FAIL", "RUNNING")
        )
        best = [] if not complete else self.study.best_trials if len(self.directions) > 1 else [self.study.best_trial]

        def named(trial: int) -> str:
            several = f"trial {trial}, mean of {count}, jobs {trial * count} to {trial * count + count - 1}"
            return f"job {trial}" if count == 1 else several

        for trial in best[:5]:
            values = ", ".join(f"{value:.4g}" for value in trial.values)
            words = " ".join(word(key, value, self.space.get(key)) for key, value in trial.params.items())
            print(f"Best {', '.join(self.names)}, {values}: {named(trial.number)}, {words}")
        if failed and complete:
            first = named(failed[0].number)
            print(f"{len(failed)} of {len(trials)} trials failed, the first of them {first}. They are not tried again.")
        for trial in running:
            if trial.number not in own:
                print(
                    f"Trial {trial.number} is not told yet: it runs at {_place(trial)}, or was cut short there; the "
                    "same command there takes it up."
                )

    def _tell(
        self, number: int, values: Sequence[float] | None = None, failed: bool = False, pruned: bool = False
    ) -> None:
        import optuna

        state = optuna.trial.TrialState
        kind = state.FAIL if failed else state.PRUNED if pruned else None
        self.study.tell(number, values, state=kind, skip_if_finished=True)


def _place(trial: Any) -> str:
    """Return where a trial of a shared study was begun."""
    return str(trial.user_attrs.get("sweep", "an unknown place"))


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
