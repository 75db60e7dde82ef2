"""The group sweep: which jobs -m has, and how they are run."""

from lathe.config.schema.places import Keys
from lathe.config.schema.rule import anything, count, group, items, node, number, path, text, whole, word

_job = items(text("an override")) | text("overrides")
_axis = items(anything, 1) | group(anything)
SWEEP = Keys(
    {
        "axes": group(items(anything, 1)) | None,
        "runs": items(_job, 1) | None,
        "remove": items(text("an override"), 1) | None,
        "jobs": whole(1, 4096) | "auto",
        "retries": whole(0, 1000),
        "silence": number(above=0) | None,
        "resume": text("a sweep's directory") | None,
        "folder": path | None,
        "job": whole(0) | None,
        "space": group(_axis),
        "repeats": group(items(anything, 1)) | None,
        "trials": count,
        "sampler": word("tpe", "gp", "cmaes", "random", "qmc", "grid", "nsga2") | node,
        "pruner": word("none", "asha", "hyperband", "median", "percentile", "wilcoxon") | node,
        "seed": whole(0, 2**32 - 1),
        "objectives": items(text("a metric"), 1) | None,
        "directions": word("auto", "max", "min") | items(word("max", "min"), 1),
        "storage": text("an address") | None,
    },
    ("remove", "space", "repeats", "trials", "sampler", "pruner", "seed", "objectives", "directions", "storage"),
    null=True,
)
