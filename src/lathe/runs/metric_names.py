"""Names of metrics: a split before what is measured, as Lathe's tasks (val/accuracy) or as a LightningModule logs it
(val_accuracy); and which way is better. Imports no torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lathe.config.metric_split import SPLIT, split_of
from lathe.config.sweep_direction import lower_is_better

__all__ = [
    "bare",
    "best_of",
    "data_keys",
    "directions",
    "is_cost",
    "is_curve",
    "loss_keys",
    "objective_name",
    "on_test",
    "split_of",
    "told_direction",
]

# What a run measures of itself: how long it took and how large it is, not how good.
_COST = re.compile(
    r"seconds|parameters|\w+_per_s|step_ms|data_wait|grad_sync|mfu|epoch_s|rank_ms_\w+|slowest_rank|energy_\w+|"
    r"peak_\w+|bytes|macs|latency\w*"
)
# keys of a task that change what is reported, or trained on alone
_SAME_LOSS = ("task.metrics", "task.label_smoothing")
# keys of the data that say how batches are made and where files are, and not which samples there are
_SAME_DATA = (
    *("batch_size", "eval_batch_size", "seed", "fold", "augment", "normalize", "loader", "num_workers", "pin_memory"),
    *("prefetch_factor", "persistent_workers", "class_names", "source.skip_bad", "source.data_dir"),
)
# columns of metrics.csv that say how fast, not how well
_CLOCKED = ("throughput/", "device/", "DeviceStatsMonitor.", "lr-")


def bare(name: str) -> str:
    """What is measured: accuracy of val/accuracy, val_accuracy and accuracy."""
    return SPLIT.sub("", name, count=1)


def on_test(name: str) -> str:
    """The metric's name on the test split."""
    found = SPLIT.match(name)
    return name if found is None else f"test{name[found.end() - 1 :]}"


def is_cost(name: str) -> bool:
    """Whether it is what a run costs, which nobody chooses a model by unless asked."""
    return _COST.fullmatch(name) is not None


def is_curve(name: str) -> bool:
    """Whether a column of metrics.csv is a metric: neither its place nor a speed nor a learning rate."""
    return name not in ("step", "epoch", "") and not name.startswith(_CLOCKED) and not is_cost(name)


def loss_keys(keys: Iterable[str]) -> list[str]:
    """Those of the configuration that make the loss of an evaluation another function, so that the losses of runs which
    differ in one are no measure of each other."""
    return [key for key in keys if key.startswith("task.") and not key.startswith(_SAME_LOSS)]


def data_keys(keys: Iterable[str]) -> list[str]:
    """Those of the configuration that make the data other data."""
    data = (key for key in keys if key.startswith("data."))
    same = [f"data.{name}" for name in _SAME_DATA]
    return [key for key in data if not any(key == name or key.startswith(f"{name}.") for name in same)]


def directions(task: Any, monitor: str | None, mode: str) -> dict[str, str]:
    """For what a task measures, and for the `monitor` of its checkpoint, whether max or min is better, by bare names;
    without those of which nobody knows."""
    known = [name for name in task.reported if name not in task.undirected]
    found = {name: "min" if name in task.minimised else "max" for name in known}
    return found | ({} if monitor is None else {bare(monitor): mode})


def told_direction(result: Mapping[str, Any], name: str) -> str | None:
    """What result.json says of a metric's direction: max, min, or None where it says nothing."""
    told = result.get("directions")
    way = told.get(bare(name)) if isinstance(told, dict) else None
    return way if way in ("max", "min") else None


def objective_name(result: Mapping[str, Any], typed: Sequence[str]) -> str:
    """The metric that a run is judged by: `objective=` if it was typed, else the monitor; "" if neither is known."""
    value = result.get("objective")
    name = next((word.partition("=")[2] for word in typed if word.startswith("objective=")), result.get("monitor"))
    if value is not None and result.get(name or "") != value:  # an experiment's file names another
        metrics = (key for key, at in result.items() if at == value and ("/" in key or split_of(key) is not None))
        name = next(metrics, name)
    return str(name or "")


def best_of(values: Sequence[float | None], name: str, result: Mapping[str, Any]) -> int | None:
    """The index of the best of two or more values of a metric, in the direction that `result` or its name says."""
    known = [at for at, value in enumerate(values) if value is not None]
    way = told_direction(result, name) or ("min" if lower_is_better(name) else "max")
    ordered = sorted(known, key=lambda at: values[at] or 0.0, reverse=way == "max")
    return ordered[0] if len(known) > 1 else None
