"""What is attached to a run: its callbacks and loggers, made from the configuration and held against each other."""

import inspect
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelPruning,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lathe.callbacks import ExactResume, FrozenStatistics, TrialReport
from lathe.config.schema import canonical
from lathe.errors import UserError, require
from lathe.runs.methods import make_methods
from lathe.runs.nodes import make_part, target_of
from lathe.runs.study import trial_of
from lathe.tasks import Task

# What Lightning finds inside a run, by the command that does so before one.
FINDERS: dict[type[Callback], str] = {LearningRateFinder: "lr_find", BatchSizeFinder: "batch_find"}


def make_callbacks(cfg: dict[str, Any], task: Task) -> list[Callback]:
    """The callbacks that the configuration lists, and those that every run needs.

    Raises:
        UserError: a node is no callback, or one that can't work here, or two are the same.
    """
    trainer = cfg["trainer"]
    skip = set()
    if trainer["fast_dev_run"] or not trainer["enable_checkpointing"]:
        skip.add("checkpoint")
    if not trainer["enable_progress_bar"]:
        skip.add("progress_bar")
    if not trainer["enable_model_summary"]:
        skip.add("model_summary")
    nodes = {name: node for name, node in cfg["callbacks"].items() if node is not None and name not in skip}
    made: dict[str, Callback] = {}
    chosen = nodes.get("checkpoint")
    for name, node in nodes.items():
        callback = make_part(_monitoring(name, _following(node, chosen), task), f"callbacks.{name}", Callback)
        twin = next((other for other, known in made.items() if known.state_key == callback.state_key), None)
        require(
            twin is None, f"callbacks.{twin} and callbacks.{name} are both {callback.state_key}: leave one of them out."
        )
        bar = isinstance(callback, ProgressBar)
        other = next((other for other, known in made.items() if bar and isinstance(known, ProgressBar)), None)
        require(
            other is None,
            f"callbacks.{other} and callbacks.{name} are both progress bars, and a Trainer takes one: add "
            f"callbacks.{other}=null.",
        )
        finder = next((verb for kind, verb in FINDERS.items() if isinstance(callback, kind)), None)
        require(
            finder is None,
            f"callbacks.{name}: {type(callback).__name__} trains for a while with settings of its own, inside the run: "
            f"leave it out, and have python scripts/{finder}.py, with the other words of this command, find a value.",
        )
        require(
            not isinstance(callback, StochasticWeightAveraging),
            f"callbacks.{name}: StochasticWeightAveraging averages when the checkpoints have been written, so nothing "
            "would hold its average: leave it out, and take callbacks=[default,ema].",
        )
        if isinstance(callback, ModelPruning):
            rank_zero_warn(
                f"callbacks.{name}: ModelPruning keeps no masks in a checkpoint, so a continued run is not the "
                "one that ran through: compression=prune goes on to the bit."
            )
        made[name] = callback
    frozen = [FrozenStatistics()] if cfg.get("freeze") else []
    return [ExactResume(cfg["seed"]), *task.own_callbacks(), *frozen, *make_methods(cfg), *made.values()]


def _following(node: Any, checkpoint: Any) -> Any:
    """A callback's node whose `monitor: auto` is the metric that chooses the best epoch, where one was named for that,
    with its direction."""
    named = isinstance(checkpoint, dict) and checkpoint.get("monitor") not in ("auto", None)
    if not named or not isinstance(node, dict) or node.get("monitor") != "auto":
        return node
    mode = {"mode": checkpoint.get("mode", "auto")} if node.get("mode") == "auto" else {}
    return {**node, "monitor": checkpoint["monitor"], **mode}


def _monitoring(name: str, node: Any, task: Task) -> Any:
    """A callback's node with the task's own metric for `monitor: auto`, and for `mode: auto` that metric's direction.

    Raises:
        UserError: the direction of a metric that is not the task's own is not known.
    """
    if not isinstance(node, dict):
        return node
    if node.get("monitor") == "auto":
        node = {**node, "monitor": _own_monitor(name, node, task)}
    if node.get("mode") == "auto":
        monitor = node.get("monitor")  # a callback that needs one says so itself
        own = monitor in task.metric_names or not task.logs_more
        if str(monitor).rpartition("/")[2] in task.undirected:
            raise UserError(
                f"callbacks.{name}.mode=auto: the torchmetric behind {monitor} does not say whether higher is better; "
                f"set callbacks.{name}.mode to max or min."
            )
        if monitor is not None and not own:
            raise UserError(
                f"callbacks.{name}.mode=auto knows the task's own metrics, and not {monitor}: set "
                f"callbacks.{name}.mode to max or min."
            )
        node = {**node, "mode": "min" if str(monitor).rpartition("/")[2] in task.minimised else "max"}
    return node


def _own_monitor(name: str, node: dict[str, Any], task: Task) -> str | None:
    """The metric that `monitor: auto` means; None for a checkpoint of a task whose metrics are not known in advance.

    Raises:
        UserError: another callback needs one.
    """
    if not task.monitor:
        start = f"callbacks.{name}.monitor=auto: {type(task.driven).__name__} declares no metrics"
        if canonical(str(node.get("_target_"))) != "lathe.callbacks.Checkpoint":
            way = f"callbacks.{name}.monitor=val_loss callbacks.{name}.mode=min"
            raise UserError(f"{start}. Name one, such as {way}.")
        rank_zero_only(print)(f"{start}, so best.ckpt is the last epoch.")
    return task.monitor or None


def make_loggers(cfg: dict[str, Any], run_dir: Path, start_step: int) -> list[Logger]:
    """The loggers that the configuration lists, and last metrics.csv, which every run has: a task's `self.logger` is
    the first.

    Raises:
        UserError: a node is no logger, or one that can't start.
    """
    listed = {name: node for name, node in cfg["logger"].items() if node is not None}
    lines = listed.pop("csv", {"_target_": "lathe.loggers.csv"})
    nodes = {**listed, "csv": lines}
    return [make_logger(node, f"logger.{name}", run_dir, start_step) for name, node in nodes.items()]


def make_logger(node: Any, key: str, run_dir: Path, start_step: int) -> Logger:
    """The logger of a node. A function gets the run's directory and the step that it starts at; a class, such as
    Lightning's own, its keys alone, and the directory where it takes a `save_dir` that was not given."""
    kind = target_of(node)
    if not inspect.isclass(kind):
        logger: Logger = make_part(node, key, Logger, run_dir, start_step)
        return logger
    if "save_dir" in inspect.signature(kind).parameters:
        node = {"save_dir": str(run_dir), **node}
    logger = make_part(node, key, Logger)
    return logger


def trial_report(cfg: dict[str, Any], task: Task, place: dict[str, Any] | None) -> TrialReport | None:
    """What reports the validations of a search's run, whose `place` is the sweep's folder and the job's number; None
    for other runs.
    """
    if place is None or place.get("job") is None:
        return None
    trial = trial_of(Path(place["folder"]), place["job"])
    monitor = cfg["objective"] or cfg["callbacks"].get("checkpoint", {}).get("monitor")
    monitor = task.monitor if monitor in (None, "auto") else monitor
    if trial is None or monitor is None:
        return None
    return TrialReport(trial if getattr(rank_zero_only, "rank", 0) == 0 else None, monitor)
