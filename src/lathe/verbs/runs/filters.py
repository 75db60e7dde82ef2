"""Filter and sort runs by `where`, `since` and `sort` of configs/runs.yaml."""

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml

from lathe.errors import UserError, did_you_mean, require
from lathe.runs.run_status import STATES
from lathe.verbs.runs.reader import Run, is_number

CONDITION = re.compile(r"[+~]*([^=!<>]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([mhdw])")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
LISTED = tuple(state for state in STATES if state != "gone")  # a `gone` run has no row


@dataclass(frozen=True)
class Condition:
    """A comparison of the value at `key` with `value`, which may be a pattern; `text` is the original."""

    key: str
    sign: str
    value: str
    text: str

    def holds(self, run: Run) -> bool:
        """Return whether the run fulfils the condition."""
        found = run.value(self.key)
        if self.sign in ORDERS:
            return is_number(found) and ORDERS[self.sign](found, float(_read(self.value)))
        items = found if isinstance(found, list) and not self.value.startswith("[") else [found]
        return any(_same(item, self.value) for item in items) == (self.sign == "=")


def conditions(where: Sequence[str]) -> list[Condition]:
    """Parse `where`; raise UserError for an invalid condition."""
    found = []
    for text in where:
        parts = CONDITION.fullmatch(text.strip())
        if parts is None:
            raise UserError(f"where={text}: write key=value, such as state=complete or 'test/accuracy>=0.9'.")
        key, sign, value = (part.strip() for part in parts.groups())
        value = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
        known = sign in ORDERS or key != "state" or any(fnmatch.fnmatch(state, value) for state in LISTED)
        require(known, f"where={text}: there is no such state; {did_you_mean(value, LISTED)}")
        require(sign not in ORDERS or is_number(_read(value)), f"where={text}: {sign} takes a number.")
        found.append(Condition(key, sign, value, text))
    return found


def choose(runs: Sequence[Run], where: Sequence[str], since: str | None) -> list[Run]:
    """Return the runs that fulfil `where` and began `since`; raise UserError for a key that no run has."""
    begin = None if since is None else begun_since(since)
    chosen = [run for run in runs if begin is None or run.started >= begin]
    for condition in conditions(where):
        before, chosen = chosen, [run for run in chosen if condition.holds(run)]
        if not chosen or condition.sign == "!=":
            check_key(before, condition.key, f"where={condition.text}")
    return chosen


def check_key(runs: Sequence[Run], key: str, said: str) -> None:
    """Raise UserError, with `said` as its beginning, if no run has `key`."""
    if runs and all(run.value(key) is None for run in runs):
        known = set().union(*(run.keys() for run in runs))
        hint = did_you_mean(key, known, "python scripts/runs.py compare=[<run>,<run>] prints what two runs have.")
        require(key in known, f"{said}: none of these {len(runs)} runs has {key}; {hint}")


def order(runs: Sequence[Run], sort: str) -> list[Run]:
    """Sort by the value at a key, largest last (smallest last with `-`); runs without one come first."""
    key = sort.removeprefix("-")
    check_key(runs, key, f"sort={sort}")

    def rank(run: Run) -> tuple[bool, float, str]:
        found = run.value(key)
        return (False, found, "") if is_number(found) else (True, 0.0, str(found))

    runs = sorted(runs, key=lambda run: run.started)
    missing = [run for run in runs if run.value(key) is None]
    known = [run for run in runs if run.value(key) is not None]
    return [*missing, *sorted(known, key=rank, reverse=sort.startswith("-"))]


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


def _same(found: Any, wanted: str) -> bool:
    value = _read(wanted)
    if found is None or isinstance(found, (bool, list, dict)) or (is_number(found) and is_number(value)):
        return bool(found == value)
    return fnmatch.fnmatchcase(str(found), wanted)


def _read(text: str) -> Any:
    try:
        found = yaml.safe_load(text)
        return float(found) if isinstance(found, str) else found  # 1e-3 is a string in YAML 1.1
    except (yaml.YAMLError, ValueError):
        return text
