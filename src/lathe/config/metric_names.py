"""Names of metrics and costs, and which direction is better. Imports no torch.

A split precedes the metric, as in Lathe's tasks (val/accuracy) or as a LightningModule logs it (val_accuracy).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SPLIT = re.compile(r"(train|val|test)(?:id|idation)?[/_](?=.)")
# Words in the names of metrics for which lower is better, where no task says so.
_LOWER = re.compile(
    r"loss|perplexity|err|error|mae|mse|rmse|mape|nll|ece|brier|wer|cer|fid|entropy|distance|regret|hamming|seconds|ms|"
    "bytes|parameters|macs|latency|time|gap|peak|wait|sync|energy"
)
COSTS = ("bytes", "macs", "latency_ms")  # of a receipt
ENERGY = ("energy_gpu_j", "energy_cpu_j")  # of callbacks.device_stats
# Measurements of time and size
_COST = re.compile(
    r"seconds|parameters|\w+_per_s|step_ms|data_wait|grad_sync|mfu|epoch_s|rank_ms_\w+|slowest_rank|energy_\w+|"
    r"peak_\w+|bytes|macs|latency\w*"
)
# keys of a task that don't change the loss of an evaluation
_SAME_LOSS = ("task.metrics", "task.label_smoothing")
# keys of the data that don't change which samples there are
_SAME_DATA = (
    *("batch_size", "eval_batch_size", "seed", "fold", "augment", "normalize", "loader", "num_workers", "pin_memory"),
    *("prefetch_factor", "persistent_workers", "class_names", "source.skip_bad", "source.data_dir"),
)
# columns of metrics.csv that are not metrics of the model
_RATES = ("throughput/", "device/", "DeviceStatsMonitor.", "lr-")


def split_of(name: str) -> str | None:
    """Return train, val or test; None for a metric of no split."""
    return match[1] if (match := SPLIT.match(name)) else None


def without_split(name: str) -> str:
    """Return the metric's name without its split: accuracy for val/accuracy, val_accuracy and accuracy."""
    return SPLIT.sub("", name, count=1)


def on_test(name: str) -> str:
    """Return the metric's name on the test split."""
    return f"test{name[match.end() - 1 :]}" if (match := SPLIT.match(name)) else name


def lower_is_better(name: str) -> bool:
    """Guess from the name of a metric: True for test/loss, val/word_error_rate and seconds."""
    parts = re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name.rpartition("/")[2]).lower())
    return (any(map(_LOWER.fullmatch, parts)) and not name.endswith("_per_s")) or name.endswith("epoch_s")


def is_cost(name: str) -> bool:
    """Return whether `name` measures time or size."""
    return _COST.fullmatch(name) is not None


def is_curve(name: str) -> bool:
    """Return whether a column of metrics.csv is a metric of the model."""
    return name not in ("step", "epoch", "") and not name.startswith(_RATES) and not is_cost(name)


def loss_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys that change the loss of an evaluation, so that losses of such runs can't be compared."""
    return [key for key in keys if key.startswith("task.") and not key.startswith(_SAME_LOSS)]


def data_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys that change which samples there are."""
    data = (key for key in keys if key.startswith("data."))
    same = [f"data.{name}" for name in _SAME_DATA]
    return [key for key in data if not any(key == name or key.startswith(f"{name}.") for name in same)]


def directions(task: Any, monitor: str | None, mode: str) -> dict[str, str]:
    """Return min or max for each metric of the task whose better direction is known, and for the monitor.

    Names have no split.
    """
    modes = {name: "min" if name in task.minimised else "max" for name in task.reported if name not in task.undirected}
    return modes | ({} if monitor is None else {without_split(monitor): mode})


def recorded_direction(result: Mapping[str, Any], name: str) -> str | None:
    """Return the better direction of a metric, min or max, according to result.json."""
    recorded = result.get("directions")
    way = recorded.get(without_split(name)) if isinstance(recorded, dict) else None
    return way if way in ("max", "min") else None


def objective_name(result: Mapping[str, Any], typed: Sequence[str]) -> str:
    """Return the metric that a run is judged by: that of `objective=`, else the monitor; "" if neither is known."""
    value = result.get("objective")
    name = next((word.partition("=")[2] for word in typed if word.startswith("objective=")), result.get("monitor"))
    if value is not None and result.get(name or "") != value:  # an experiment's file names another
        metrics = (key for key, at in result.items() if at == value and ("/" in key or split_of(key) is not None))
        name = next(metrics, name)
    return str(name or "")


def best_of(values: Sequence[float | None], name: str, result: Mapping[str, Any]) -> int | None:
    """Return the index of the best of at least two values of a metric."""
    known = [i for i, value in enumerate(values) if value is not None]
    way = recorded_direction(result, name) or ("min" if lower_is_better(name) else "max")
    ordered = sorted(known, key=lambda i: values[i] or 0.0, reverse=way == "max")
    return ordered[0] if len(known) > 1 else None


def cost_of(receipt: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the costs of a run according to its receipt, None for those that it lacks; it may be empty.

    `bytes` is of the file that ships, `macs` of one sample, and `latency_ms` the median of the smallest batch on one
    thread. Rows of the dense model are left out.
    """
    files = [row for row in receipt.get("files", ()) if row["of"] == "this" and row["target"] == receipt.get("ships")]
    rows = [row for row in receipt.get("latency", ()) if row["of"] == "this" and row["threads"] == 1]
    smallest = min((row["batch"] for row in rows), default=None)
    rows = [row for row in rows if row["batch"] == smallest]
    ships = [row for row in rows if row["backend"] == receipt["ships"]]
    return {
        "bytes": min((row["bytes"] for row in files), default=None),
        "macs": receipt["size"]["macs"] if "size" in receipt else None,
        "latency_ms": min((row["median_ms"] for row in ships or rows), default=None),
    }


def objective_of(cfg: Mapping[str, Any]) -> tuple[str | None, bool | None]:
    """Return the name of the metric that a job returns, and if lower is better; None where nothing says so."""
    from hydra.utils import get_object, instantiate

    task, metrics = get_object(cfg["task"]["_target_"]), cfg["task"].get("metrics")
    is_lower: dict[str, bool | None]
    if metrics is not None and hasattr(task, "directions"):
        task_monitor, is_lower = task.directions(instantiate(metrics, _convert_="all"))
    else:
        names = {*getattr(task, "metrics", ()), *getattr(task, "computed", ())}
        is_lower = {name: name in getattr(task, "minimised", ()) for name in names}
        task_monitor = getattr(task, "monitor", None)
    checkpoint = cfg["callbacks"].get("checkpoint") or {}
    monitor, mode = checkpoint.get("monitor"), checkpoint.get("mode")
    monitor = task_monitor or None if monitor == "auto" else monitor
    name = cfg["objective"] or monitor
    if name == monitor and mode in ("min", "max"):
        return name, mode == "min"
    split, _, metric = str(name).rpartition("/")
    return name, is_lower.get(metric) if split else None
