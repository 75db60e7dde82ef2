"""The jobs of a sweep as overrides: grids, lists and ablations, and the space and repeats of a search."""

import itertools
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from lathe.config.override_parsing import as_typed, key_of
from lathe.config.values import shown
from lathe.errors import UserError, did_you_mean, require
from lathe.runs.optuna_study import pruner_of
from lathe.runs.rundir import NOT_THE_EXPERIMENT


def planned(
    words: Sequence[str], options: Mapping[str, Any], params: Mapping[str, Any], loader: Any
) -> list[list[str]]:
    """Return the overrides of every job of a grid, list or ablation, in order."""
    commands = [[*words, *_split(command)] for command in options["runs"] or [""]]
    removed, axes = options["remove"] or [], options["axes"] or {}
    for word in removed:
        require(
            word in words,
            f"sweep.remove={word}: that was not typed; {did_you_mean(word, words, 'type it beside sweep.remove')}.",
        )
    print_replaced(words, axes, "sweep.axes")
    first = [f"{key}={value}" for key, value in params.items()]
    first += [f"{key}={','.join(map(as_typed, values))}" for key, values in axes.items()]
    variants = [
        variant
        for command in commands
        for variant in (command, *([item for item in command if item != word] for word in removed))
    ]
    jobs = [tuple(job) for variant in variants for job in combinations([*first, *variant], loader)]
    once = list(dict.fromkeys(jobs))
    if len(once) < len(jobs):
        print(f"{len(jobs) - len(once)} jobs are listed twice and run once.")
    return [list(job) for job in once]


def combinations(words: Sequence[str], loader: Any) -> list[list[str]]:
    """Return the overrides of each combination of values; of a repeated key, the last counts.

    Raises:
        UserError: an override draws from a continuous range, or is a pattern without matches.
    """
    values = {}
    for item in OverridesParser.create(config_loader=loader).parse_overrides(list(words)):
        key, several = item.get_key_element(), item.is_sweep_override()
        require(
            not several or item.is_discrete_sweep(),
            f"{item.input_line} names no values: give some, such as 0.1,0.01, or search it with sweep=optuna "
            "'sweep.space={" + item.key_or_group + ": {low: ..., high: ...}}'.",
        )
        values[key] = (
            [f"{key}={value}" for value in item.sweep_string_iterator()] if several else [str(item.input_line)]
        )
        require(bool(values[key]), f"{item.input_line}: no choice has that name: write the choices by commas.")
    return [list(point) for point in itertools.product(*values.values())]


def print_replaced(words: Sequence[str], keys: Iterable[str], name: str, wins: bool = True) -> None:
    """Print which values count for keys that are both typed and in the sweep's `name`."""
    typed = {key_of(word): word for word in words}
    for key in keys:
        if key in typed:
            taken, left = (typed[key], f"{name}.{key}") if wins else (f"{name}.{key}", typed[key])
            print(f"{left} is replaced by {taken}.", flush=True)


def _split(command: str | Sequence[str]) -> list[str]:
    """Return the overrides of a command: a command line, or a list of overrides."""
    words = shlex.split(command) if isinstance(command, str) else list(command)
    wrong = next((word for word in words if "=" not in word and not word.startswith("~")), None)
    require(wrong is None, f"sweep.runs={command}: {wrong} is no override, such as model=mlp.")
    return words


@dataclass(frozen=True)
class Entry:
    """One key of `sweep.space`: its Optuna distribution, and the values of other keys `when` it is drawn.

    `lists` has the lists and mappings among its values by their spelling, which is what Optuna can store.
    """

    distribution: Any
    when: Mapping[str, Any]
    lists: Mapping[str, Any]

    @property
    def choices(self) -> Sequence[Any] | None:
        """The values of a list; None for a range."""
        found: Sequence[Any] | None = getattr(self.distribution, "choices", None)
        return found

    def drawn(self, trial: Any, key: str) -> Any:
        """Return Optuna's draw."""
        value = trial._suggest(key, self.distribution)
        return _exact(value) if getattr(self.distribution, "step", None) is not None else value


def word(key: str, value: Any, entry: Entry | None = None) -> str:
    """Return the override `key=value`; in a study, the value of a list `entry` is its spelling."""
    if entry is not None and isinstance(value, str):
        value = entry.lists.get(value, value)
    bare = isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value, re.ASCII) and shown(value) == value
    return f"{key}={value if bare else as_typed(value)}"


def brief(words: Sequence[str]) -> str:
    """Return overrides for a table, with four significant digits of numbers that are not whole."""

    def digits(value: str) -> str:
        try:
            return value if value.lstrip("-").isdigit() else f"{float(value):.4g}"
        except ValueError:
            return value

    return " ".join(f"{key}={digits(value)}" for key, _, value in (item.partition("=") for item in words))


def space_of(space: Mapping[str, Any]) -> dict[str, Entry]:
    """Return `sweep.space`, checked.

    Raises:
        UserError: it is empty, an entry can't be drawn, or depends on a value that no key before it can have.
    """
    require(bool(space), "sweep.space is empty: name a key and its values, {optimizer.lr: [0.1, 0.3]}.")
    found: dict[str, Entry] = {}
    for key, given in space.items():
        entry = entry_of(key, given)
        for other, wanted in entry.when.items():
            require(
                other in found and wanted in (found[other].choices or [wanted]),
                f"sweep.space.{key}.when: no key of sweep.space above it has {other}={shown(wanted)}.",
            )
        found[key] = entry
    return found


def entry_of(key: str, given: Any) -> Entry:
    """Return one key's entry in `sweep.space`; raise UserError if Optuna can't draw from it."""
    import optuna

    name, part = f"sweep.space.{key}={shown(given)}", key_of(f"{key}=").split(".")[0]
    require(part not in NOT_THE_EXPERIMENT, f"{name}: {part} is not a part of an experiment.")
    entry: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"values": given}
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


def repeats_of(values: Mapping[str, Any] | None, words: Sequence[str], space: Iterable[str]) -> list[list[str]]:
    """Return the overrides of each run of a trial; one run without overrides if sweep.repeats is None."""
    if values is None:
        return [[]]
    typed = [*space, *map(key_of, words)]
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
    require(
        count > least,
        f"{name} can end a trial after {least} runs at the earliest, and sweep.repeats has {count}: give "
        f"{least + 1} or more, or choose none.",
    )
    return True
