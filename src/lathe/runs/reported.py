"""The names that a run can report: what a callback may monitor, and what may be its objective."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback, EarlyStopping

from lathe.callbacks import DeviceStats, Throughput
from lathe.config.compression_plan import methods
from lathe.errors import UserError, did_you_mean, require

COUNTS = ("parameters", "best_step", "epochs", "steps", "seed", "devices", "seconds")
RATES = ("step_ms", "data_wait", "grad_sync", "mfu", "epoch_s", "peak_gpu_bytes", "peak_resident_bytes")
ENERGY = ("energy_gpu_j", "energy_cpu_j")


def check_names(cfg: dict[str, Any], task: Any, callbacks: Sequence[Callback]) -> None:
    """Holds the monitors of `callbacks` and the objective against what the task declares and the run itself adds. A
    task or a callback of the user's own may log any name: then what nobody declares is looked for at the end of the
    first epoch with a validation.

    Raises:
        UserError: no part can report a name, or not while training goes on.
    """
    declared: list[str] = list(getattr(task, "metric_names", []))
    own = [part for part in callbacks if not type(part).__module__.startswith(("lathe.", "lightning."))]
    free = bool(own) or getattr(task, "logs_more", True)
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str):
            continue
        key = f"callbacks.{_name(cfg, callback)}.monitor={monitor}"
        require(
            not monitor.startswith("test/"),
            f"{key}: the test split is evaluated once, after training; monitor a metric of val.",
        )
        known = [name for name in declared if not name.startswith("test/")]
        require(free or monitor in known, f"{key}: the task reports no such metric; {did_you_mean(monitor, known)}")
        if isinstance(callback, EarlyStopping) and not callback._check_on_train_epoch_end:
            require(
                not monitor.startswith("train/"),
                f"{key} is known at the end of a training epoch: add callbacks."
                f"{_name(cfg, callback)}.check_on_train_epoch_end=true.",
            )
            require(
                cfg["trainer"]["limit_val_batches"] != 0,
                f"{key} is looked at after a validation, and trainer.limit_val_batches=0 leaves them out: drop one "
                "of the two.",
            )
    objective = cfg["objective"]
    if objective is None:
        return
    require(isinstance(objective, str), f"objective={objective}: give a metric's name, such as val/accuracy, or null.")
    require(
        cfg["test"] or not objective.startswith("test/"),
        f"objective={objective} needs the test that test=false leaves out.",
    )
    rates = (
        (f"{getattr(task, 'unit', 'samples')}_per_s", *RATES)
        if any(isinstance(c, Throughput) for c in callbacks)
        else ()
    )
    energy = ENERGY if any(isinstance(c, DeviceStats) for c in callbacks) else ()
    known = [*declared, *COUNTS, *rates, *energy]
    made = objective.partition("/")[0] in methods(cfg.get("compression") or {})  # what it reports depends on the net
    require(
        free or made or objective in known,
        f"objective={objective}: the run reports no such metric; {did_you_mean(objective, known)}",
    )


def not_reported(cfg: dict[str, Any], callbacks: Sequence[Callback], said: str, reported: Iterable[str]) -> UserError:
    """The sentence for early stopping that has not found its monitor among the `reported` names, and has `said` so in
    Lightning's words.
    """
    monitor = said.partition("`")[2].partition("`")[0]
    stops = [callback for callback in callbacks if isinstance(callback, EarlyStopping) and callback.monitor == monitor]
    key = _name(cfg, stops[0]) if stops else "early_stopping"
    if (cfg["callbacks"].get(key) or {}).get("monitor") == "auto":
        key = "checkpoint"  # whose monitor it follows
    when = "training epoch" if stops and stops[0]._check_on_train_epoch_end else "validation"
    known = [name for name in reported if not name.startswith("lr-")]
    hint = did_you_mean(monitor, known)
    return UserError(
        f"callbacks.{key}.monitor={monitor}: nothing has reported it by the end of a "
        f"{when}{'; ' + hint if hint else '.'}"
    )


def _name(cfg: dict[str, Any], callback: Callback) -> str:
    """The key under `callbacks` that `callback` was made from; its class's name if there is none."""
    kind, monitor = type(callback).__name__, getattr(callback, "monitor", None)
    nodes = {name: node for name, node in cfg["callbacks"].items() if isinstance(node, dict)}
    same = [name for name, node in nodes.items() if str(node.get("_target_")).rpartition(".")[2] == kind]
    return next((name for name in same if nodes[name].get("monitor") == monitor), same[0] if same else kind)
