"""A search: jobs drawn one after the other by Optuna, which is told how each has ended."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lathe.config.composed import resolve
from lathe.config.composing import as_typed
from lathe.config.direction import objective_of
from lathe.config.schema import shown
from lathe.errors import UserError, did_you_mean, require
from lathe.launch.sweep.context import Context
from lathe.launch.sweep.place import Job, SweepDir
from lathe.runs.cost import COSTS, cost_of
from lathe.runs.rundir import RunDir
from lathe.runs.study import check_installed, open_study, sampler_of

LESS = (*COSTS, "latency", "seconds", "parameters", "steps")  # of these, less is better
ENTRY = ("low", "high", "log", "step", "values", "when")


class Search:
    """Jobs of the words `words`, each with a point of `options["space"]` after them."""

    again = False  # a trial is told once

    def __init__(self, context: Context, words: list[str], options: dict[str, Any]) -> None:
        check_installed()
        self.context, self.words, self.options = context, words, options
        self.space = {key: entry_of(key, entry) for key, entry in options["space"].items()}
        require(bool(self.space), "sweep.space is empty: name a key and its values, {optimizer.lr: [0.1, 0.3]}.")
        _check_conditions(self.space)
        self.total: int | None = options["trials"]
        self.grid: list[dict[str, Any]] = []
        if options["sampler"] == "grid":
            values = [_all_values(key, entry) for key, entry in self.space.items()]
            self.grid = [dict(zip(self.space, point, strict=True)) for point in itertools.product(*values)]
            self.total = len(self.grid)
        self._check_keys()
        self.directions = self._directions()
        require(
            len(self.directions) == 1 or options["pruner"] == "none",
            f"sweep.pruner={shown(options['pruner'])} compares runs by one number, and sweep.objectives names "
            f"{len(self.directions)}: set sweep.pruner=none.",
        )

    def _check_keys(self) -> None:
        """Composes a job with each value of a list, and each end of a range: what names no key is told."""
        for key, entry in self.space.items():
            for value in entry.get("values") or [entry["low"], entry["high"]]:
                when = [_word(other, wanted) for other, wanted in entry.get("when", {}).items()]
                self.context.composed([*self.words, *when, _word(key, value)])

    def _directions(self) -> list[str]:
        names, asked = self.options["objectives"], self.options["directions"]
        count = len(names) if names else 1
        if asked != "auto":
            listed = [asked] * count if isinstance(asked, str) else asked
            require(
                len(listed) == count,
                f"sweep.directions={shown(asked)}: expected one for each of {count} objectives, or one for all.",
            )
            return list(listed)
        cfg = resolve(self._first())
        if not names:
            name, minimised = objective_of(cfg)
            require(name is not None, "sweep.objectives: the run names no objective: set objective=val/accuracy.")
            return [_way(str(name), minimised)]
        return [_way(name, name in LESS or objective_of({**cfg, "objective": name})[1]) for name in names]

    def _first(self) -> DictConfig:
        config = self.context.composed(self.words)
        return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])

    def prepare(self, folder: SweepDir) -> None:
        """Opens the study, or makes it.

        Raises:
            UserError: its storage can't be opened, or holds the study of another space.
        """
        self.study = open_study(folder.path, folder.facts, self.directions)
        told, mine = self.study.user_attrs.get("space"), json.dumps(self.options["space"], sort_keys=True)
        require(
            told in (None, mine),
            f"sweep.storage={self.options['storage']} has a study of another space under this name: choose another "
            "name=..., or the space that it has.",
        )
        if told is None:
            self.study.set_user_attr("space", mine)
        if self.options["storage"] is None:  # nobody else's: what a kill left before its job was written down
            there = {job.number for job in folder.jobs()}
            for trial in self._trials():
                if not trial.state.is_finished() and trial.number not in there:
                    self._tell(trial.number, failed=True)

    def _trials(self) -> list[Any]:
        return list(self.study.get_trials(deepcopy=False))

    def more(self, folder: SweepDir) -> Job | None:
        """The next trial as a job, or None once there are as many as were asked for."""
        with folder.adding():
            counted = self._trials() if self.options["storage"] else folder.jobs()
            if self.total is not None and len(counted) >= self.total:
                return None
            self.study.sampler = sampler_of(self.options, len(self._trials()))
            if self.grid:
                self.study.enqueue_trial(self.grid[len(counted)])
            trial = self.study.ask()
            point = list(self._drawn(trial))
            job = Job(trial.number, [*self.words, *point], " ".join(point))
            folder.save(job)
            return job

    def _drawn(self, trial: Any) -> Iterator[str]:
        chosen: dict[str, Any] = {}
        for key, entry in self.space.items():
            if any(chosen.get(other) != wanted for other, wanted in entry.get("when", {}).items()):
                continue
            chosen[key] = _suggested(trial, key, entry)
            yield _word(key, chosen[key])

    def told(self, job: Job) -> None:
        """Tells the study what a job's run has reached; a job without a number has failed."""
        if job.state == "complete":
            values = self._values(job)
            missing = [name for name, value in values.items() if value is None]
            if not missing:
                job.values = [float(value) for value in values.values() if value is not None]
                self._tell(job.number, job.values)
                return
            job.state, job.sentence = "failed", f"its run has no {' and no '.join(missing)}."
        self._tell(job.number, failed=job.state == "failed", pruned=job.state == "pruned")

    def _values(self, job: Job) -> dict[str, float | None]:
        names = self.options["objectives"]
        if not names:
            return {"objective": job.objective}
        run = RunDir(str(job.run_dir))
        receipt = run.receipt if (run.path / "receipt.json").exists() else {}
        found = {**run.result, **cost_of(receipt)}
        found["latency"] = found["latency_ms"]
        return {name: found.get(name) for name in names}

    def concluded(self) -> None:
        """Says which trials were the best."""
        told = [trial for trial in self._trials() if trial.state.name == "COMPLETE"]
        best = [] if not told else self.study.best_trials if len(self.directions) > 1 else [self.study.best_trial]
        for trial in best[:5]:
            values = ", ".join(f"{value:.4g}" for value in trial.values)
            print(f"Best, {values}: job {trial.number}, {' '.join(_word(*item) for item in trial.params.items())}")

    def _tell(
        self, number: int, values: Sequence[float] | None = None, failed: bool = False, pruned: bool = False
    ) -> None:
        import optuna

        state = optuna.trial.TrialState
        kind = state.FAIL if failed else state.PRUNED if pruned else None
        self.study.tell(number, values, state=kind, skip_if_finished=True)


def _word(key: str, value: Any) -> str:
    plain = isinstance(value, str) and shown(value) == value
    return f"{key}={value if plain else as_typed(value)}"


def entry_of(key: str, entry: Any) -> dict[str, Any]:
    """What `sweep.space` says of one key, checked.

    Raises:
        UserError: it is no list of values, and no range.
    """
    name = f"sweep.space.{key}"
    if isinstance(entry, list):
        return {"values": [_plain(value) for value in entry]}
    form = "expected a list of values, or {low: ..., high: ...}"
    require(isinstance(entry, Mapping), f"{name}={shown(entry)}: {form}.")
    found = {str(word): value for word, value in entry.items()}
    strange = next((word for word in found if word not in ENTRY), None)
    require(strange is None, f"{name}.{strange}: there is no such word; {did_you_mean(strange, ENTRY)}")
    when = found.get("when", {})
    require(isinstance(when, Mapping), f"{name}.when={shown(when)}: expected {{key: value}}.")
    if "values" in found:
        listed = found["values"]
        require(isinstance(listed, list) and bool(listed), f"{name}.values={shown(listed)}: expected a list of values.")
        require(set(found) <= {"values", "when"}, f"{name}: values stand alone: leave low and high out.")
        return {**found, "values": [_plain(value) for value in listed]}
    low, high = found.get("low"), found.get("high")
    numbers = all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in (low, high))
    require(numbers, f"{name}={shown(entry)}: {form}.")
    assert isinstance(low, (int, float))
    assert isinstance(high, (int, float))
    require(low < high, f"{name}: low={low} is not below high={high}: turn them round, or give a list of one.")
    require(not found.get("log") or low > 0, f"{name}: low={low} has no logarithm: choose one above 0, or log=false.")
    require(
        not found.get("log") or found.get("step") is None, f"{name}: log and step do not go together: leave one out."
    )
    step = found.get("step")
    good = step is None or (isinstance(step, (int, float)) and not isinstance(step, bool) and step > 0)
    require(good, f"{name}.step={shown(step)}: expected a number above 0.")
    return found


def _check_conditions(space: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError where a key waits for a value that none before it can have."""
    before: dict[str, Mapping[str, Any]] = {}
    for key, entry in space.items():
        for other, wanted in entry.get("when", {}).items():
            name = f"sweep.space.{key}.when"
            require(other in before, f"{name}: {other} is no key of sweep.space above it: put it there, with values.")
            values = before[other].get("values")
            require(
                values is None or wanted in values,
                f"{name}: {other} is never {shown(wanted)}: choose one of {shown(values)}.",
            )
        before[key] = entry


def _plain(value: Any) -> Any:
    """A value that Optuna keeps: others stand there as they are typed."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else as_typed(value)


def _whole(entry: Mapping[str, Any]) -> bool:
    return all(isinstance(entry.get(key, 0) or 0, int) for key in ("low", "high", "step"))


def _suggested(trial: Any, key: str, entry: Mapping[str, Any]) -> Any:
    if "values" in entry:
        return trial.suggest_categorical(key, entry["values"])
    low, high, step, log = entry["low"], entry["high"], entry.get("step"), bool(entry.get("log"))
    if _whole(entry):
        return trial.suggest_int(key, low, high, step=step or 1, log=log)
    return trial.suggest_float(key, low, high, step=step, log=log)


def _all_values(key: str, entry: Mapping[str, Any]) -> list[Any]:
    require("when" not in entry, f"sweep.space.{key}.when: sweep.sampler=grid takes every combination: choose tpe.")
    if "values" in entry:
        return list(entry["values"])
    low, high, step = entry["low"], entry["high"], entry.get("step") or (1 if _whole(entry) else None)
    require(
        step is not None and not entry.get("log"),
        f"sweep.space.{key}: sweep.sampler=grid takes all values, and this range has no end of them: give a list, or a "
        "step.",
    )
    assert step is not None
    count = int((high - low) / step + 1e-9) + 1
    return [low + index * step for index in range(count)]


def _way(name: str, minimised: bool | None) -> str:
    if minimised is None:
        raise UserError(f"sweep.directions: nothing says whether more {name} is better: set it to max or min.")
    return "min" if minimised else "max"
