"""Compare the direction of an optimising sweeper with the objective of the run.

Imports the task's class only if a sweeper optimises.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lathe.config.override_parsing import key_of
from lathe.errors import UserError

# Words in the names of metrics for which lower is better, where no task says so.
_LOWER = re.compile(
    r"loss|perplexity|err|error|mae|mse|rmse|mape|nll|ece|brier|wer|cer|fid|entropy|distance|regret|hamming|seconds|ms|"
    "bytes|parameters|macs|latency|time|gap|peak|wait|sync|energy"
)
DIRECTION = "hydra.sweeper.direction"  # of Hydra's Optuna plug-in


def check_direction(cfg: Mapping[str, Any], sweeper: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Check that Hydra's Optuna plug-in does not optimise towards the worst run.

    It minimises by default, and for most metrics of tasks higher is better. `sweeper` is the resolved configuration of
    the sweeper. A direction among the overrides `typed` is taken as it is.

    Raises:
        UserError: with the override that changes the direction.
    """
    chosen = sweeper.get("direction")
    chosen = getattr(chosen, "name", chosen)  # the plug-in's enumeration
    if chosen not in ("minimize", "maximize") or DIRECTION in map(key_of, typed):
        return
    objective, is_lower_better = objective_of(cfg)
    if objective is None:
        return
    if is_lower_better is None:
        order = "lower" if chosen == "minimize" else "higher"
        print(f"The sweep takes {order} {objective} for better: {DIRECTION}={chosen} says so.")
    elif is_lower_better != (chosen == "minimize"):
        better, right = ("lower", "minimize") if is_lower_better else ("higher", "maximize")
        raise UserError(
            f"{DIRECTION}={chosen} would look for the worst run, as {better} {objective} is better: add "
            f"{DIRECTION}={right}."
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
