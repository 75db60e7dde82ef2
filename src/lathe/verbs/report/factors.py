"""Find the keys that differ between runs, from their configurations and overrides."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lathe.config.help import default_choices
from lathe.config.override_parsing import key_of, short_names
from lathe.config.values import shown
from lathe.errors import did_you_mean, require
from lathe.runs.rundir import NOT_THE_EXPERIMENT
from lathe.verbs.report.collect import SEEDS, Run, finite, harmless

ABSENT = "absent"  # the value of a key that a run lacks
# keys that change a run's name, directory or output, but no result
_PRINTS = ("progress_bar", "model_summary", "lr_monitor", "device_stats", "alerts", "samples")
LEFT_OUT = (
    *NOT_THE_EXPERIMENT,
    "name",
    "logger",
    "compression.receipt",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    *(f"callbacks.{name}" for name in _PRINTS),
)
_LONG = re.compile(r"-?\d+\.\d{13,}(e[+-]?\d+)?")
# groups that set other keys and don't appear in a resolved configuration
RECIPES = ("experiment", "debug")
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


def below(key: str, names: Iterable[str]) -> bool:
    """Return whether `key` is one of `names`, or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def value_text(value: Any) -> str:
    """Return a value as an override spells it, safe on a terminal."""
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    plain = isinstance(value, str) and (value == ABSENT or "," in value)
    return harmless(value if plain else without_noise(shown(value)))


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


_UNUSED = {code(ABSENT), code(None)}


class Differences:
    """The keys that differ between `runs`, which have a configuration each."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        keys = dict.fromkeys(key for run in runs for key in run.leaves)
        self.known = list(keys)
        self._found: dict[str, Factor] = {}
        seeds = [Factor(key, self._values(key)).codes for key in SEEDS]
        for key in keys:
            if not below(key, LEFT_OUT) and key not in SEEDS:
                factor = Factor(key, self._values(key))
                codes = factor.codes
                # data.seed follows seed; a key of a later version is null if unused
                if len(set(codes)) > 1 and codes not in seeds and set(codes) != _UNUSED:
                    self._found[key] = factor

    def _values(self, key: str) -> tuple[Any, ...]:
        return tuple(run.leaves.get(key, ABSENT) for run in self.runs)

    @property
    def keys(self) -> list[str]:
        """Every key that differs, in the order of the configurations."""
        return list(self._found)

    def factors(self) -> list[Factor]:
        """Return the overrides that differ, and the fewest other keys that distinguish all configurations."""
        typed = list(dict.fromkeys(key_of(word) for run in self.runs for word in run.words))
        chosen = [*self._groups(typed), *(self._found[key] for key in typed if key in self._found)]
        return [*chosen, *self._needed(chosen)]

    def chosen(self, by: Sequence[str]) -> list[Factor]:
        """Return the factors that `by` names; raise UserError for a key that is unknown or does not differ."""
        found = {factor.key: factor for factor in self.factors()} | self._found
        factors = []
        for key in by:
            if key not in found:
                hint = did_you_mean(key, found or self.known, self._listed())
                require(key in self.known, f"by={key}: no run has this key; {hint}")
                values, listed = self._values(key), self._listed()
                alike = f"all {len(values)} runs have" if len(values) > 1 else "the only run has"
                one = f"{alike} {key}={shown(values[0])}"
                require(len(set(map(code, values))) > 1, f"by={key} does not differ: {one}; {listed}")
                found[key] = Factor(key, values)
            factors.append(found[key])
        return factors

    def _listed(self) -> str:
        keys = [factor.key for factor in self.factors()]
        return f"what differs is {', '.join(keys[:10])}." if keys else "nothing differs between them but the seed."

    def others(self, factors: Sequence[Factor]) -> list[Factor]:
        """Return the other factors that distinguish configurations with equal `factors`."""
        return [factor for factor in self.factors() if factor not in factors and self._splits(factors, factor)]

    def beside(self, factors: Sequence[Factor]) -> list[Factor]:
        """Return possible confounders: keys that differ between the groups of `factors` but within none.

        Omits keys that follow a factor: keys below its choice, and keys with the value of another one.
        """
        typed, told = self.factors(), list(factors)
        for factor in dict.fromkeys([*typed, *self._found.values()]):
            follows = _of_one_choice(factor, told) and (factor not in typed or ABSENT in factor.values)
            chooses = any(other.key.endswith("_target_") and below(other.key, [factor.key]) for other in factors)
            if factor in told or follows or chooses or self._splits(factors, factor):
                continue
            if factor in typed or not any(factor.codes == other.codes or other.key in RECIPES for other in told):
                told.append(factor)
        return told[len(factors) :]

    def _splits(self, factors: Sequence[Factor], factor: Factor) -> bool:
        together = list(zip(*(known.codes for known in factors), strict=True)) or [()] * len(self.runs)
        return len(set(zip(together, factor.codes, strict=True))) > len(set(together))

    def _needed(self, chosen: Sequence[Factor]) -> list[Factor]:
        """Return the other keys that are needed to distinguish the configurations, classes first."""
        kept: list[Factor] = []
        for factor in sorted(self._found.values(), key=lambda factor: not factor.key.endswith("_target_")):
            if self._splits([*chosen, *kept], factor):
                kept.append(factor)
        return kept

    def _groups(self, typed: Sequence[str]) -> list[Factor]:
        """Return the group choices (model=mlp) that determine which of the configurations a run has."""
        groups = [key for key in typed if "." not in key and "/" not in key and key not in self.known]
        groups = [key for key in groups if key in RECIPES or any(below(known, [key]) for known in self._found)]
        signatures = [tuple(factor.codes[at] for factor in self._found.values()) for at in range(len(self.runs))]
        recipes = any(key_of(word) in RECIPES for run in self.runs for word in run.words)
        found = []
        for group in groups:
            words = tuple(_choice(run, group, recipes) for run in self.runs)
            one_each = len(set(zip(signatures, words, strict=True))) == len(set(signatures))
            if None not in words and len(set(words)) > 1 and one_each and self._settles(group, words):
                found.append(Factor(group, words))
        return found

    def _settles(self, group: str, words: Sequence[Any]) -> bool:
        """Return whether runs with the same choice have the same classes in that group."""
        own = [factor.codes for key, factor in self._found.items() if below(key, [group]) and key.endswith("_target_")]
        classes = list(zip(*own, strict=True)) or [()] * len(words)
        return len(set(zip(words, classes, strict=True))) == len(set(words))

    @cached_property
    def usual(self) -> dict[str, Any]:
        """The most common value of each key that differs; the first of several."""
        return {key: _most_common(factor.values) for key, factor in self._found.items()}


def _of_one_choice(factor: Factor, told: Sequence[Factor]) -> bool:
    """Return whether one of the factors determines the node of this key."""
    return below(factor.key, [other.key.removesuffix("._target_") for other in told])


def _most_common(values: Sequence[Any]) -> Any:
    ((best, _),) = Counter(map(code, values)).most_common(1)
    return next(value for value in values if code(value) == best)


def _choice(run: Run, group: str, recipes: bool) -> str | None:
    """Return a run's choice of a group, or the default; None if a recipe may have changed it."""
    typed = [word.partition("=")[2] for word in run.words if key_of(word) == group]
    if typed:
        return typed[-1].strip("'\"")
    if group in RECIPES:
        return "null"
    return None if recipes else default_choices().get(group)
