"""The command `python scripts/runs.py`: list runs, or compare, tag, archive or delete them. Imports no torch."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lathe import files
from lathe.config.metric_names import best_of
from lathe.config.override_parsing import key_of, short_names
from lathe.config.values import shown
from lathe.errors import collect_errors, refuse, require
from lathe.runs.run_status import STATES
from lathe.verbs.runs import change
from lathe.verbs.runs.compare import compare, comparison_text
from lathe.verbs.runs.filters import begun_since, check_key, choose, conditions, order
from lathe.verbs.runs.formatting import many, printable, size_text, table_lines
from lathe.verbs.runs.reader import Run, find_runs, is_number

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


def runs(request: dict[str, Any]) -> None:
    """List the selected runs, or compare, tag, archive or delete them.

    Raises UserError, before anything is changed, for an invalid request or one that would damage a run.
    """
    given = {"tag": request["tag"] or request["untag"]} | {
        key: request[key] for key in ("compare", "archive", "delete")
    }
    asked = [name for name, value in given.items() if value]
    require(len(asked) < 2, f"{' and '.join(asked)} are one thing each: give one of them at a time.")
    action = asked[0] if asked else "the list"
    refuse(_unused(request, action))
    suffixes = (".json",) if action == "compare" else (".csv", ".json")
    collect_errors(
        lambda: conditions(request["where"]),
        lambda: request["since"] is None or begun_since(request["since"]),
        lambda: check_output(request["output"], suffixes),
    )
    if action == "compare":
        found = compare(request["compare"], request["columns"], request["points"])
        print(comparison_text(found))
        if request["output"] is not None:
            write_rows(request["output"], found)
        return
    log_dir = Path(request["paths"]["log_dir"]).resolve()
    every = find_runs(request["runs"], log_dir)
    gone = sum(run.path is None and run.state == "gone" for run in every) if request["runs"] else 0
    every = [run for run in every if run.path is not None or run.state not in ("waiting", "gone")]
    if action == "the list":
        collect_errors(
            *(lambda word=word: choose(every, [word], None) for word in request["where"]),
            *(lambda key=key: check_key(every, key, f"columns=[{key}]") for key in request["columns"] or ()),
            lambda: order(every, request["sort"]),
        )
        show_list(request, choose(every, request["where"], request["since"]))
        if gone:
            print(f"{many(gone, 'job')} of the sweep besides: the run directory was moved or removed.")
        return
    selected = choose(every, request["where"], request["since"])
    require(
        bool(request["runs"] or request["where"] or request["since"]) or request["delete"] in ("unfinished", "failed"),
        f"{action} would be for every run below {request['paths']['log_dir']}: say for which, by runs=..., "
        "where=[...] or since=...",
    )
    if not selected:
        print("No run is chosen by these words: nothing was changed.")
    elif action == "tag":
        change.tag(selected, log_dir, request["tag"], request["untag"])
    elif action == "archive":
        change.archive(selected, log_dir, request["archive"])
    else:
        change.delete(selected, log_dir, request["delete"], request["yes"])


def _unused(request: dict[str, Any], action: str) -> Iterator[str]:
    """Yield an error for each option that was given and that this action does not use."""
    for key, (default, actions) in OPTIONS.items():
        if request[key] != default and action not in actions:
            used_by = " and ".join(actions)
            yield f"{key}={shown(request[key])} is for {used_by}, and {action} does not use it: leave it out."


def show_list(request: dict[str, Any], found: Sequence[Run]) -> None:
    """Print the last `limit` rows with a summary, and write all of them to `output`."""
    found = order(found, request["sort"])
    last = found if request["limit"] is None else found[-request["limit"] :]
    if last:
        print(table(last, request["columns"]))
        print("\n".join(_summary(found, last)))
    else:
        print(f"No run below {request['paths']['log_dir']} is chosen by these words.")
    if request["output"] is not None:
        write_rows(request["output"], rows(found, request["columns"]))


def rows(runs: Sequence[Run], columns: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the row of each run with unformatted values."""
    found = []
    for run in runs:
        row: dict[str, Any] = {"run": run.where, "name": run.name, "date": run.date, "state": run.state}
        if columns is None:
            row["metric"], row["objective"] = run.objective
        else:
            row |= {key: run.value(key) for key in columns}
        row |= {"steps": run.steps, "seed": run.seed, "tags": run.tags, "size": run.size, "typed": run.overrides}
        found.append(row | {"sentence": run.sentence})
    return found


def table(runs: Sequence[Run], columns: Sequence[str] | None) -> str:
    """Return a line for each run: state, metric, and differing overrides or the requested `columns`.

    A star marks the best value.
    """
    found, differ = rows(runs, columns), _differing(runs) if columns is None else {}
    for at, row in enumerate(found):
        row |= {key: values[at] for key, values in differ.items() if key not in row}
    metrics = {row.get("metric") for row in found} - {"", None}
    keys = ["run", "state", *(["metric", "objective"] if columns is None else columns), *differ]
    keys = list(dict.fromkeys([*keys, "steps", "seed", "tags", "size"]))
    titles = {key: short for key, short in zip(keys, short_names(keys), strict=True) if key in differ}
    hidden = {
        "state": all(row["state"] == "complete" for row in found),
        "metric": len(metrics) == 1,
        "tags": not any(row["tags"] for row in found),
    }
    keys = [key for key in keys if not hidden.get(key)]
    cells = [[_cell(row, key) for key in keys] for row in found]
    if len(metrics) == 1:
        titles["objective"] = name = str(*metrics)
        best = best_of([row["objective"] for row in found], name, next(run.result for run in runs if run.result))
        for at, line in enumerate(cells if best is not None else ()):
            line[keys.index("objective")] += " *" if at == best else "  "
    right = [key in NUMBERS or any(is_number(row[key]) for row in found) for key in keys]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = table_lines([titles.get(key, key) for key in keys], cells, right)
    return "\n".join(line if width is None or len(line) <= width else f"{line[: width - 3]}..." for line in lines)


def _differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the values of each override that differs between runs, the most frequent first."""
    typed = Counter(key for run in runs for key in {key_of(word): None for word in run.overrides} if _is_setting(key))
    values = {key: [run.value(key) for run in runs] for key, _ in typed.most_common()}
    return {key: some for key, some in values.items() if any(value != some[0] for value in some)}


def _is_setting(word: str) -> bool:
    return key_of(word).partition(".")[0] not in NOT_SHOWN


def _summary(runs: Sequence[Run], last: Sequence[Run]) -> Iterator[str]:
    """Yield the overrides that all shown runs share, the number of runs by state, and unreadable runs."""
    words = [word for word in last[0].overrides if _is_setting(word) and all(word in run.overrides for run in last)]
    if words:
        yield printable(f"Overrides of {'every' if len(last) > 1 else 'this'} run: {' '.join(words)}")
    states = Counter(run.state for run in runs)
    counts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    more = f"; the last {len(last)} shown, limit=null shows all" if len(last) < len(runs) else ""
    jobs = sum(run.path is None for run in runs)
    without = f" {jobs} of them {'is a job' if jobs == 1 else 'are jobs'} without a run directory." if jobs else ""
    yield f"{many(len(runs), 'run')} ({counts}), {size_text(sum(run.size for run in runs))}{more}.{without}"
    unread = change.unreadable(runs)
    if unread:
        yield unread


def _cell(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if key == "size":
        return size_text(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)


def check_output(output: str | None, suffixes: Sequence[str]) -> None:
    """Raise UserError for a path with another suffix or without a folder."""
    if output is None:
        return
    path = Path(output)
    require(path.suffix in suffixes, f"output={output}: name a file that ends in {' or '.join(suffixes)}.")
    require(path.resolve().parent.is_dir(), f"output={output}: its folder does not exist.")


def write_rows(output: str, found: Any) -> None:
    """Write rows as CSV, or anything as JSON, by the suffix of `output`."""
    if Path(output).suffix == ".json":
        text = json.dumps(found, indent=2) + "\n"
    else:
        head = list(found[0]) if found else ["run"]
        flat = [[" ".join(map(str, one)) if isinstance(one, list) else one for one in row.values()] for row in found]
        text = files.csv_text(head, flat)
    files.write_atomically(files.followed(Path(output)), text)
