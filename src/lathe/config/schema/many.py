"""The keys of the commands that are about many runs, or about one that is not made yet."""

from lathe.config.schema.places import Keys, Place
from lathe.config.schema.rule import count, flag, items, number, path, text, whole, word

_RUN = text("a run directory")
_log_dir = Keys({"log_dir": path})

RUNS: dict[str, Place] = {
    "runs": items(text("a folder or a pattern"), 1).once() | text("a folder or a pattern") | None,
    "where": items(text("a condition such as state=complete")).once(),
    "since": text("a date or an age") | None,
    "sort": text("a key, after a - for the other way around"),
    "limit": count | None,
    "columns": items(text("a metric or a key"), 1).once() | None,
    "output": path | None,
    "compare": items(_RUN, 2, 2) | None,
    "points": count,
    "tag": items(text("a label")).once(),
    "untag": items(text("a label")).once(),
    "archive": path | None,
    "delete": word("unfinished", "failed", "pruned", "complete") | None,
    "yes": flag,
    "paths": _log_dir,
}
REPRODUCE: dict[str, Place] = {
    "run": _RUN,
    "code": word("recorded", "current"),
    "data": Keys({"folder": path | None}),
    "output": path | None,
    "trusted": items(text("a package or a dotted name")),
    "paths": _log_dir,
}
# Beside what train.py takes.
LR_FIND: dict[str, Place] = {
    "find": Keys(
        {
            "min_lr": number(above=0),
            "max_lr": number(above=0),
            "steps": whole(10),
            "stop": number(above=1),
            "output": path | None,
        }
    )
}
BATCH_FIND: dict[str, Place] = {
    "find": Keys(
        {
            "memory": number(above=0) | None,
            "start": count,
            "most": count | None,
            "steps": whole(2),
            "output": path | None,
        }
    )
}
GPU_CHECK: dict[str, Place] = {
    "accelerator": word("cpu", "gpu"),
    "only": items(text("the name of a line"), 1).once() | None,
    "timeout": number(above=0),
    "overrides": items(text("an override")),
    "output": path | None,
    "paths": _log_dir,
}
