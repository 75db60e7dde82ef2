"""Group runs by configuration over seeds and folds, and compare the groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lathe.config.override_parsing import key_of
from lathe.errors import UserError, did_you_mean
from lathe.verbs.report.collect import SEEDS, Run, finite
from lathe.verbs.report.factors import ABSENT, Differences, Factor, code, label, value_text, without_noise
from lathe.verbs.report.statistics import Interval, Paired, Summary, compare, summarise
from lathe.verbs.runs.table import many

EVIDENCE = 0.05
BESIDE = 6  # keys that are listed by name
Unit = tuple[Any, ...]  # the key of paired runs: seed, fold, and other keys that are mixed in a group


@dataclass
class Group:
    """Runs with the same `factors`; `brief` has them with short class names.

    `units` are the complete runs that count: the newest of those with equal seed, fold and configuration. `mixed` are
    the keys that distinguish its configurations, third and later in a unit; `beside` are its values of confounders.
    """

    factors: dict[str, Any]
    brief: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    units: dict[Unit, Run] = field(default_factory=dict)
    marks: list[str] = field(default_factory=list)
    mixed: tuple[str, ...] = ()
    beside: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The values as overrides spell them."""
        return {key: value_text(value) for key, value in self.brief.items()}

    @cached_property
    def label(self) -> str:
        return label(self.texts)

    def values(self, metric: str) -> dict[Unit, float]:
        """Return the metric of each unit that has it."""
        return {unit: run.metrics[metric] for unit, run in self.units.items() if metric in run.metrics}

    def summary(self, metric: str, how: Interval) -> Summary:
        return summarise(list(self.values(metric).values()), how)

    def best(self, metric: str, direction: str) -> float | None:
        values = self.values(metric).values()
        return (max if direction == "max" else min)(values) if values else None

    def mean_of(self, name: str) -> float | None:
        """Return the mean of a number such as seconds over the units that have it."""
        values = list(self.values(name).values())
        return sum(values) / len(values) if values else None

    @property
    def steps(self) -> float | None:
        """The mean number of optimizer steps of its units."""
        counts = [steps for run in self.units.values() if (steps := finite(run.result.get("steps"))) is not None]
        return sum(counts) / len(counts) if counts else None

    @property
    def commands(self) -> list[str]:
        """The commands that repeat it, one for each configuration."""
        units = self.units or {(at,): run for at, run in enumerate(self.runs[:1])}
        configurations: dict[Unit, list[Run]] = {}
        for unit, run in units.items():
            configurations.setdefault(unit[len(SEEDS) :], []).append(run)
        return [_command(runs) for runs in configurations.values()]

    @property
    def command(self) -> str:
        """The commands as one shell line."""
        return " && ".join(self.commands)


def _command(runs: Sequence[Run]) -> str:
    seeds = {code(run.seed): run.seed for run in runs}.values()
    folds = {code(run.fold): run.fold for run in runs}.values()
    return runs[0].command(sorted(seeds, key=_rank), sorted(folds, key=_rank))


@dataclass(frozen=True)
class Pair:
    """Group `a` compared with the baseline `b`; `says` is the conclusion."""

    a: int
    b: int
    told: Paired
    says: str


def make_groups(runs: Sequence[Run], differences: Differences, by: Sequence[str] | None) -> list[Group]:
    """Return the groups of the runs, sorted by their values.

    `runs` without a configuration, a sweep's failed jobs, join the group that their overrides name.
    """
    factors = differences.factors() if by is None else differences.chosen(by)
    others = [] if by is None else differences.others(factors)
    beside = [] if by is None else differences.beside(factors)
    groups: dict[tuple[str, ...], Group] = {}
    for at, run in enumerate(differences.runs):
        values = {factor.key: factor.values[at] for factor in factors}
        key = tuple(map(code, values.values()))
        if key not in groups:
            brief = {factor.key: factor.brief(factor.values[at]) for factor in factors}
            own = {factor.key: factor.brief(factor.values[at]) for factor in beside}
            groups[key] = Group(values, brief, mixed=tuple(factor.key for factor in others), beside=own)
        group = groups[key]
        group.runs.append(run)
        _count(group, run, tuple(factor.codes[at] for factor in others))
    ordered = sorted(groups.values(), key=lambda group: tuple(map(_rank, group.factors.values())))
    for group in ordered:
        group.marks += [*_mixed(group, others, differences.runs), *_dependent(group)]
    for run in runs:
        if not run.leaves:
            _join(ordered, run)
    for group in ordered:
        group.marks += _left_out(group)
    return ordered


def group_of(groups: Sequence[Group], run: Run) -> int | None:
    """Return the index of a run's group; None for a job that belongs to none."""
    return next((at for at, group in enumerate(groups) if any(run is other for other in group.runs)), None)


def _count(group: Group, run: Run, others: tuple[str, ...]) -> None:
    if run.state != "complete":
        return
    unit = (code(run.seed), code(run.fold), *others)
    before = group.units.pop(unit, None)
    if before is not None:
        group.marks.append(f"{before.name}: {run.name} is newer and of the same seed, and counts alone")
    group.units[unit] = run


def _rank(value: Any) -> tuple[int, float, str]:
    """Return a sort key of a factor's value: absent, numbers, text."""
    number = finite(value)
    if number is not None:
        return 1, float(number), ""
    return 0 if value == ABSENT else 2, 0.0, str(value)


def _mixed(group: Group, others: Sequence[Factor], runs: Sequence[Run]) -> list[str]:
    own = {id(run) for run in group.runs}
    found = []
    for factor in others:
        values = {code(v): v for run, v in zip(runs, factor.values, strict=True) if id(run) in own}
        if len(values) > 1:
            words = ", ".join(value_text(factor.brief(value)) for value in list(values.values())[:5])
            found.append(f"mixes {factor.key} ({words})")
    return found


def _dependent(group: Group) -> list[str]:
    """Return a caveat on the intervals of a group with several configurations."""
    count, configurations = len(group.units), len({unit[len(SEEDS) :] for unit in group.units})
    if configurations < 2:
        return []
    shared = ", and take runs of one configuration or seed for independent" if configurations < count else ""
    return [
        f"its {count} runs are of {configurations} configurations: intervals and p are not over seeds alone{shared}"
    ]


def _join(groups: Sequence[Group], run: Run) -> None:
    typed = {key_of(word): without_noise(word.partition("=")[2]) for word in run.words}
    for group in groups:
        if group.factors and all(typed.get(key) in _spellings(group, key) for key in group.factors):
            group.runs.append(run)


def _spellings(group: Group, key: str) -> tuple[str, str]:
    return group.texts[key], value_text(group.factors[key])


def _left_out(group: Group) -> list[str]:
    states = [run.state for run in group.runs if run.state != "complete"]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    return [f"{count} {state}, not in the mean" for state, count in counts.items()]


def find_baseline(groups: Sequence[Group], asked: Any) -> int:
    """Return the index of the group that `baseline` names by its label or by overrides that only it has.

    By default the group with a complete run and the most values that are most common among the runs (of equally common
    values, the one with the fewest commas: `default` rather than `[default,ema]`).
    """
    if asked is None:
        common = {key: _usual(groups, key) for key in groups[0].factors}
        like = [sum(common[key] == code(value) for key, value in group.factors.items()) for group in groups]
        ranks = [(bool(group.units), count) for group, count in zip(groups, like, strict=True)]
        return ranks.index(max(ranks))
    text = value_text(asked) if not isinstance(asked, str) else asked
    labels = [group.label for group in groups]
    if text in labels:
        return labels.index(text)
    words = [word.strip() for word in text.split(",")]
    fitting = [at for at, group in enumerate(groups) if all(_holds(group, word) for word in words)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        named = "; ".join(labels[at] for at in fitting[:4])
        raise UserError(f"baseline={text} is what {len(fitting)} groups have ({named}): name one of them by its label.")
    hint = did_you_mean(text, labels, f"the first of {len(labels)} is {labels[0]}.")
    raise UserError(f"baseline={text}: no group is called so or has it; {hint}")


def _usual(groups: Sequence[Group], key: str) -> str:
    counts: dict[str, int] = {}
    for group in groups:
        counts[code(group.factors[key])] = counts.get(code(group.factors[key]), 0) + len(group.units)
    return max(counts, key=lambda value: (counts[value], -value.count(",")))


def _holds(group: Group, word: str) -> bool:
    key, equals, value = word.rpartition("=")
    return any(
        value in _spellings(group, name) and (not equals or key == name or name.endswith(f".{key}"))
        for name in group.factors
    )


def make_pairs(groups: Sequence[Group], baseline: int, metric: str, direction: str, how: Interval) -> list[Pair]:
    """Compare every other group with the baseline, over the units that both have."""
    theirs = groups[baseline].values(metric)
    pairs = []
    for at, group in enumerate(groups):
        if at != baseline:
            mine = group.values(metric)
            shared = [unit for unit in mine if unit in theirs]
            told = compare([mine[unit] for unit in shared], [theirs[unit] for unit in shared], how)
            if mine and theirs:
                says = [_says(told, direction) if shared else _unpaired(group, list(mine), list(theirs))]
                says += [*_alike(group, len(shared), len(mine), len(theirs)), *_beside(group, groups[baseline])]
            else:
                says = ["no complete run on one side: nothing to compare"]
            pairs.append(Pair(at, baseline, told, "; ".join(says)))
    return pairs


def _unpaired(group: Group, mine: Sequence[Unit], theirs: Sequence[Unit]) -> str:
    """Return the reason why two groups have no units in common."""
    seeds = len(SEEDS)
    if not {unit[:seeds] for unit in mine} & {unit[:seeds] for unit in theirs}:
        return "no seed and fold in common: nothing to pair; run both with the same seeds"
    ways = [({unit[at] for unit in mine}, {unit[at] for unit in theirs}) for at in range(seeds, len(mine[0]))]
    keys = [key for key, (a, b) in zip(group.mixed, ways, strict=True) if not a & b] or list(group.mixed)
    return (
        f"the same seeds, but {' and '.join(keys)} mixed in the groups and never alike on both sides: nothing to pair; "
        f"group by it as well, by=[{','.join([*group.factors, *keys])}]"
    )


def _alike(group: Group, pairs: int, mine: int, theirs: int) -> list[str]:
    """Describe the paired runs, if the difference need not be that of the two means."""
    if not pairs or (not group.mixed and pairs == mine == theirs):
        return []
    keys = ", ".join(["seed and fold", *group.mixed])
    return [
        f"pairs are alike in {keys}: {pairs} of {many(mine, 'run')} here and {pairs} of {theirs} of the baseline are "
        "in the difference"
    ]


def _beside(group: Group, baseline: Group) -> list[str]:
    """Return a caveat that names the confounders."""
    pairs = [(key, value, baseline.beside[key]) for key, value in group.beside.items()]
    said = [f"{key} ({value_text(a)} against {value_text(b)})" for key, a, b in pairs if code(a) != code(b)]
    more = [f"{len(said) - BESIDE} more keys"] if len(said) > BESIDE else []
    return [f"differs as well, and may be the reason: {', '.join([*said[:BESIDE], *more])}"] if said else []


def _says(told: Paired, direction: str) -> str:
    if told.difference is None:
        return "nothing to compare"
    if told.n == 1:
        return "n = 1: no interval"
    if told.p is None:
        same = "the same on each" if told.difference else "none on any"
        return f"{told.n} pairs: the difference is {same}, so there is no p"
    few = f"{told.n} pairs: the interval is wide; " if told.n < 5 else ""
    if told.p >= EVIDENCE:
        return f"{few}p = {told.p:.2g}: no evidence of a difference"
    better = (told.difference > 0) == (direction == "max")
    return f"{few}p = {told.p:.2g}: {'better' if better else 'worse'} than the baseline"
