"""The space of a search: checks it, draws values, and writes them as overrides."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lathe.config.override_parsing import key_of
from lathe.config.quoting import as_typed
from lathe.config.values import shown
from lathe.errors import did_you_mean, require
from lathe.runs.rundir import NOT_THE_EXPERIMENT

FORM = "expected a list of values, or {low: ..., high: ...}"
ENTRY = ("low", "high", "log", "step", "values", "when")


def word(key: str, value: Any, entry: Mapping[str, Any] | None = None) -> str:
    """Return the override `key=value`; in a study, the value of a list `entry` is its spelling."""
    if entry is not None and isinstance(value, str):
        value = entry.get("lists", {}).get(value, value)
    bare = isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value, re.ASCII) and shown(value) == value
    return f"{key}={value if bare else as_typed(value)}"


def brief(words: Sequence[str]) -> str:
    """Return overrides for a table, with four significant digits of numbers that are not whole."""
    return " ".join(f"{key}={_digits(value)}" for key, _, value in (item.partition("=") for item in words))


def _digits(value: str) -> str:
    try:
        return value if value.lstrip("-").isdigit() else f"{float(value):.4g}"
    except ValueError:
        return value


def entry_of(key: str, entry: Any) -> dict[str, Any]:
    """Return one key's entry in `sweep.space`, checked and normalised."""
    name = f"sweep.space.{key}"
    part = key_of(f"{key}=").split(".")[0]
    require(part not in NOT_THE_EXPERIMENT, f"{name}: {part} is no part of an experiment, so nothing is to be found.")
    if isinstance(entry, list):
        return _listed(name, entry)
    require(isinstance(entry, Mapping), f"{name}={shown(entry)}: {FORM}.")
    found = {str(part): value for part, value in entry.items()}
    strange = next((part for part in found if part not in ENTRY), None)
    require(strange is None, f"{name}.{strange}: there is no such word; {did_you_mean(strange, ENTRY)}")
    when = found.get("when", {})
    require(isinstance(when, Mapping), f"{name}.when={shown(when)}: expected {{key: value}}.")
    if when:
        found["when"] = {key: plain(value) for key, value in when.items()}
    if "values" in found:
        require(set(found) <= {"values", "when"}, f"{name}: values stand alone: leave low and high out.")
        return {**found, **_listed(f"{name}.values", found["values"])}
    _check_range(name, found, entry)
    return found


def _listed(name: str, listed: Any) -> dict[str, Any]:
    """Return `values` as Optuna stores them, and under `lists` the lists and mappings by that spelling."""
    require(isinstance(listed, list) and bool(listed), f"{name}={shown(listed)}: expected a list of values.")
    values = [plain(value) for value in listed]
    for place, value in enumerate(values):
        require(not isinstance(value, float) or math.isfinite(value), f"{name}={shown(listed)}: {value} is no number.")
        twice = any(value == other and type(value) is type(other) for other in values[:place])
        require(not twice, f"{name}={shown(listed)}: {shown(value)} is there twice, and would be run twice.")
    lists = {plain(value): value for value in listed if isinstance(value, (list, Mapping))}
    return {"values": values, "lists": lists}


def _check_range(name: str, found: Mapping[str, Any], entry: Any) -> None:
    low, high = found.get("low"), found.get("high")
    require(_is_number(low) and _is_number(high), f"{name}={shown(entry)}: {FORM}.")
    assert isinstance(low, (int, float))
    assert isinstance(high, (int, float))
    require(math.isfinite(high - low), f"{name}={shown(entry)}: a range has two ends, which are finite numbers.")
    log = found.get("log", False)
    require(isinstance(log, bool), f"{name}.log={shown(log)}: expected true or false.")
    require(low < high, f"{name}: low={low} is not below high={high}: turn them round, or give a list of one.")
    require(not log or low > 0, f"{name}: low={low} has no logarithm: choose one above 0, or log=false.")
    step = found.get("step")
    require(not log or step is None, f"{name}: log and step do not go together: leave one out.")
    if step is None:
        return
    good = _is_number(step) and 0 < step <= high - low
    require(good, f"{name}.step={shown(step)}: expected a number above 0 that fits between {low} and {high}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_conditions(space: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UserError if a key depends on a value that no key before it can have."""
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


def plain(value: Any) -> Any:
    """Return a value that Optuna can store: for a list or a mapping, its spelling on the command line."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else as_typed(value)


def _whole(entry: Mapping[str, Any]) -> bool:
    return all(isinstance(entry.get(key, 0) or 0, int) for key in ("low", "high", "step"))


def suggested(trial: Any, key: str, entry: Mapping[str, Any]) -> Any:
    """Return Optuna's draw for `key`."""
    if "values" in entry:
        return trial.suggest_categorical(key, entry["values"])
    low, high, step, log = entry["low"], entry["high"], entry.get("step"), bool(entry.get("log"))
    if _whole(entry):
        return trial.suggest_int(key, low, high, step=step or 1, log=log)
    drawn = float(trial.suggest_float(key, low, high, step=step, log=log))
    return drawn if step is None else _exact(drawn)


def all_values(key: str, entry: Mapping[str, Any]) -> list[Any]:
    """Return every value of `key`; raise UserError if there are infinitely many."""
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
    return [_exact(low + index * step) for index in range(count)]


def _exact(value: float) -> float:
    """Remove the rounding error of added steps: 0.3, not 0.30000000000000004."""
    return value if isinstance(value, int) else float(f"{value:.12g}")
