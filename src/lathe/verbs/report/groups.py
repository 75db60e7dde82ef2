"""Group runs by the keys in which they differ, over seeds and folds, and compare the groups, by scipy.stats."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from lathe.config.help import default_choices
from lathe.config.metric_names import COSTS, cost_of, without_split
from lathe.config.override_parsing import key_of, short_names, value_of
from lathe.config.values import shown
from lathe.errors import UserError, did_you_mean, require
from lathe.runs.rundir import NOT_THE_EXPERIMENT
from lathe.verbs.runs.reader import SEEDS, Run, finite, printable

ABSENT = "absent"  # the value of a key that a run lacks
# keys that change a run's name, directory or output, but no result
_PRINTS = ("progress_bar", "model_summary", "lr_monitor", "device_stats", "alerts", "samples")
LEFT_OUT = (
    *(*NOT_THE_EXPERIMENT, "name", "logger", "compression.receipt"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", *(f"callbacks.{name}" for name in _PRINTS)),
)
RECIPES = ("experiment", "debug")  # groups that set other keys and don't appear in a resolved configuration
_LONG = re.compile(r"-?\d+\.\d{13,}(e[+-]?\d+)?")
_CLASS = ("_target_", ".path")
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")


@dataclass(frozen=True)
class Factor:
    """A key with its value in each run; compared by the key, since values may be lists without a hash."""

    key: str
    values: tuple[Any, ...] = field(compare=False)

    @cached_property
    def codes(self) -> tuple[str, ...]:
        return tuple(map(code, self.values))

    @cached_property
    def _classes(self) -> dict[str, str]:
        named = [value for value in dict.fromkeys(map(str, self.values)) if self.key.endswith(_CLASS)]
        return dict(zip(named, short_names(named), strict=True))

    def brief(self, value: Any) -> Any:
        """Return a value; a class path is shortened to the last parts that make it unique."""
        named = isinstance(value, str) and _DOTTED.fullmatch(value) is not None
        return self._classes.get(value, value) if named else value


def code(value: Any) -> str:
    """Return the same text for equal values, such as 1 and 1.0."""
    number = finite(value)
    return repr(value if number is None else float(number))


def value_text(value: Any) -> str:
    """Return a value as an override spells it, safe on a terminal."""
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    plain = isinstance(value, str) and (value == ABSENT or "," in value)
    return printable(value if plain else without_noise(shown(value)))


def without_noise(text: str) -> str:
    """Return a number without floating-point noise: 0.3 for 0.1 + 0.2."""
    return f"{float(text):.12g}" if _LONG.fullmatch(text) else text


def titles(keys: Sequence[str]) -> list[str]:
    """Return the keys' short names; `loss` for `task.loss._target_`."""
    parts = [key.removesuffix("._target_") for key in keys]
    return short_names([part if part not in keys else key for part, key in zip(parts, keys, strict=True)])


def below(key: str, names: Iterable[str]) -> bool:
    """Return whether `key` is one of `names`, or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


class Differences:
    """The keys that differ between `runs`, which have a configuration each."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.known = list(dict.fromkeys(key for run in runs for key in run.leaves))
        self._differing: dict[str, Factor] = {}
        seeds = [self._factor(key).codes for key in SEEDS]
        unused = {code(ABSENT), code(None)}  # a key of a later version is null if unused
        for key in self.known:
            if not below(key, LEFT_OUT) and key not in SEEDS:
                factor = self._factor(key)
                codes = factor.codes
                if len(set(codes)) > 1 and codes not in seeds and set(codes) != unused:  # data.seed follows seed
                    self._differing[key] = factor

    def _factor(self, key: str) -> Factor:
        return Factor(key, tuple(run.leaves.get(key, ABSENT) for run in self.runs))

    @property
    def keys(self) -> list[str]:
        """Every key that differs, in the order of the configurations."""
        return list(self._differing)

    @cached_property
    def usual(self) -> dict[str, Any]:
        """The most common value of each key that differs; the first of several."""
        common = {key: Counter(factor.codes).most_common(1)[0][0] for key, factor in self._differing.items()}
        return {key: factor.values[factor.codes.index(common[key])] for key, factor in self._differing.items()}

    @cached_property
    def factors(self) -> list[Factor]:
        """The overrides that differ, and the fewest other keys that distinguish all configurations, classes first."""
        typed = list(dict.fromkeys(key_of(word) for run in self.runs for word in run.overrides))
        chosen = [*self._choices(typed), *(self._differing[key] for key in typed if key in self._differing)]
        for factor in sorted(self._differing.values(), key=lambda factor: not factor.key.endswith("_target_")):
            if self._splits(chosen, factor):
                chosen.append(factor)
        return chosen

    def named(self, by: Sequence[str]) -> list[Factor]:
        """Return the factors that `by` names; raise UserError for a key that is unknown or does not differ."""
        by_name = self._differing | {factor.key: factor for factor in self.factors}
        for key in by:
            listed = f"what differs is {', '.join(factor.key for factor in self.factors[:10]) or 'the seed alone'}."
            if key not in by_name:
                require(key in self.known, f"by={key}: no run has this key; {did_you_mean(key, by_name, listed)}")
                by_name[key] = self._factor(key)
                require(
                    len(set(by_name[key].codes)) > 1,
                    f"by={key} does not differ: all runs have {shown(by_name[key].values[0])}; {listed}",
                )
        return [by_name[key] for key in by]

    def others(self, factors: Sequence[Factor]) -> list[Factor]:
        """Return the other factors that distinguish configurations with equal `factors`."""
        return [factor for factor in self.factors if factor not in factors and self._splits(factors, factor)]

    def confounders(self, factors: Sequence[Factor]) -> list[Factor]:
        """Return keys that differ between the groups of `factors` but within none, without those that follow one."""
        result = list(factors)
        for factor in dict.fromkeys([*self.factors, *self._differing.values()]):
            typed = factor in self.factors
            of_a_choice = below(factor.key, [other.key.removesuffix("._target_") for other in result])
            follows = of_a_choice and (not typed or ABSENT in factor.values)
            chooses = any(other.key.endswith("_target_") and below(other.key, [factor.key]) for other in factors)
            if factor in result or follows or chooses or self._splits(factors, factor):
                continue
            if typed or not any(factor.codes == other.codes or other.key in RECIPES for other in result):
                result.append(factor)
        return result[len(factors) :]

    def _splits(self, factors: Sequence[Factor], factor: Factor) -> bool:
        """Return whether some runs with equal `factors` differ in `factor`."""
        together = list(zip(*(known.codes for known in factors), strict=True)) or [()] * len(self.runs)
        return len(set(zip(together, factor.codes, strict=True))) > len(set(together))

    def _choices(self, typed: Sequence[str]) -> list[Factor]:
        """Return the group choices (model=mlp) that follow from the configuration and determine its classes."""
        recipes = any(key_of(word) in RECIPES for run in self.runs for word in run.overrides)
        result = []
        for group in typed:
            own = [factor for key, factor in self._differing.items() if below(key, [group])]
            is_group = "." not in group and "/" not in group and group not in self.known
            if not is_group or not (own or group in RECIPES):
                continue
            default = "null" if group in RECIPES else None if recipes else default_choices().get(group)
            chosen = [[value_of(word) for word in run.overrides if key_of(word) == group] for run in self.runs]
            # the default without one; None if a recipe may have changed it
            choices = Factor(group, tuple(values[-1].strip("'\"") if values else default for values in chosen))
            classes = [factor for factor in own if factor.key.endswith("_target_")]
            follows = None not in choices.values and not self._splits([*self._differing.values()], choices)
            differs = len(set(choices.values)) > 1
            if follows and differs and not any(self._splits([choices], factor) for factor in classes):
                result.append(choices)
        return result


# statistics

RESAMPLES = 10_000  # of the bootstrap
ROUNDING = 1e-12  # relative: smaller differences are floating-point errors
FEW = 5  # with fewer numbers an interval is reported as wide


@dataclass(frozen=True)
class Interval:
    """Settings of intervals: `kind` is t (normal errors) or bootstrap (percentiles)."""

    kind: str = "t"
    confidence: float = 0.95
    seed: int = 0

    @property
    def percent(self) -> str:
        return f"{100 * self.confidence:g} %"


@dataclass(frozen=True)
class Summary:
    """A summary of n numbers; `std` divides by n - 1, `why` is a caveat on the interval."""

    n: int
    mean: float | None
    std: float | None
    interval: tuple[float, float] | None
    why: str | None


@dataclass(frozen=True)
class Paired:
    """The mean difference over `n` pairs, its interval, and Student's p, also corrected for all comparisons."""

    n: int
    difference: float | None
    interval: tuple[float, float] | None
    p: float | None
    p_holm: float | None = None
    p_bh: float | None = None


@lru_cache(maxsize=100_000)  # every file of a report needs it, and a bootstrap is slow
def summarise(values: tuple[float, ...], how: Interval, share: bool = False) -> Summary:
    """Return the mean of independent numbers, with its interval, which for a `share` ends at 0 and 1."""
    n = len(values)
    if n < 2:
        return Summary(n, values[0] if values else None, None, None, "n = 1: no interval" if n else "no complete run")
    mean, std = statistics.fmean(values), statistics.stdev(values)
    if std <= ROUNDING * max(map(abs, values)):
        return Summary(n, mean, 0.0, None, f"all {n} values are equal: no interval")
    import numpy as np
    from scipy import stats

    if how.kind == "t":
        limits = stats.ttest_1samp(values, 0.0).confidence_interval(how.confidence)
    else:
        options: dict[str, Any] = {"n_resamples": RESAMPLES, "method": "percentile", "rng": how.seed}
        test = stats.bootstrap((np.asarray(values),), np.mean, confidence_level=how.confidence, **options)
        limits = test.confidence_interval
    low, high = float(limits.low), float(limits.high)
    if share and min(values) >= 0 and max(values) <= 1:
        low, high = max(low, 0.0), min(high, 1.0)
    wide = "wide" if how.kind == "t" else "narrower than it should be"
    return Summary(n, mean, std, (low, high), f"n = {n}: the interval is {wide}" if n < FEW else None)


def compare(a: Sequence[float], b: Sequence[float], how: Interval) -> Paired:
    """Return the paired difference `a` - `b`."""
    from scipy import stats

    summary = summarise(tuple(x - y for x, y in zip(a, b, strict=True)), how)
    p = None if summary.interval is None else float(stats.ttest_rel(a, b).pvalue)
    return Paired(summary.n, summary.mean, summary.interval, p)


def corrected(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return each p corrected for the number of comparisons: by Holm (1979), and by Benjamini and Hochberg (1995)."""
    from scipy import stats

    n, highest = len(values), 0.0
    holm = [0.0] * n
    for rank, index in enumerate(sorted(range(n), key=lambda index: values[index])):
        holm[index] = highest = max(highest, min(1.0, (n - rank) * values[index]))
    return list(zip(holm, map(float, stats.false_discovery_control(values)), strict=True)) if n else []


# groups

EVIDENCE = 0.05
MOST_KEYS = 6  # keys that are listed by name
SHARES = re.compile(r"(\w+_)?(acc|accuracy|precision|recall|specificity|f1|auroc|iou|jaccard|dice|top_?\d+)(_\w+)?")
Unit = tuple[Any, ...]  # the key of paired runs: seed, fold, and other keys that are mixed in a group


@dataclass
class Group:
    """Runs with the same `factors`; `brief` has them with short class names.

    `units` are the complete runs that count: the newest of those with equal seed, fold and configuration. `mixed` are
    the keys that distinguish its configurations, third and later in a unit; `confounders` are other values that may
    explain a difference.
    """

    factors: dict[str, Any]
    brief: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    units: dict[Unit, Run] = field(default_factory=dict)
    marks: list[str] = field(default_factory=list)
    mixed: tuple[str, ...] = ()
    confounders: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def texts(self) -> dict[str, str]:
        return {key: value_text(value) for key, value in self.brief.items()}

    @cached_property
    def label(self) -> str:
        """Its factors as overrides."""
        return ", ".join(f"{key}={text}" for key, text in self.texts.items()) or "all runs"

    def spellings(self, key: str) -> tuple[str, str]:
        """Return a value with the short and with the whole name of a class."""
        return self.texts[key], value_text(self.factors[key])

    def values(self, metric: str) -> dict[Unit, float]:
        """Return the metric of each unit that has it."""
        return {unit: run.metrics[metric] for unit, run in self.units.items() if metric in run.metrics}

    def summary(self, metric: str, how: Interval) -> Summary:
        share = SHARES.fullmatch(without_split(metric)) is not None
        return summarise(tuple(self.values(metric).values()), how, share)

    def best(self, metric: str, direction: str) -> float | None:
        values = self.values(metric).values()
        return (max if direction == "max" else min)(values) if values else None

    def mean_of(self, name: str) -> float | None:
        """Return the mean of a number such as seconds over the units that have it."""
        return _mean([run.metrics.get(name) for run in self.units.values()])

    @property
    def steps(self) -> float | None:
        return _mean([finite(run.result.get("steps")) for run in self.units.values()])

    @cached_property
    def cost(self) -> dict[str, float | None]:
        costs = [cost_of(run.receipt) for run in self.units.values()]
        return {name: _mean([cost[name] for cost in costs]) for name in COSTS}

    @property
    def commands(self) -> list[str]:
        """The commands that repeat it, one for each configuration."""
        configurations: dict[Unit, list[Run]] = {}
        for unit, run in self.units.items():
            configurations.setdefault(unit[len(SEEDS) :], []).append(run)
        commands = []
        for runs in configurations.values() or [self.runs[:1]]:
            seeds = {code(run.seed): run.seed for run in runs}.values()
            folds = {code(run.fold): run.fold for run in runs}.values()
            commands.append(runs[0].command(sorted(seeds, key=_rank), sorted(folds, key=_rank)))
        return list(filter(None, commands))  # other tools have none

    @property
    def command(self) -> str:
        return " && ".join(self.commands)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rank(value: Any) -> tuple[int, float, str]:
    """Return a sort key of a factor's value: absent, numbers, text."""
    number = finite(value)
    if number is not None:
        return 1, float(number), ""
    return 0 if value == ABSENT else 2, 0.0, str(value)


def make_groups(runs: Sequence[Run], differences: Differences, by: Sequence[str] | None) -> list[Group]:
    """Return the groups, sorted by their values; a sweep's failed jobs join the group that their overrides name."""
    factors = differences.factors if by is None else differences.named(by)
    others = [] if by is None else differences.others(factors)
    confounders = [] if by is None else differences.confounders(factors)
    members: dict[tuple[str, ...], list[int]] = {}  # the indices of runs with equal factors
    for index in range(len(differences.runs)):
        members.setdefault(tuple(factor.codes[index] for factor in factors), []).append(index)
    groups = [_make_group(differences.runs, indices, factors, others, confounders) for indices in members.values()]
    groups.sort(key=lambda group: tuple(map(_rank, group.factors.values())))
    for run in (run for run in runs if not run.leaves):
        overrides = {key_of(word): without_noise(value_of(word)) for word in run.overrides}
        for group in groups:
            if group.factors and all(overrides.get(key) in group.spellings(key) for key in group.factors):
                group.runs.append(run)
    for group in groups:
        states = Counter(run.state for run in group.runs if run.state != "complete")
        group.marks += [f"{count} {state}, not in the mean" for state, count in states.items()]
    return groups


def _make_group(
    runs: Sequence[Run],
    indices: Sequence[int],
    factors: Sequence[Factor],
    others: Sequence[Factor],
    confounders: Sequence[Factor],
) -> Group:
    """Return the group of the runs at `indices`, which have equal `factors`."""
    first = indices[0]
    group = Group(
        {factor.key: factor.values[first] for factor in factors},
        {factor.key: factor.brief(factor.values[first]) for factor in factors},
        [runs[index] for index in indices],
        mixed=tuple(factor.key for factor in others),
        confounders={factor.key: factor.brief(factor.values[first]) for factor in confounders},
    )
    for index, run in zip(indices, group.runs, strict=True):
        if run.state == "complete":
            unit = (code(run.seed), code(run.fold), *(factor.codes[index] for factor in others))
            older = group.units.pop(unit, None)
            if older is not None:
                group.marks.append(f"{older.label}: {run.label} is newer and of the same seed, and counts alone")
            group.units[unit] = run
    for factor in others:
        values = {factor.codes[index]: factor.brief(factor.values[index]) for index in indices}
        if len(values) > 1:
            group.marks.append(f"mixes {factor.key} ({', '.join(map(value_text, list(values.values())[:5]))})")
    count, configurations = len(group.units), len({unit[len(SEEDS) :] for unit in group.units})
    if configurations > 1:
        shared = ", and take runs of one configuration or seed for independent" if configurations < count else ""
        runs_of = f"its {count} runs are of {configurations} configurations"
        group.marks.append(f"{runs_of}: intervals and p are not over seeds alone{shared}")
    return group


def find_baseline(groups: Sequence[Group], baseline: Any) -> int:
    """Return the index of the group that `baseline` names by its label or by overrides that only it has.

    By default the group with a complete run and the most values that are most common among the runs (of equally common
    values, the one with the fewest commas: `default` rather than `[default,ema]`).
    """
    if baseline is None:
        common = {}
        for key in groups[0].factors:
            tally = Counter[str]()
            for group in groups:
                tally[code(group.factors[key])] += len(group.units)
            common[key] = max(tally, key=lambda value: (tally[value], -value.count(",")))
        ranks = [
            (bool(group.units), sum(common[key] == code(value) for key, value in group.factors.items()))
            for group in groups
        ]
        return ranks.index(max(ranks))
    text = baseline if isinstance(baseline, str) else value_text(baseline)
    labels = [group.label for group in groups]
    if text in labels:
        return labels.index(text)

    def has_override(group: Group, override: str) -> bool:
        key, equals, value = override.rpartition("=")
        keys = [name for name in group.factors if not equals or key == name or name.endswith(f".{key}")]
        return any(value in group.spellings(name) for name in keys)

    fitting = [
        index
        for index, group in enumerate(groups)
        if all(has_override(group, override.strip()) for override in text.split(","))
    ]
    if len(fitting) != 1:
        several = f"{len(fitting)} groups have it: {'; '.join(labels[index] for index in fitting[:4])}."
        hint = several if fitting else did_you_mean(text, labels, f"such as {labels[0]}.")
        raise UserError(f"baseline={text}: it must name one group; {hint}")
    return fitting[0]


@dataclass(frozen=True)
class Pair:
    """Group `a` compared with the baseline `b`; `says` is the conclusion."""

    a: int
    b: int
    test: Paired
    says: str


def make_pairs(groups: Sequence[Group], baseline: int, metric: str, direction: str, how: Interval) -> list[Pair]:
    """Compare every other group with the baseline, over the units that both have."""
    pairs, theirs = [], groups[baseline].values(metric)
    for index, group in enumerate(groups):
        if index == baseline:
            continue
        mine = group.values(metric)
        shared = [unit for unit in mine if unit in theirs]
        test = compare([mine[unit] for unit in shared], [theirs[unit] for unit in shared], how)
        if mine and theirs:
            says = [_conclusion(test, direction) if shared else _unpaired(group, list(mine), list(theirs))]
            if shared and (group.mixed or not len(shared) == len(mine) == len(theirs)):
                keys = ", ".join(["seed and fold", *group.mixed])
                counts = f"{len(shared)} of {len(mine)} runs here and of {len(theirs)} of the baseline"
                says.append(f"pairs are equal in {keys}: {counts} are in the difference")
            others = groups[baseline].confounders
            unlike = [
                f"{key} ({value_text(value)} against {value_text(others[key])})"
                for key, value in group.confounders.items()
                if code(value) != code(others[key])
            ]
            more = [f"{len(unlike) - MOST_KEYS} more keys"] if len(unlike) > MOST_KEYS else []
            if unlike:
                says.append(f"differs as well, and may be the reason: {', '.join([*unlike[:MOST_KEYS], *more])}")
        else:
            says = ["no complete run on one side: nothing to compare"]
        pairs.append(Pair(index, baseline, test, "; ".join(says)))
    tested = [index for index, pair in enumerate(pairs) if pair.test.p is not None]
    for index, (holm, bh) in zip(tested, corrected([pairs[index].test.p or 0.0 for index in tested]), strict=True):
        pairs[index] = replace(pairs[index], test=replace(pairs[index].test, p_holm=holm, p_bh=bh))
    return pairs


def _conclusion(test: Paired, direction: str) -> str:
    if test.n == 1 or test.difference is None:
        return "n = 1: no interval"
    if test.p is None:
        return f"{test.n} pairs: the difference is {test.difference:.4g} in each, so p is undefined"
    few = f"{test.n} pairs: the interval is wide; " if test.n < FEW else ""
    if test.p >= EVIDENCE:
        return f"{few}p = {test.p:.2g}: no evidence of a difference"
    better = (test.difference > 0) == (direction == "max")
    return f"{few}p = {test.p:.2g}: {'better' if better else 'worse'} than the baseline"


def _unpaired(group: Group, mine: Sequence[Unit], theirs: Sequence[Unit]) -> str:
    """Return the reason why two groups have no units in common."""
    if not {unit[: len(SEEDS)] for unit in mine} & {unit[: len(SEEDS)] for unit in theirs}:
        return "no seed and fold in common: nothing to pair; run both with the same seeds"
    keys = ",".join([*group.factors, *group.mixed])
    return f"nothing to pair: {' and '.join(group.mixed)} never equal on both sides; group by it too, by=[{keys}]"
