"""Builds the callbacks, compression methods and loggers of a resolved configuration."""

import inspect
from functools import partial
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

import lathe.callbacks
from lathe.callbacks import ExactResume, TrialReport
from lathe.compression import Compression
from lathe.config.compression_plan import methods, windows
from lathe.config.schema import canonical
from lathe.errors import require
from lathe.runs.instantiate import instantiate_as, locate
from lathe.tasks import Task

# Lightning's callbacks that don't work in a run, and what does
REFUSED: dict[type[Callback], str] = {
    LearningRateFinder: "it trains inside the run with settings of its own: use scripts/lr_find.py",
    BatchSizeFinder: "it trains inside the run with settings of its own: use scripts/batch_find.py",
    StochasticWeightAveraging: "it averages after the last checkpoint is written: use callbacks=[default,ema]",
}
TRAINER_SWITCHES = {
    "checkpoint": "enable_checkpointing",
    "progress_bar": "enable_progress_bar",
    "model_summary": "enable_model_summary",
}


def make_callbacks(cfg: dict[str, Any], task: Task) -> list[Callback]:
    """Build the callbacks that every run needs, the compression methods, and those of `callbacks`."""
    trainer = cfg["trainer"]
    skipped = {name for name, switch in TRAINER_SWITCHES.items() if not trainer[switch]}
    if trainer["fast_dev_run"]:
        skipped.add("checkpoint")
    nodes = {name: node for name, node in cfg["callbacks"].items() if node is not None and name not in skipped}
    built: dict[str, Callback] = {}
    for name, node in nodes.items():
        node = _with_metric(name, node, nodes.get("checkpoint"), task)
        built[name] = instantiate_as(node, f"callbacks.{name}", Callback)
        for kind, reason in REFUSED.items():
            require(not isinstance(built[name], kind), f"callbacks.{name}: {kind.__name__}: {reason}.")
        if isinstance(built[name], ModelPruning):
            rank_zero_warn(f"callbacks.{name}: ModelPruning saves no masks. Use compression=prune.")
    _check_duplicates(built)
    frozen = [lathe.callbacks.FrozenStatistics()] if cfg.get("freeze") else []
    return [ExactResume(cfg["seed"]), *task.own_callbacks(), *frozen, *make_methods(cfg), *built.values()]


def _check_duplicates(callbacks: dict[str, Callback]) -> None:
    """Raise UserError for two callbacks with one place in a checkpoint, or two progress bars."""
    seen: dict[str, str] = {}
    for name, callback in callbacks.items():
        kind = "a progress bar" if isinstance(callback, ProgressBar) else callback.state_key
        other = seen.setdefault(kind, name)
        require(other == name, f"callbacks.{other} and callbacks.{name} are both {kind}: leave one of them out.")


def _with_metric(name: str, node: Any, checkpoint: Any, task: Task) -> Any:
    """Return a callback's node with a metric for `monitor: auto`, and its direction for `mode: auto`.

    The metric is that of the checkpoint callback, if it names one, else the task's.
    """
    if not isinstance(node, dict):
        return node
    monitor, mode = node.get("monitor"), node.get("mode")
    if monitor == "auto":
        is_named = isinstance(checkpoint, dict) and checkpoint.get("monitor") not in ("auto", None)
        monitor = checkpoint["monitor"] if is_named else _task_monitor(name, node, task)
        mode = checkpoint.get("mode", "auto") if is_named and mode == "auto" else mode
        node = {**node, "monitor": monitor}
    if mode == "auto":
        metric = str(monitor).rpartition("/")[2]
        is_known = monitor is None or monitor in task.metric_names or not task.logs_more
        require(
            is_known and metric not in task.undirected,
            f"callbacks.{name}.mode=auto: nothing says whether a higher {monitor} is better: set callbacks.{name}.mode "
            "to max or min.",
        )
        mode = "min" if metric in task.minimised else "max"
    return node if mode is None else {**node, "mode": mode}


def _task_monitor(name: str, node: dict[str, Any], task: Task) -> str | None:
    """Return the task's metric; None for the checkpoint callback of a task that declares no metrics."""
    if task.monitor:
        return task.monitor
    start = f"callbacks.{name}.monitor=auto: {type(task.driven).__name__} declares no metrics"
    is_checkpoint = canonical(str(node.get("_target_"))) == "lathe.callbacks.Checkpoint"
    require(is_checkpoint, f"{start}. Name one: callbacks.{name}.monitor=val_loss callbacks.{name}.mode=min.")
    rank_zero_only(print)(f"{start}, so best.ckpt is the last epoch.")
    return None


def make_methods(cfg: dict[str, Any]) -> list[Compression]:
    """Build the compression methods in their order, each with its window of the run."""
    group = cfg.get("compression") or {}
    shares = windows(group)
    built: list[Compression] = []
    for name, node in methods(group).items():
        node = {key: value for key, value in node.items() if key != "kind"}
        method: Compression = instantiate_as(node, f"compression.{name}", Compression)
        method.window = shares[name]
        if hasattr(method, "open_run"):
            from lathe.runs.inference import open_core  # for teachers only

            method.open_run = partial(open_core, key=f"compression.{name}.teacher")
        built.append(method)
    return built


def make_loggers(cfg: dict[str, Any], run_dir: Path, start_step: int) -> list[Logger]:
    """Build the loggers of `logger`, and last that of metrics.csv, which every run has.

    `start_step` is the optimizer step at which this process begins. A task's `self.logger` is the first.
    """
    nodes = {name: node for name, node in cfg["logger"].items() if node is not None}
    csv = nodes.pop("csv", {"_target_": "lathe.loggers.csv"})
    return [_make_logger(node, f"logger.{name}", run_dir, start_step) for name, node in [*nodes.items(), ("csv", csv)]]


def _make_logger(node: Any, key: str, run_dir: Path, start_step: int) -> Logger:
    """Build a logger: call a function with the run's directory and step, a class with `save_dir` if it takes one."""
    kind = locate(node)
    if not inspect.isclass(kind):
        logger: Logger = instantiate_as(node, key, Logger, run_dir, start_step)
        return logger
    if "save_dir" in inspect.signature(kind).parameters:
        node = {"save_dir": str(run_dir), **node}
    logger = instantiate_as(node, key, Logger)
    return logger


def trial_report(cfg: dict[str, Any], task: Task, sweep: dict[str, Any] | None) -> TrialReport | None:
    """Build the callback that reports validations to a search; None for a run that is not part of one.

    `sweep` has the sweep's folder and the job's number.
    """
    if sweep is None or sweep.get("job") is None:
        return None
    from lathe.runs.optuna_study import trial_of

    trial, _, options = trial_of(Path(sweep["folder"]), sweep["job"])
    monitor = cfg["objective"] or cfg["callbacks"].get("checkpoint", {}).get("monitor")
    monitor = task.monitor if monitor in (None, "auto") else monitor
    compares_runs = options.get("pruner", "none") != "none" and options.get("repeats") is None
    if not compares_runs or monitor is None:
        return None
    return TrialReport(trial if getattr(rank_zero_only, "rank", 0) == 0 else None, monitor)
