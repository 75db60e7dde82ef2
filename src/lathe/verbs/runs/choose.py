"""Filter and sort runs."""

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

import yaml

from lathe.errors import UserError, did_you_mean, require
from lathe.runs.run_status import STATES
from lathe.verbs.runs.listed import Listed

CONDITION = re.compile(r"([^=!<>]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([mhdw])")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
KEY = re.compile(r"[+~]*")
LISTED = tuple(state for state in STATES if state != "gone")  # a `gone` run has no row


@dataclass(frozen=True)
class Condition:
    """A comparison of `key` with `value`; `text` is the original."""

    key: str
    sign: str
    value: str
    text: str

    def holds(self, run: Listed) -> bool:
        """Return whether the run fulfils the condition."""
        found = run.value(self.key)
        if self.sign in ORDERS:
            wanted = _number(self.value)
            return _is_number(found) and ORDERS[self.sign](found, wanted)
        some = found if isinstance(found, list) and not self.value.startswith("[") else [found]
        return any(_same(item, self.value) for item in some) == (self.sign == "=")


def conditions(where: Sequence[str]) -> list[Condition]:
    """Parse `where`; raise UserError for an invalid condition."""
    found = []
    for text in where:
        parts = CONDITION.fullmatch(text.strip())
        if parts is None:
            raise UserError(f"where={text}: write key=value, such as state=complete or 'test/accuracy>=0.9'.")
        key, sign, value = (part.strip() for part in parts.groups())
        value = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
        known = sign not in ("=", "!=") or key != "state" or any(fnmatch.fnmatch(state, value) for state in LISTED)
        require(known, f"where={text}: there is no such state; {did_you_mean(value, LISTED)}")
        require(sign not in ORDERS or _is_number(_read(value)), f"where={text}: {sign} takes a number.")
        found.append(Condition(KEY.sub("", key), sign, value, text))
    return found


def chosen(runs: list[Listed], where: Sequence[str], since: str | None) -> list[Listed]:
    """Return the runs that fulfil `where` and began `since`."""
    if since is not None:
        begin = begun_since(since)
        runs = [run for run in runs if run.started >= begin]
    for condition in conditions(where):
        before, runs = runs, [run for run in runs if condition.holds(run)]
        if not runs or condition.sign == "!=":
            check_key(before, condition.key, f"where={condition.text}")
    return runs


def check_key(runs: Sequence[Listed], key: str, said: str) -> None:
    """Raise UserError, with `said` as its beginning, if no run has a value at `key`."""
    if runs and all(run.value(key) is None for run in runs):
        known = set(chain.from_iterable(run.keys() for run in runs))
        hint = did_you_mean(key, known, "python scripts/runs.py compare=[<run>,<run>] prints what two runs have.")
        none = f"none of these {len(runs)} runs has" if len(runs) > 1 else "the only run there has no"
        require(key in known, f"{said}: {none} {key}; {hint}")


def ordered(runs: list[Listed], sort: str) -> list[Listed]:
    """Sort by the value at a key, largest last (smallest last with `-`); runs without one come first."""
    key = sort.removeprefix("-")
    check_key(runs, key, f"sort={sort}")

    def place(run: Listed) -> tuple[int, float, str]:
        found = run.value(key)
        return (1, found, "") if _is_number(found) else (2, 0.0, str(found))

    runs = sorted(runs, key=lambda run: run.started)
    missing = [run for run in runs if run.value(key) is None]
    there = sorted((run for run in runs if run.value(key) is not None), key=place, reverse=sort.startswith("-"))
    return [*missing, *there]


def _same(found: Any, wanted: str) -> bool:
    if _is_number(found) and _is_number(_read(wanted)):
        return bool(found == _read(wanted))
    if found is None or isinstance(found, (bool, list, dict)):
        return bool(found == _read(wanted))
    return fnmatch.fnmatchcase(str(found), wanted)


def _read(text: str) -> Any:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    try:
        return float(found) if isinstance(found, str) else found  # 1e-3 is a string in YAML 1.1
    except ValueError:
        return found


def _number(text: str) -> float:
    return float(_read(text))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def begun_since(since: str) -> datetime:
    """Parse `since`, a date or an age; raise UserError if it is neither."""
    age = AGE.fullmatch(since.strip())
    try:
        if age is not None:
            return datetime.now(UTC) - timedelta(**{UNITS[age[2]]: float(age[1])})
        return datetime.fromisoformat(since.strip()).astimezone()
    except (ValueError, OverflowError) as error:
        raise UserError(
            f"since={since}: expected a date such as 2026-11-20 or 2026-11-20T18:00, or an age such as 7d, 12h or 30m."
        ) from error
