"""The command `python scripts/runs.py`: list runs, or compare, tag, archive or delete them. Imports no torch."""

import fnmatch
import json
import math
import operator
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from lathe import files
from lathe.config.metric_names import best_of, is_curve, loss_keys
from lathe.config.override_parsing import key_of, short_names
from lathe.config.resolve import flatten
from lathe.config.values import shown
from lathe.errors import UserError, collect_errors, did_you_mean, refuse, require
from lathe.runs.run_discovery import STATES, read_jobs, seconds_since_write, subfolders
from lathe.runs.rundir import open_run, point_latest
from lathe.verbs.runs.reader import (
    Run,
    age_text,
    check_output,
    differences,
    differing_environments,
    find_runs,
    is_number,
    many,
    printable,
    read_curves,
    size_text,
    spread,
    table_lines,
)

ONE_OF = ("compare", "archive", "delete")
SELECT = ("the list", "tag", "archive", "delete")
# options: the default in configs/runs.yaml, and the actions that use it
OPTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "runs": (None, SELECT),
    "where": ([], SELECT),
    "since": (None, SELECT),
    "sort": ("date", ("the list",)),
    "limit": (50, ("the list",)),
    "columns": (None, ("the list", "compare")),
    "output": (None, ("the list", "compare")),
    "points": (8, ("compare",)),
    "yes": (False, ("delete",)),
}
# keys that have a column, or don't change results
NOT_SHOWN = ("name", "paths", "launch", "logger", "hydra", "resume", "seed", "tags")
NUMBERS = ("seed", "steps", "size")  # right-aligned columns
NOT_COMPARED = ("paths", "launch", "hydra", "resume", "trusted")
LOSSES = tuple(f"{split}{mark}loss" for split in ("train", "val", "test") for mark in "/_")
CONDITION = re.compile(r"[+~]*([^=!<>]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([mhdw])")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
NAMED = 10  # runs that are listed before they are removed
LISTED = tuple(state for state in STATES if state != "gone")  # a `gone` run has no row


def runs(request: dict[str, Any]) -> None:
    """List runs, or compare, tag, archive or delete them; raise UserError before anything is changed."""
    actions = {"tag": request["tag"] or request["untag"], **{key: request[key] for key in ONE_OF}}
    requested = [name for name, value in actions.items() if value]
    require(len(requested) < 2, f"{' and '.join(requested)} are one thing each: give one of them at a time.")
    action = requested[0] if requested else "the list"
    refuse(
        f"{key}={shown(request[key])} is for {' and '.join(users)}, and {action} does not use it: leave it out."
        for key, (default, users) in OPTIONS.items()
        if request[key] != default and action not in users
    )
    suffixes = (".json",) if action == "compare" else (".csv", ".json")
    collect_errors(
        lambda: conditions(request["where"]),
        lambda: request["since"] is None or begun_since(request["since"]),
        lambda: check_output(request["output"], suffixes),
    )
    if action == "compare":
        comparison = compare(request["compare"], request["columns"], request["points"])
        print(comparison_text(comparison))
        if request["output"] is not None:
            write_rows(request["output"], comparison)
        return
    log_dir = Path(request["paths"]["log_dir"]).resolve()
    all_runs = find_runs(request["runs"], log_dir)
    jobs = Counter(run.state for run in all_runs if run.path is None)
    all_runs = [run for run in all_runs if run.path is not None or run.state not in ("waiting", "gone")]
    if action == "the list":
        collect_errors(
            *(lambda text=text: choose(all_runs, [text], None) for text in request["where"]),
            *(lambda key=key: check_key(all_runs, key, f"columns=[{key}]") for key in request["columns"] or ()),
            lambda: order(all_runs, request["sort"]),
        )
    selected = choose(all_runs, request["where"], request["since"])
    if action == "the list":
        show_list(request, selected)
        if request["runs"] and jobs["gone"]:
            print(f"{many(jobs['gone'], 'job')} of the sweep besides: the run directory was moved or removed.")
        return
    is_limited = any(request[key] for key in ("runs", "where", "since"))
    is_limited |= request["delete"] in ("unfinished", "failed")
    scope = f"every run below {request['paths']['log_dir']}"
    require(is_limited, f"{action} would be for {scope}: add runs=..., where=[...] or since=...")
    if not selected:
        print("No run is chosen by these words: nothing was changed.")
    elif action == "tag":
        tag(selected, log_dir, request["tag"], request["untag"])
    elif action == "archive":
        archive(selected, log_dir, request["archive"])
    else:
        delete(selected, log_dir, request["delete"], request["yes"])


def show_list(request: dict[str, Any], runs: Sequence[Run]) -> None:
    """Print the last `limit` rows with a summary, and write all of them to `output`."""
    runs = order(runs, request["sort"])
    last = runs if request["limit"] is None else runs[-request["limit"] :]
    if last:
        print(table(last, request["columns"]))
        shared = [
            word for word in last[0].overrides if _is_setting(word) and all(word in run.overrides for run in last)
        ]
        if shared:
            print(printable(f"Overrides of {'every' if len(last) > 1 else 'this'} run: {' '.join(shared)}"))
        states = Counter(run.state for run in runs)
        counts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
        more = f"; the last {len(last)} shown, limit=null shows all" if len(last) < len(runs) else ""
        jobs = sum(run.path is None for run in runs)
        without = f" {jobs} of them {'is a job' if jobs == 1 else 'are jobs'} without a run directory." if jobs else ""
        print(f"{many(len(runs), 'run')} ({counts}), {size_text(sum(run.size for run in runs))}{more}.{without}")
        if unread := unreadable(runs):
            print(unread)
    else:
        print(f"No run below {request['paths']['log_dir']} is chosen by these words.")
    if request["output"] is not None:
        write_rows(request["output"], rows(runs, request["columns"]))


def rows(runs: Sequence[Run], columns: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the row of each run with unformatted values."""
    result = []
    for run in runs:
        row: dict[str, Any] = {"run": run.where, "name": run.name, "date": run.date, "state": run.state}
        if columns is None:
            row["metric"], row["objective"] = run.objective
        else:
            row |= {key: run.value(key) for key in columns}
        row |= {"steps": run.steps, "seed": run.seed, "tags": run.tags, "size": run.size, "typed": run.overrides}
        result.append(row | {"sentence": run.sentence})
    return result


def table(runs: Sequence[Run], columns: Sequence[str] | None) -> str:
    """Return a line for each run: state, metric (a star marks the best), differing overrides or `columns`."""
    records, differ = rows(runs, columns), dict[str, list[Any]]()
    if columns is None:  # the overrides that differ, the most frequent first
        typed = Counter(key for run in runs for key in dict.fromkeys(map(key_of, filter(_is_setting, run.overrides))))
        values = {key: [run.value(key) for run in runs] for key, _ in typed.most_common()}
        differ = {key: column for key, column in values.items() if any(value != column[0] for value in column)}
    for at, row in enumerate(records):
        row |= {key: values[at] for key, values in differ.items() if key not in row}
    metrics = {row.get("metric") for row in records} - {"", None}
    keys = ["run", "state", *(["metric", "objective"] if columns is None else columns), *differ]
    keys = list(dict.fromkeys([*keys, "steps", "seed", "tags", "size"]))
    titles = {key: short for key, short in zip(keys, short_names(keys), strict=True) if key in differ}
    hidden = {
        "state": all(row["state"] == "complete" for row in records),
        "metric": len(metrics) == 1,
        "tags": not any(row["tags"] for row in records),
    }
    keys = [key for key in keys if not hidden.get(key)]
    cells = [[_cell(row, key) for key in keys] for row in records]
    if len(metrics) == 1:
        titles["objective"] = name = str(*metrics)
        best = best_of([row["objective"] for row in records], name, next(run.result for run in runs if run.result))
        for at, line in enumerate(cells if best is not None else ()):
            line[keys.index("objective")] += " *" if at == best else "  "
    right = [key in NUMBERS or any(is_number(row[key]) for row in records) for key in keys]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = table_lines([titles.get(key, key) for key in keys], cells, right)
    return "\n".join(line if width is None or len(line) <= width else f"{line[: width - 3]}..." for line in lines)


def _is_setting(word: str) -> bool:
    return key_of(word).partition(".")[0] not in NOT_SHOWN


def _cell(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if key == "size":
        return size_text(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)


def write_rows(output: str, rows: Any) -> None:
    if Path(output).suffix == ".json":
        text = json.dumps(rows, indent=2) + "\n"
    else:
        head = list(rows[0]) if rows else ["run"]
        lines = ([" ".join(map(str, x)) if isinstance(x, list) else x for x in row.values()] for row in rows)
        text = files.csv_text(head, lines)
    files.write_atomically(files.followed(Path(output)), text)


# filters and order


@dataclass(frozen=True)
class Condition:
    """A comparison of the value at `key` with `value`, which may be a pattern; `text` is the original."""

    key: str
    sign: str
    value: str
    text: str

    def holds(self, run: Run) -> bool:
        value = run.value(self.key)
        if self.sign in ORDERS:
            return is_number(value) and ORDERS[self.sign](value, float(_read(self.value)))
        items = value if isinstance(value, list) and not self.value.startswith("[") else [value]
        return any(self._is_value(item) for item in items) == (self.sign == "=")

    def _is_value(self, item: Any) -> bool:
        value = _read(self.value)
        if item is None or isinstance(item, (bool, list, dict)) or (is_number(item) and is_number(value)):
            return bool(item == value)
        return fnmatch.fnmatchcase(str(item), self.value)


def conditions(where: Sequence[str]) -> list[Condition]:
    """Parse `where`; raise UserError for an invalid condition."""
    result = []
    for text in where:
        match = CONDITION.fullmatch(text.strip())
        if match is None:
            raise UserError(f"where={text}: write key=value, such as state=complete or 'test/accuracy>=0.9'.")
        key, sign, value = (part.strip() for part in match.groups())
        value = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
        known = sign in ORDERS or key != "state" or any(fnmatch.fnmatch(state, value) for state in LISTED)
        require(known, f"where={text}: there is no such state; {did_you_mean(value, LISTED)}")
        require(sign not in ORDERS or is_number(_read(value)), f"where={text}: {sign} takes a number.")
        result.append(Condition(key, sign, value, text))
    return result


def choose(runs: Sequence[Run], where: Sequence[str], since: str | None) -> list[Run]:
    """Return the runs that fulfil `where` and began `since`; raise UserError for a key that no run has."""
    begin = None if since is None else begun_since(since)
    chosen = [run for run in runs if begin is None or run.started >= begin]
    for condition in conditions(where):
        before, chosen = chosen, [run for run in chosen if condition.holds(run)]
        if not chosen or condition.sign == "!=":
            check_key(before, condition.key, f"where={condition.text}")
    return chosen


def check_key(runs: Sequence[Run], key: str, option: str) -> None:
    """Raise UserError, which begins with `option`, if no run has `key`."""
    if runs and all(run.value(key) is None for run in runs):
        known = set().union(*(run.keys() for run in runs))
        hint = did_you_mean(key, known, "python scripts/runs.py compare=[<run>,<run>] prints what two runs have.")
        require(key in known, f"{option}: none of these {len(runs)} runs has {key}; {hint}")


def order(runs: Sequence[Run], sort: str) -> list[Run]:
    """Sort by the value at a key, largest last (smallest last with `-`); runs without one come first."""
    key = sort.removeprefix("-")
    check_key(runs, key, f"sort={sort}")

    def rank(run: Run) -> tuple[bool, float, str]:
        value = run.value(key)
        return (False, value, "") if is_number(value) else (True, 0.0, str(value))

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
        raise UserError(f"since={since}: expected a date such as 2026-11-20 or an age such as 7d or 12h.") from error


def _read(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value  # 1e-3 is a string in YAML 1.1
    except (yaml.YAMLError, ValueError):
        return text


# tag, archive and delete, each run under its lock, which excludes training processes


def tag(runs: Sequence[Run], log_dir: Path, added: Sequence[str], removed: Sequence[str]) -> None:
    """Add and remove tags in config.yaml (for a resumed run) and in result.json; change none if one can't be."""
    refuse([*_not_changeable(runs, log_dir), *(run.status.unread for run in runs if run.status.unread is not None)])
    changed = 0
    for run in runs:
        with run.directory.locked():
            config, directory = run.directory.plain("config.yaml"), run.directory
            result = directory.result if directory.complete else {}
            present = (config.get("tags") or []) + (result.get("tags") or [])
            tags = [tag for tag in dict.fromkeys((*present, *added)) if tag not in removed]
            if tags == (config.get("tags") or []) and (not result or tags == (result.get("tags") or [])):
                continue
            changed += 1
            directory.save_config({**config, "tags": tags}, signed=directory.signed)
            if result:
                others = {key: value for key, value in result.items() if key != "tags"}
                directory.finish(others | ({"tags": tags} if tags else {}))
    print(f"{changed} of {many(len(runs), 'run')} changed.")


def archive(runs: Sequence[Run], log_dir: Path, folder: str) -> None:
    """Move runs to `<folder>/<name>/<run>`; raise UserError, and move none, if one can't be moved."""
    root = Path(folder).resolve()
    places = [(run, root / run.name / run.path.name) for run in runs if run.path is not None]
    existing = [f"archive={folder}: {target} is there already." for _, target in places if os.path.lexists(target)]
    refuse([*_not_changeable(runs, log_dir), *_needed(runs, log_dir), *existing])
    for run, target in places:
        assert run.path is not None
        with run.directory.locked():
            target.parent.mkdir(parents=True, exist_ok=True)
            files.move(run.path, target)
        with suppress(OSError):
            run.path.parent.rmdir()
        for sweep in subfolders(log_dir / "sweeps"):
            for path, job in read_jobs(sweep):
                if isinstance(job.get("run_dir"), str) and os.path.realpath(job["run_dir"]) == str(run.path):
                    files.write_atomically(path, json.dumps({**job, "run_dir": str(target)}, indent=2) + "\n")
        print(f"{run.where} -> {target}")
    _mend_latest(log_dir)
    print(f"{many(len(runs), 'run')} moved; python scripts/runs.py runs={folder} lists them.")


def delete(runs: Sequence[Run], log_dir: Path, state: str, sure: bool) -> None:
    """Remove the runs in this state, after confirmation; keep unreadable ones, whose state is not certain."""
    runs = [run for run in runs if run.state == state]
    lost = unreadable(runs)
    if lost:
        print(f"{lost} They are not removed: look at them, and remove them by hand.")
    gone = [run for run in runs if run.path is not None and run.status.unread is None]
    if not gone:
        print(f"No run directory is {state}: nothing was removed.")
        return
    refuse([*_not_changeable(gone, log_dir), *_needed(gone, log_dir)])
    for run in gone[:NAMED]:
        age = age_text(seconds_since_write(run.directory.path))
        print(printable(f"{run.where}  {size_text(run.size)}  written {age} ago  {' '.join(run.overrides)}"))
    if len(gone) > NAMED:
        print(f"and {len(gone) - NAMED} more")
    if not sure:
        what = f"{many(len(gone), f'{state} run')}, {size_text(sum(run.size for run in gone))}"
        require(sys.stdin.isatty(), f"delete={state} asks before it removes {what}, without a terminal: add yes=true.")
        require(input(f"Remove {what}? [y/N] ").strip().lower() in ("y", "yes"), "nothing was removed.")
    count = sum(_delete(run, state) for run in gone)
    _mend_latest(log_dir)
    print(f"{count} of {many(len(gone), 'run')} removed.")
    require(count == len(gone), f"delete={state}: {many(len(gone) - count, 'run')} stayed, for the reasons above.")


def _delete(run: Run, state: str) -> bool:
    """Remove a run, unless its state has changed since it was listed."""
    assert run.path is not None
    try:
        with run.directory.locked():
            if run.directory.complete != (state in ("complete", "pruned")):
                print(f"{run.where} is {Run(run.entry).state} by now: it stays.")
                return False
            files.remove(run.path)
    except (UserError, OSError) as error:  # another process or user has it
        print(f"{error} It stays.")
        return False
    with suppress(OSError):
        run.path.parent.rmdir()
    return True


def unreadable(runs: Sequence[Run]) -> str | None:
    """Return a message that names runs which can't be read; None if there are none."""
    errors = [run.status.unread.rstrip(".") for run in runs if run.status.unread is not None]
    more = f"; and {len(errors) - NAMED} more" if len(errors) > NAMED else ""
    message = f"{many(len(errors), 'run')} can't be read: {'; '.join(errors[:NAMED])}{more}."
    return printable(message) if errors else None


def _not_changeable(runs: Sequence[Run], log_dir: Path) -> Iterator[str]:
    """Yield an error for each run that may not be changed."""
    for run in runs:
        if run.path is None:
            yield f"{run.where} is a job without a run directory: add where=[state!={run.state}]."
        elif not run.path.is_relative_to(log_dir):
            yield f"{run.where} is not below paths.log_dir={log_dir}: set paths.log_dir={run.path.parent.parent}."
        elif run.state == "running" or run.busy:
            yield f"{run.where} is running: leave it out (where=[state!=running]), or wait for its end."


def _needed(runs: Sequence[Run], log_dir: Path) -> Iterator[str]:
    """Yield an error for each run that an incomplete run names, for example as a teacher."""
    names = {run.path.name: run for run in runs if run.path is not None}
    for other in find_runs(None, log_dir):
        if other.path is None or other.directory.complete or other.path.name in names:
            continue
        with suppress(OSError):
            text = (other.path / "config.yaml").read_text(errors="replace")
            for name, run in names.items():
                if name in text:
                    yield f"{run.where} is needed by {other.where}, which names it and is not complete: leave it there."


def _mend_latest(log_dir: Path) -> None:
    """Point a dangling logs/latest to the newest run, or remove it."""
    latest = log_dir / "latest"
    if not latest.is_symlink() or latest.exists():
        return
    runs = sorted((run for run in find_runs(None, log_dir) if run.path is not None), key=lambda run: run.started)
    if runs:
        point_latest(log_dir, runs[-1].directory.path)
        print(f"{latest.name} leads to {runs[-1].where} now.")
    else:
        latest.unlink()


# comparison of two runs


def compare(paths: Sequence[str], columns: Sequence[str] | None, points: int) -> dict[str, Any]:
    """Return the differences between two runs.

    `typed` has the overrides of only one of them, `curves` each metric at `points` of their common steps, and `apart`
    the metrics that measure different things, with the reason. `columns` are the metrics to compare; None: all.
    """
    runs = [open_run(path, "compare", look=True) for path in paths]
    require(runs[0].path != runs[1].path, f"compare=[{paths[0]},{paths[1]}]: both are {runs[0].path}; give two runs.")
    configs = (flatten(run.plain("config.yaml")) for run in runs)
    pairs = differences(*configs)
    configuration = {key: pairs[key] for key in sorted(pairs) if key.split(".")[0] not in NOT_COMPARED}
    typed = [run.overrides if (run.path / "overrides.yaml").is_file() else [] for run in runs]
    result_a, result_b = (run.result if run.complete else {} for run in runs)
    metrics = {key: (result_a.get(key), result_b.get(key)) for key in sorted(result_a | result_b)}
    metrics = {key: pair for key, pair in metrics.items() if any(map(is_number, pair))}
    curves = common_points(runs[0].path, runs[1].path, points)
    for key in columns or ():
        known = [*metrics, *curves]
        require(key in known, f"columns=[{key}]: neither run has such a metric; they have {', '.join(known[:30])}.")
    apart: dict[str, str] = {}
    if result_a and result_b and result_a.get("monitor") != result_b.get("monitor"):
        apart["objective"] = f"{result_a.get('monitor')} and {result_b.get('monitor')}"
    if keys := loss_keys(configuration):
        apart |= dict.fromkeys(LOSSES, f"different {', '.join(keys)}")
    return {
        "runs": [str(run.path) for run in runs],
        "typed": [[word for word in overrides if not all(word in other for other in typed)] for overrides in typed],
        "complete": [run.complete for run in runs],
        "configuration": configuration,
        "environment": differing_environments(*(run.environment for run in runs)),
        "metrics": {key: pair for key, pair in metrics.items() if columns is None or key in columns},
        "apart": {key: why for key, why in apart.items() if key in metrics or key in curves},
        "curves": {key: rows for key, rows in curves.items() if columns is None or key in columns},
    }


def common_points(a: Path, b: Path, points: int) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, value, value) of each metric that two runs have logged, at up to `points` of the common steps."""
    read = [read_curves(path / "metrics.csv", lambda names: list(filter(is_curve, names))) for path in (a, b)]
    mine, theirs = ({name: dict(zip(*curve, strict=True)) for name, curve in result.items()} for result in read)
    result = {}
    for name in mine:
        steps = sorted(mine[name].keys() & theirs.get(name, {}).keys())
        if steps:
            chosen = [steps[index] for index in spread(len(steps), points)]
            result[name] = [(step, mine[name][step], theirs[name][step]) for step in chosen]
    return result


def comparison_text(data: dict[str, Any]) -> str:
    lines = []
    for name, path, typed, complete in zip("ab", data["runs"], data["typed"], data["complete"], strict=True):
        lines.append(printable(f"{name}: {path}{'' if complete else ' (not complete)'}  {' '.join(typed)}").rstrip())
    for title in ("configuration", "environment"):
        pairs = [[key, _short(a), _short(b)] for key, (a, b) in data[title].items()]
        lines += ["", *(table_lines([title, "a", "b"], pairs) if pairs else [f"{title}: the same"])]
    apart = data["apart"]
    if data["metrics"]:
        cells = [[key, _short(a), _short(b), apart.get(key, _gap(a, b))] for key, (a, b) in data["metrics"].items()]
        lines += ["", *table_lines(["metric", "a", "b", "b - a"], cells)]
    cells = [
        [name if i == 0 else "", str(step), _short(a), _short(b), "" if name in apart else _gap(a, b)]
        for name, rows in data["curves"].items()
        for i, (step, a, b) in enumerate(rows)
    ]
    shared = table_lines(["curve", "step", "a", "b", "b - a"], cells)
    return "\n".join([*lines, "", *(shared if cells else ["curves: no step at which both have logged"])])


def _short(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _gap(a: Any, b: Any) -> str:
    if not is_number(a) or not is_number(b) or not math.isfinite(b - a):
        return ""
    return "0" if a == b else f"{b - a:+.3g}"
