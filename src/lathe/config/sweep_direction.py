"""The metric that a run is judged by, and if lower is better."""

import re
from collections.abc import Mapping
from typing import Any

# Words in the names of metrics for which lower is better, where no task says so.
_LOWER = re.compile(
    r"loss|perplexity|err|error|mae|mse|rmse|mape|nll|ece|brier|wer|cer|fid|entropy|distance|regret|hamming|seconds|ms|"
    "bytes|parameters|macs|latency|time|gap|peak|wait|sync|energy"
)


def lower_is_better(name: str) -> bool:
    """Guess from the name of a metric: True for test/loss, val/word_error_rate and seconds."""
    words = re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name.rpartition("/")[2]).lower())
    return (any(map(_LOWER.fullmatch, words)) and not name.endswith("_per_s")) or name.endswith("epoch_s")


def objective_of(cfg: Mapping[str, Any]) -> tuple[str | None, bool | None]:
    """Return the name of the metric that a job returns, and if lower is better; None where nothing says so."""
    from hydra.utils import get_object

    task = get_object(cfg["task"]["_target_"])
    task_monitor, is_lower = _directions(task, cfg["task"].get("metrics"))
    checkpoint = cfg["callbacks"].get("checkpoint") or {}
    monitor, mode = checkpoint.get("monitor"), checkpoint.get("mode")
    monitor = task_monitor or None if monitor == "auto" else monitor
    name = cfg["objective"] or monitor
    if name == monitor and mode in ("min", "max"):
        return name, mode == "min"
    split, _, metric = str(name).rpartition("/")
    return name, is_lower.get(metric) if split else None


def _directions(task: Any, metrics: Any) -> tuple[str | None, dict[str, bool | None]]:
    """Return the metric that a task of this class monitors, and for each of its metrics if lower is better."""
    from hydra.utils import instantiate

    if metrics is not None and hasattr(task, "directions"):
        found: tuple[str | None, dict[str, bool | None]] = task.directions(instantiate(metrics, _convert_="all"))
        return found
    names = {*getattr(task, "metrics", ()), *getattr(task, "computed", ())}
    return getattr(task, "monitor", None), {name: name in getattr(task, "minimised", ()) for name in names}
