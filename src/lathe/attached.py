"""What is attached to a run: its callbacks and loggers, made from the configuration and held against each other."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, Callback, EarlyStopping, LearningRateFinder
from lightning.pytorch.loggers import Logger

from lathe import stacking
from lathe.build import make_part
from lathe.callbacks import ExactResume
from lathe.callbacks.monitored import Monitored
from lathe.config import did_you_mean, require
from lathe.errors import UserError
from lathe.tasks import Task


def make_callbacks(cfg: dict[str, Any], task: Task) -> list[Callback]:
    """The callbacks that the configuration lists, and those that every run needs.

    Raises:
        UserError: a node is no callback, or one that can't work here; two are the same; or a callback monitors a metric that no part of
            the run can report.
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
    for name, node in nodes.items():
        callback = make_part(_monitoring(name, node, task), f"callbacks.{name}", Callback)
        twin = next((other for other, known in made.items() if known.state_key == callback.state_key), None)
        require(twin is None, f"callbacks.{twin} and callbacks.{name} are both {callback.state_key}: leave one of them out.")
        require(not isinstance(callback, (LearningRateFinder, BatchSizeFinder)),
                f"callbacks.{name}: {type(callback).__name__} trains for a while with settings of its own, inside the run: leave it out, and "
                "compare values in a sweep (-m optimizer.lr=0.03,0.1,0.3).")  # fmt: skip
        made[name] = callback
    methods = stacking.make_methods(cfg)
    monitors = {f"callbacks.{name}.monitor": str(it.monitor) for name, it in made.items() if getattr(it, "monitor", None)}
    check_monitors(monitors, task, [*methods, *made.values()])
    early = {f"callbacks.{name}.monitor": it for name, it in made.items() if isinstance(it, EarlyStopping)}
    for key, callback in early.items():
        waits = callback._check_on_train_epoch_end is False and callback.monitor in {f"train/{name}" for name in task.reported}
        require(not waits, f"{key}={callback.monitor} is known after the epoch's validation: set "
                           f"{key.removesuffix('monitor')}check_on_train_epoch_end=true.")  # fmt: skip
    return [ExactResume(cfg["seed"]), *methods, Monitored(monitors, early), *made.values()]


def check_monitors(monitors: dict[str, str], task: Task, callbacks: list[Callback]) -> None:
    """What `monitors`, by their keys, can't come from: where all parts are Lathe's and Lightning's own, the task's metrics are all there
    are, and elsewhere any part may log a name of its own.

    Raises:
        UserError: no part reports the metric.
    """
    foreign = [part for part in (task, *callbacks) if type(part).__module__.split(".")[0] not in ("lathe", "lightning")]
    for key, name in monitors.items():
        hint = did_you_mean(name, task.metric_names)
        require(bool(foreign) or name in task.metric_names, f"{key}={name}: the task reports no such metric; {hint}")


def _monitoring(name: str, node: Any, task: Task) -> Any:
    """A callback's node with the task's own metric for `monitor: auto`, and for `mode: auto` that metric's direction.

    Raises:
        UserError: the direction of a metric that is not the task's own is not known.
    """
    if not isinstance(node, dict):
        return node
    if node.get("monitor") == "auto":
        node = {**node, "monitor": task.monitor}
    if node.get("mode") == "auto":
        monitor = node["monitor"]
        if monitor is not None and monitor not in task.metric_names and type(task).__module__.split(".")[0] != "lathe":
            raise UserError(f"callbacks.{name}.mode=auto knows the task's own metrics, and not {monitor}: set callbacks.{name}.mode to max "
                            "or min.")  # fmt: skip
        node = {**node, "mode": "min" if str(monitor).rpartition("/")[2] in task.minimised else "max"}
    return node


def make_loggers(cfg: dict[str, Any], run_dir: Path, start_step: int) -> list[Logger]:
    """metrics.csv, which every run has, and the loggers that the configuration lists.

    Raises:
        UserError: a node is no logger, or one that can't start.
    """
    nodes = {"csv": {"_target_": "lathe.loggers.csv"}, **{name: node for name, node in cfg["logger"].items() if node is not None}}
    return [make_logger(node, f"logger.{name}", run_dir, start_step) for name, node in nodes.items()]


def make_logger(node: Any, key: str, run_dir: Path, start_step: int) -> Logger:
    """The logger of a node. Lathe's own take the run's directory and the step that it starts at, Lightning's their own keys alone."""
    own = isinstance(node, dict) and str(node.get("_target_")).startswith("lathe.")
    logger: Logger = make_part(node, key, Logger, *((run_dir, start_step) if own else ()))
    return logger
