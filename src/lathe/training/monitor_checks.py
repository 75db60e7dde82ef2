"""Checks that the metrics which callbacks monitor, and the objective, are reported by the run."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback, EarlyStopping

from lathe.callbacks.ownership import is_users
from lathe.config.compression_plan import methods
from lathe.errors import UserError, did_you_mean, require

COUNTS = ("parameters", "best_step", "epochs", "steps", "seed", "devices", "seconds")


def check_metric_names(cfg: dict[str, Any], task: Any, callbacks: Sequence[Callback]) -> None:
    """Compare the monitors and the objective with the metrics that the task declares and the run adds.

    A user's task or callback may log any name. Early stopping then looks for it after the first validation.
    """
    declared: list[str] = list(getattr(task, "metric_names", []))
    any_name = getattr(task, "logs_more", True) or any(map(is_users, callbacks))
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            _check_monitor(cfg, callback, monitor, None if any_name else declared)
    objective = cfg["objective"]
    if objective is None:
        return
    require(isinstance(objective, str), f"objective={objective}: give a metric's name, such as val/accuracy, or null.")
    require(
        cfg["test"] or not objective.startswith("test/"),
        f"objective={objective} needs the test that test=false leaves out.",
    )
    known = [*declared, *COUNTS]
    for callback in callbacks:
        if hasattr(callback, "result_names"):
            known += callback.result_names(task)
    of_method = objective.partition("/")[0] in methods(cfg.get("compression") or {})  # its reports depend on the net
    require(
        any_name or of_method or objective in known,
        f"objective={objective}: the run reports no such metric; {did_you_mean(objective, known)}",
    )


def _check_monitor(cfg: dict[str, Any], callback: Callback, monitor: str, declared: list[str] | None) -> None:
    """Raise UserError if a callback can't monitor `monitor`; with `declared` None any name may be logged."""
    name = _callback_name(cfg, callback)
    key = f"callbacks.{name}.monitor={monitor}"
    require(
        not monitor.startswith("test/"),
        f"{key}: the test split is evaluated once, after training; monitor a metric of val.",
    )
    if declared is not None:
        known = [metric for metric in declared if not metric.startswith("test/")]
        require(monitor in known, f"{key}: the task reports no such metric; {did_you_mean(monitor, known)}")
    if isinstance(callback, EarlyStopping) and not callback._check_on_train_epoch_end:
        require(
            not monitor.startswith("train/"),
            f"{key} is known at the end of a training epoch: add callbacks.{name}.check_on_train_epoch_end=true.",
        )
        require(
            cfg["trainer"]["limit_val_batches"] != 0,
            f"{key} is looked at after a validation, and trainer.limit_val_batches=0 leaves them out: drop one of the "
            "two.",
        )


def unreported_monitor(
    cfg: dict[str, Any], callbacks: Sequence[Callback], message: str, reported: Iterable[str]
) -> UserError:
    """Return the error for early stopping whose monitor is not `reported`; `message` is Lightning's."""
    monitor = message.partition("`")[2].partition("`")[0]
    stops = [callback for callback in callbacks if isinstance(callback, EarlyStopping) and callback.monitor == monitor]
    name = _callback_name(cfg, stops[0]) if stops else "early_stopping"
    if (cfg["callbacks"].get(name) or {}).get("monitor") == "auto":
        name = "checkpoint"  # whose monitor it takes
    when = "training epoch" if stops and stops[0]._check_on_train_epoch_end else "validation"
    hint = did_you_mean(monitor, [metric for metric in reported if not metric.startswith("lr-")])
    end = f"; {hint}" if hint else "."
    return UserError(f"callbacks.{name}.monitor={monitor}: nothing has reported it by the end of a {when}{end}")


def _callback_name(cfg: dict[str, Any], callback: Callback) -> str:
    """Return the key of a callback below `callbacks`, or the name of its class if it has none."""
    kind, monitor = type(callback).__name__, getattr(callback, "monitor", None)
    nodes = {name: node for name, node in cfg["callbacks"].items() if isinstance(node, dict)}
    same = [name for name, node in nodes.items() if str(node.get("_target_")).rpartition(".")[2] == kind]
    return next((name for name in same if nodes[name].get("monitor") == monitor), same[0] if same else kind)
