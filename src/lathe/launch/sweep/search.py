"""A search: Optuna draws trials one after another, and gets the results of their jobs."""

import itertools
import json
import random
import socket
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf

from lathe.config.resolve import resolve
from lathe.config.values import shown
from lathe.errors import UserError, require
from lathe.launch.sweep.context import Context
from lathe.launch.sweep.objectives import check_objectives, objectives_of, reached
from lathe.launch.sweep.place import Job, SweepDir
from lathe.launch.sweep.plan import tell_typed
from lathe.launch.sweep.repeats import check_pruner, repeats_of
from lathe.launch.sweep.space import all_values, brief, check_conditions, entry_of, suggested, word
from lathe.runs.optuna_study import (
    check_installed,
    make_brackets,
    open_database,
    open_study,
    pruner_of,
    sampler_of,
    should_prune,
)

SAME = ("space", "repeats", "objectives", "directions")  # must be equal on machines that share a study


class Search:
    """Trials of the overrides `words` with points of `options["space"]`: one job, or one per repeat."""

    again = False  # a trial has one result

    def __init__(self, context: Context, words: list[str], options: dict[str, Any]) -> None:
        check_installed()
        self.context, self.words, self.options = context, words, options
        self.shared = options["storage"] is not None
        if self.shared:  # before anything is written
            open_database(options["storage"])
        self.space = {key: entry_of(key, entry) for key, entry in options["space"].items()}
        require(bool(self.space), "sweep.space is empty: name a key and its values, {optimizer.lr: [0.1, 0.3]}.")
        check_conditions(self.space)
        always = [key for key, entry in self.space.items() if not entry.get("when")]
        tell_typed(words, always, "sweep.space", wins=False)
        self.repeats = repeats_of(options["repeats"], words, self.space)
        self.trials: int = options["trials"]
        self.grid: list[dict[str, Any]] = []
        if options["sampler"] == "grid":
            values = [all_values(key, entry) for key, entry in self.space.items()]
            self.grid = [dict(zip(self.space, point, strict=True)) for point in itertools.product(*values)]
            if options["pruner"] != "none":  # it would keep each that is better than its predecessor
                random.Random(options["seed"]).shuffle(self.grid)  # noqa: S311 (no secret)
            self.trials = len(self.grid)
        self.total: int | None = self.trials * len(self.repeats)
        self._check_keys()
        self.hopeless: str | None = None  # why no trial can have a value
        config = context.composed(words)
        cfg = resolve(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
        check_objectives(options["objectives"] or [], cfg, self.space)
        self.names: Sequence[str]
        self.directions: Sequence[str]
        self.names, self.directions = objectives_of(options, cfg)
        sampler_of(options, 0)
        require(
            len(self.directions) == 1 or options["pruner"] == "none",
            f"sweep.pruner={shown(options['pruner'])} compares runs by one number, and sweep.objectives names "
            f"{len(self.directions)}: set sweep.pruner=none.",
        )
        self.compares = check_pruner(options, len(self.repeats))

    def _check_keys(self) -> None:
        """Compose a job with each value of a list and each end of a range, so that unknown keys raise."""
        for key, entry in self.space.items():
            group = "low" in entry and self.context.loader.get_group_options(key)
            require(
                not group,
                f"sweep.space.{key}={shown(self.options['space'][key])}: {key} is a group, which takes a list of its "
                "choices.",
            )
            for value in entry.get("values") or [entry["low"], entry["high"]]:
                when = [word(other, wanted, self.space.get(other)) for other, wanted in entry.get("when", {}).items()]
                self.context.composed([*self.words, *when, word(key, value, entry)])
        for repeat in self.repeats:
            self.context.composed([*self.words, *repeat])

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
        if self.hopeless is not None:
            return None
        with folder.adding():
            trials = folder.trials()
            return self._next_repeat(trials) or self._new_trial(trials)

    def unfinished(self, folder: SweepDir) -> int:
        """Return the number of jobs that started trials still lack."""
        return sum(len(self.repeats) - len(jobs) for jobs in folder.trials().values())

    def _next_repeat(self, trials: dict[int, list[Job]]) -> Job | None:
        for number, jobs in trials.items():
            if len(jobs) < len(self.repeats) and (not self.compares or all(job.values for job in jobs)):
                return self._added(number, self._lacking(jobs)[0], self._point(jobs[0]))
        return None

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
            if any(chosen.get(other) != wanted for other, wanted in entry.get("when", {}).items()):
                continue
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
            if not any(trial.state.name == "COMPLETE" for trial in self._trials()):
                self.hopeless = job.sentence

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
        """Print the best trials, and the number of failed ones."""
        told = [trial for trial in self._trials() if trial.state.name == "COMPLETE"]
        best = [] if not told else self.study.best_trials if len(self.directions) > 1 else [self.study.best_trial]
        for trial in best[:5]:
            values = ", ".join(f"{value:.4g}" for value in trial.values)
            words = " ".join(word(key, value, self.space.get(key)) for key, value in trial.params.items())
            print(f"Best {', '.join(self.names)}, {values}: {self._named(trial.number)}, {words}")
        failed = [trial.number for trial in self._trials() if trial.state.name == "FAIL"]
        if failed and told:
            print(
                f"{len(failed)} of {len(self._trials())} trials failed, the first of them {self._named(failed[0])}. "
                "They are told to the study as failed, and not tried again."
            )
        self._tell_of_others()

    def _named(self, trial: int) -> str:
        count = len(self.repeats)
        first = trial * count
        return f"job {trial}" if count == 1 else f"trial {trial}, mean of {count}, jobs {first} to {first + count - 1}"

    def _tell_of_others(self) -> None:
        """Print the trials of a shared study that other machines have begun and not ended."""
        own = self.folder.trials()
        for trial in self._trials():
            if trial.state.name == "RUNNING" and trial.number not in own:
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
    return str(trial.user_attrs.get("sweep", "a place that it has not said"))
