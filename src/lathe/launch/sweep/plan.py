"""Jobs that are known from the start: a grid, a list of commands, an ablation."""

import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from lathe.config.override_parsing import key_of
from lathe.config.quoting import as_typed
from lathe.errors import did_you_mean, require
from lathe.launch.sweep.objectives import best_job, metric_of
from lathe.launch.sweep.place import Job, SweepDir

MANY = 1000  # more than this many files take seconds to write


def own_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into those of the sweep and those of its jobs."""
    of_sweep = [word for word in arguments if key_of(word).split(".")[0] == "sweep"]
    return of_sweep, [word for word in arguments if word not in of_sweep]


def axes_as_words(axes: Mapping[str, Sequence[Any]], params: Mapping[str, Any]) -> list[str]:
    """Return values by key as overrides of Hydra's sweeper."""
    given = [f"{key}={value}" for key, value in params.items()]
    return [*given, *(f"{key}={','.join(as_typed(value) for value in values)}" for key, values in axes.items())]


def combinations(words: Sequence[str], loader: Any) -> list[list[str]]:
    """Return the overrides of each combination of values; of a repeated key, the last counts.

    Raises:
        UserError: an override draws from a continuous range, or is a pattern without matches.
    """
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    for item in parsed:
        require(
            not item.is_sweep_override() or item.is_discrete_sweep(),
            f"{item.input_line} names no values: give some, such as 0.1,0.01, or search it with sweep=optuna "
            "'sweep.space={" + item.key_or_group + ": {low: ..., high: ...}}'.",
        )
    values = {
        item.get_key_element(): [f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()]
        if item.is_sweep_override()
        else [str(item.input_line)]
        for item in parsed
    }
    none = next((item.input_line for item in parsed if not values[item.get_key_element()]), None)
    require(none is None, f"{none}: no choice has that name, so the sweep has no job: write the choices by commas.")
    return [list(point) for point in itertools.product(*values.values())]


def planned(
    words: Sequence[str], options: Mapping[str, Any], params: Mapping[str, Any], loader: Any
) -> list[list[str]]:
    """Return the overrides of every job, in order."""
    variants = _variants(words, options)
    tell_typed(words, options["axes"] or {}, "sweep.axes")
    axes = axes_as_words(options["axes"] or {}, params)
    jobs = [tuple(job) for variant in variants for job in combinations([*axes, *variant], loader)]
    once = list(dict.fromkeys(jobs))
    if len(once) < len(jobs):
        print(f"{len(jobs) - len(once)} jobs stand there twice, and are run once.")
    return [list(job) for job in once]


def tell_typed(words: Sequence[str], keys: Iterable[str], name: str, wins: bool = True) -> None:
    """Print which values count for keys that are both typed and in the sweep's `name`."""
    typed = {key_of(word): word for word in words}
    for key in keys:
        if key in typed:
            taken, left = (typed[key], f"{name}.{key}") if wins else (f"{name}.{key}", typed[key])
            print(f"{left} is replaced by {taken}.", flush=True)


class Listed:
    """Jobs that are known from the start."""

    again = True
    names: Sequence[str] = ()
    directions: Sequence[str] = ()

    def __init__(self, jobs: Sequence[list[str]]) -> None:
        self.jobs = jobs
        self.total: int | None = len(jobs)
        shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
        self.labels = [" ".join(word for word in words if word not in shared) or "as it is" for words in jobs]

    def prepare(self, folder: SweepDir) -> None:
        """Write the jobs that have no file yet."""
        self.folder = folder
        if len(self.jobs) > MANY:
            print(f"{len(self.jobs)} jobs are written down in {folder.path}, which takes a while.", flush=True)
        with folder.adding():
            there = {job.number for job in folder.jobs()}
            for number, words in enumerate(self.jobs):
                if number not in there:
                    folder.save(Job(number, words, self.labels[number]))

    def more(self, folder: SweepDir) -> Job | None:
        """Return None: all jobs exist."""
        return None

    def told(self, job: Job) -> list[Job]:
        """Return no jobs: they are independent."""
        return []

    def unfinished(self, folder: SweepDir) -> int:
        """Return 0: all jobs exist."""
        return 0

    def concluded(self) -> None:
        """Print the best job."""
        jobs = self.folder.jobs()
        names = metric_of(jobs)
        best = best_job(jobs, names)
        if best is not None:
            print(f"Best {names[0]}, {best.objective:.4g}: job {best.number}, {best.label}")


def _variants(words: Sequence[str], options: Mapping[str, Any]) -> list[list[str]]:
    """Return the overrides of each command of the list, and the same without each override to remove."""
    commands = [[*words, *_split(command)] for command in options["runs"] or [""]]
    removed = options["remove"] or []
    for word in removed:
        require(
            word in words,
            f"sweep.remove={word}: that was not typed; {did_you_mean(word, words, 'type it beside sweep.remove')}.",
        )
    return [
        variant
        for command in commands
        for variant in (command, *([item for item in command if item != word] for word in removed))
    ]


def _split(command: str | Sequence[str]) -> list[str]:
    """Return the overrides of a command: a command line, or a list of overrides."""
    told = command if isinstance(command, str) else as_typed(list(command))
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        require(False, f"sweep.runs={told}: {error}: write each as on a command line.")
        raise
    wrong = next((word for word in words if "=" not in word and not word.startswith("~")), None)
    require(wrong is None, f"sweep.runs={told}: {wrong} is no override, such as model=mlp.")
    return words
