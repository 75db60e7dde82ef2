"""Find the keys that differ between runs, from their configurations and overrides."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lathe.config.help import default_choices
from lathe.config.override_parsing import key_of, short_names, value_of
from lathe.config.values import shown
from lathe.errors import did_you_mean, require
from lathe.runs.rundir import NOT_THE_EXPERIMENT
from lathe.verbs.runs.formatting import printable
from lathe.verbs.runs.reader import SEEDS, Run, finite

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


def label(texts: Mapping[str, str]) -> str:
    """Return a group's name as overrides."""
    return ", ".join(f"{key}={text}" for key, text in texts.items()) or "all runs"


def below(key: str, names: Iterable[str]) -> bool:
    """Return whether `key` is one of `names`, or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


class Differences:
    """The keys that differ between `runs`, which have a configuration each."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.known = list(dict.fromkeys(key for run in runs for key in run.leaves))
        self._found: dict[str, Factor] = {}
        seeds = [self._factor(key).codes for key in SEEDS]
        unused = {code(ABSENT), code(None)}  # a key of a later version is null if unused
        for key in self.known:
            if not below(key, LEFT_OUT) and key not in SEEDS:
                factor = self._factor(key)
                codes = factor.codes
                if len(set(codes)) > 1 and codes not in seeds and set(codes) != unused:  # data.seed follows seed
                    self._found[key] = factor

    def _factor(self, key: str) -> Factor:
        return Factor(key, tuple(run.leaves.get(key, ABSENT) for run in self.runs))

    @property
    def keys(self) -> list[str]:
        """Every key that differs, in the order of the configurations."""
        return list(self._found)

    @cached_property
    def usual(self) -> dict[str, Any]:
        """The most common value of each key that differs; the first of several."""
        return {key: factor.values[_most_common(factor.codes)] for key, factor in self._found.items()}

    @cached_property
    def factors(self) -> list[Factor]:
        """The overrides that differ, and the fewest other keys that distinguish all configurations, classes first."""
        typed = list(dict.fromkeys(key_of(word) for run in self.runs for word in run.overrides))
        chosen = [*self._choices(typed), *(self._found[key] for key in typed if key in self._found)]
        for factor in sorted(self._found.values(), key=lambda factor: not factor.key.endswith("_target_")):
            if self._splits(chosen, factor):
                chosen.append(factor)
        return chosen

    def chosen(self, by: Sequence[str]) -> list[Factor]:
        """Return the factors that `by` names; raise UserError for a key that is unknown or does not differ."""
        found = self._found | {factor.key: factor for factor in self.factors}
        for key in by:
            listed = f"what differs is {', '.join(factor.key for factor in self.factors[:10]) or 'the seed alone'}."
            if key not in found:
                require(key in self.known, f"by={key}: no run has this key; {did_you_mean(key, found, listed)}")
                found[key] = self._factor(key)
                require(
                    len(set(found[key].codes)) > 1,
                    f"by={key} does not differ: all runs have {shown(found[key].values[0])}; {listed}",
                )
        return [found[key] for key in by]

    def others(self, factors: Sequence[Factor]) -> list[Factor]:
        """Return the other factors that distinguish configurations with equal `factors`."""
        return [factor for factor in self.factors if factor not in factors and self._splits(factors, factor)]

    def confounders(self, factors: Sequence[Factor]) -> list[Factor]:
        """Return possible confounders: keys that differ between the groups of `factors` but within none.

        Omits keys that follow a factor: keys below its choice, and keys with the value of another one.
        """
        told = list(factors)
        for factor in dict.fromkeys([*self.factors, *self._found.values()]):
            typed = factor in self.factors
            of_a_choice = below(factor.key, [other.key.removesuffix("._target_") for other in told])
            follows = of_a_choice and (not typed or ABSENT in factor.values)
            chooses = any(other.key.endswith("_target_") and below(other.key, [factor.key]) for other in factors)
            if factor in told or follows or chooses or self._splits(factors, factor):
                continue
            if typed or not any(factor.codes == other.codes or other.key in RECIPES for other in told):
                told.append(factor)
        return told[len(factors) :]

    def _splits(self, factors: Sequence[Factor], factor: Factor) -> bool:
        """Return whether some runs with equal `factors` differ in `factor`."""
        together = list(zip(*(known.codes for known in factors), strict=True)) or [()] * len(self.runs)
        return len(set(zip(together, factor.codes, strict=True))) > len(set(together))

    def _choices(self, typed: Sequence[str]) -> list[Factor]:
        """Return the group choices (model=mlp) that follow from the configuration and determine its classes."""
        recipes = any(key_of(word) in RECIPES for run in self.runs for word in run.overrides)
        found = []
        for group in typed:
            own = [factor for key, factor in self._found.items() if below(key, [group])]
            is_group = "." not in group and "/" not in group and group not in self.known
            if not is_group or not (own or group in RECIPES):
                continue
            choices = Factor(group, tuple(_choice(run, group, recipes) for run in self.runs))
            classes = [factor for factor in own if factor.key.endswith("_target_")]
            follows = None not in choices.values and not self._splits([*self._found.values()], choices)
            if follows and len(set(choices.values)) > 1 and not any(self._splits([choices], one) for one in classes):
                found.append(choices)
        return found


def _most_common(codes: Sequence[str]) -> int:
    """Return the index of the first of the most common."""
    return codes.index(Counter(codes).most_common(1)[0][0])


def _choice(run: Run, group: str, recipes: bool) -> str | None:
    """Return a run's choice of a group, or the default; None if a recipe may have changed it."""
    typed = [value_of(word) for word in run.overrides if key_of(word) == group]
    if typed:
        return typed[-1].strip("'\"")
    if group in RECIPES:
        return "null"
    return None if recipes else default_choices().get(group)
