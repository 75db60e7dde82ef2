"""The command `python scripts/runs.py`."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lathe import files
from lathe.config.values import shown
from lathe.errors import collect_errors, refuse, require
from lathe.verbs.runs import change, compare, table
from lathe.verbs.runs.choose import begun_since, check_key, chosen, conditions, ordered
from lathe.verbs.runs.find import count_gone, find

ACTIONS = ("compare", "tag", "archive", "delete")
# options: the default in configs/runs.yaml, and the actions that use it (without an action, runs are listed)
PARTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "runs": (None, ("the list", "tag", "archive", "delete")),
    "where": ([], ("the list", "tag", "archive", "delete")),
    "since": (None, ("the list", "tag", "archive", "delete")),
    "sort": ("date", ("the list",)),
    "limit": (50, ("the list",)),
    "columns": (None, ("the list", "compare")),
    "output": (None, ("the list", "compare")),
    "points": (8, ("compare",)),
    "yes": (False, ("delete",)),
}


def runs(request: dict[str, Any]) -> None:
    """List the selected runs, or compare, tag, archive or delete them.

    Raises UserError, before anything is changed, for an invalid request or one that would damage a run.
    """
    request["tag both"] = bool(request["tag"] or request["untag"])
    asked = [name for name in ACTIONS if request["tag both" if name == "tag" else name]]
    require(len(asked) < 2, f"{' and '.join(asked)} are one thing each: give one of them at a time.")
    refuse(_of_others(request, asked[0] if asked else "the list"))
    forms = (".json",) if request["compare"] else (".csv", ".json")
    collect_errors(
        lambda: conditions(request["where"]),
        lambda: request["since"] is None or begun_since(request["since"]),
        lambda: request["output"] is None or table.check_output(request["output"], forms),
    )
    if request["compare"] is not None:
        show_comparison(request)
        return
    log_dir = Path(request["paths"]["log_dir"]).resolve()
    every = find(request["runs"], log_dir)
    if not asked:  # keys that no run has; those that only the selected runs lack are reported later
        collect_errors(
            *(partial(chosen, every, [word], None) for word in request["where"]),
            *(partial(check_key, every, key, f"columns=[{key}]") for key in request["columns"] or ()),
            lambda: ordered(every, request["sort"]),
        )
    found = chosen(every, request["where"], request["since"])
    if not asked:
        show_list(request, found)
        return
    narrow = bool(request["runs"] or request["where"] or request["since"])
    safe = request["delete"] in ("unfinished", "failed")
    require(
        narrow or safe,
        f"{asked[0]} would be for every run below {request['paths']['log_dir']}: say for which, by runs=..., "
        "where=[...] or since=...",
    )
    if not found:
        print("No run is chosen by these words: nothing was changed.")
    elif asked == ["tag"]:
        change.tag(found, log_dir, request["tag"], request["untag"])
    elif asked == ["archive"]:
        change.archive(found, log_dir, request["archive"])
    else:
        change.delete(found, log_dir, request["delete"], request["yes"])


def _of_others(request: dict[str, Any], action: str) -> Iterator[str]:
    """Yield an error for each key that was set and that this action does not use."""
    for key, (usual, takes) in PARTS.items():
        if request[key] != usual and action not in takes:
            way = "name the runs themselves" if action == "compare" else "choose runs by runs, where or since"
            away = way if key in ("where", "since", "sort", "limit", "runs") else "leave it out"
            yield f"{key}={shown(request[key])} is for {' and '.join(takes)}, and {action} does not use it: {away}."


def show_comparison(request: dict[str, Any]) -> None:
    """Print the differences between two runs, and write them to `output`."""
    found = compare.compare(request["compare"], request["columns"], request["points"])
    print(compare.show(found))
    if request["output"] is not None:
        files.write_atomically(files.followed(Path(request["output"])), json.dumps(found, indent=2) + "\n")


def show_list(request: dict[str, Any], found: list[Any]) -> None:
    """Print the last rows, and write all of them to `output`."""
    if not found:
        print(f"No run below {request['paths']['log_dir']} is chosen by these words.")
    for key in request["columns"] or ():
        check_key(found, key, f"columns=[{key}]")
    found = ordered(found, request["sort"])
    limit = request["limit"]
    shown = found if limit is None else found[-limit:]
    if shown:
        print(table.show(shown, request["columns"]))
        for line in (table.shared(shown), table.summary(found, len(shown)), table.unread(found)):
            if line is not None:
                print(line)
    gone = count_gone(request["runs"])
    if gone:
        print(f"{table.many(gone, 'job')} of the sweep besides: the run directory was moved or removed.")
    if request["output"] is not None:
        table.write(request["output"], table.rows(found, request["columns"]))
