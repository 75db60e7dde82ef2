"""The end of a run: its best checkpoint is tested once, and the final metrics are gathered, however the run has
ended.
"""

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lathe.callbacks import Checkpoint, Compression, DeviceStats, Progress, Samples, Throughput, numbers
from lathe.config.metric_split import split_of
from lathe.config.sweep_direction import lower_is_better
from lathe.errors import did_you_mean
from lathe.runs import rundir
from lathe.runs.build import make_task
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.metric_names import directions
from lathe.runs.restored import Restored
from lathe.runs.trainer import make_trainer, widen
from lathe.tasks import Task
from lathe.verbs.finalise import finalise


def finish(
    cfg: dict[str, Any], run: rundir.RunDir, trainer: Trainer, task: Task, datamodule: Any, callbacks: list[Callback]
) -> dict[str, Any]:
    """Tests the best checkpoint and gathers the final metrics, keyed by `split/metric` or by their own names.

    A run that nothing has judged (no validation ran, no step was trained) is tested with the weights that it has, which
    become best.ckpt; `best` says so then.

    A strategy that `reshapes` the net leaves nothing that takes plain weights, and compression may have changed the
    best ones after training: a new net is built then.
    """
    made = [callback for callback in callbacks if isinstance(callback, Compression)]
    checkpoint = next((c for c in callbacks if isinstance(c, Checkpoint)), None)
    looks = any(isinstance(callback, Samples) and callback.split == "val" for callback in callbacks)
    trained = trainer
    result: dict[str, Any] = {"steps": trainer.global_step, "devices": trainer.world_size}
    # not `current_epoch`: an epoch that max_steps has cut counts as well, also when the run is only brought to its end
    # here
    result["epochs"] = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    reported = numbers(trainer.callback_metrics) if checkpoint is None else checkpoint.latest
    if checkpoint is not None:
        best = checkpoint.path("best")
        if not best.exists():
            checkpoint.keep_newest(
                trainer, "no validation ran" if checkpoint.best_score is None else "best.ckpt was not there"
            )
        reported = reported | checkpoint.best_metrics
        changed = False
        if made:
            if trainer.is_global_zero:
                finalise(cfg, best, made)
            trainer.strategy.barrier()
            changed = bool(read_checkpoint(best).get("finalised", False))
        state = read_checkpoint(best)
        if cfg["test"] or changed or looks:
            if made or getattr(trainer.strategy, "reshapes", False):
                task = make_task(cfg, train=False)
                widen(task, cfg)
                trainer = make_trainer(cfg, run.path, [c for c in callbacks if isinstance(c, (Progress, Samples))])
            restore(task.net, state, str(best), finite=False)  # what is not finite is told with the result
            trainer.callbacks.append(Restored(state))  # type: ignore[attr-defined]  # a connector sets it
        if changed:
            trainer.validate(task.driven, datamodule=datamodule, verbose=False)
            reported |= numbers(trainer.callback_metrics)
        if made:
            result |= {"parameters": sum(p.numel() for p in task.net.parameters()), **state.get("report", {})}
        result |= {"best_step": int(state["global_step"]), "monitor": checkpoint.monitor}
        result["directions"] = directions(task, checkpoint.monitor, checkpoint.mode)
        if checkpoint.monitor is None and not changed and 0 <= checkpoint.validated_step < result["steps"]:
            result["notes"] = [
                f"The last validation was at step {checkpoint.validated_step} of {result['steps']}, of other weights "
                "than the last, so its metrics are not here: validate at the end, or let callbacks.checkpoint.monitor "
                "choose."
            ]
        if checkpoint.monitor is not None and checkpoint.best_score is None:
            reason = checkpoint.unjudged or f"nothing reported {checkpoint.monitor}"
            given = "the initial weights" if cfg.get("ckpt_path") is None else "the weights of ckpt_path"
            result["best"] = f"the last weights, {reason}" if result["steps"] else f"{given}, nothing was trained"
    if looks and not (checkpoint is not None and changed):
        trainer.validate(task, datamodule=datamodule, verbose=False)
    result |= {
        name: value
        for name, value in reported.items()
        if not name.startswith("train/") or name == _objective(cfg, result)
    }
    if cfg["test"]:
        if trainer is not trained:
            _take_over(trainer, trained, callbacks)
        trainer.test(task.driven, datamodule=datamodule, verbose=False)
        result |= numbers(trainer.callback_metrics)
    for callback in callbacks:
        if isinstance(callback, (Throughput, DeviceStats)):
            result |= callback.summary()
    for method in made:
        result |= method.report()
    tags = {"tags": cfg["tags"]} if cfg.get("tags") else {}
    return {**result, "seed": cfg["seed"], "name": cfg["name"], **tags}


def _take_over(tester: Trainer, trained: Trainer, callbacks: list[Callback]) -> None:
    """Has a new Trainer test as the one that has trained would have: at its step, for its loggers and for the callbacks
    of the user's own. Those of Lathe act on the net that was trained."""
    own = [one for one in callbacks if not any(kind.__module__.startswith("lathe.") for kind in type(one).__mro__)]
    present: list[Callback] = tester.callbacks  # type: ignore[attr-defined]  # a connector sets it
    present[:0] = own
    tester.loggers = trained.loggers
    tester.fit_loop.load_state_dict(trained.fit_loop.state_dict())


def _objective(cfg: dict[str, Any], result: dict[str, Any]) -> str | None:
    return cfg["objective"] or result.get("monitor")


def conclude(cfg: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The final metrics with the one that a sweeper optimises as `objective`. What is not finite becomes None, since
    JSON has no word for it, and `notes` says in a sentence each what a reader would miss."""
    wild = sorted(name for name, value in result.items() if isinstance(value, float) and not math.isfinite(value))
    result = {name: None if name in wild else value for name, value in result.items()}
    name = _objective(cfg, result)
    result["objective"] = result.get(name) if name else None
    notes = list(result.get("notes", []))
    if not name:
        notes.append(_nameless(cfg, result))
    elif result["objective"] is None:
        reason = "it is not finite" if name in wild else _why(name, result)
        notes.append(f"objective is null: there is no {name}, {reason}; a sweeper that optimises gets no number")
    if wild:
        notes.append(f"Not finite, and null in result.json: {', '.join(wild)}.")
    return {**result, "notes": notes} if notes else result


def _nameless(cfg: dict[str, Any], result: dict[str, Any]) -> str:
    """Why no metric is named as the objective, and which could be."""
    trainer = cfg["trainer"]
    off = "fast_dev_run" if trainer.get("fast_dev_run") else "enable_checkpointing"
    left_out = trainer.get("fast_dev_run") or trainer.get("enable_checkpointing") is False
    monitor = ((cfg.get("callbacks") or {}).get("checkpoint") or {}).get("monitor")
    if left_out and monitor:
        name = "objective=val/loss, say," if monitor == "auto" else f"objective={monitor}"
        return (
            f"objective is null: trainer.{off}={str(trainer[off]).lower()} leaves callbacks.checkpoint out, and with "
            f"it the metric that it monitors: {name} names one."
        )
    logged = sorted((name for name in result if split_of(name) == "val"), key=lower_is_better)
    if monitor == "auto" and logged:
        way = "min" if lower_is_better(logged[0]) else "max"
        return (
            f"No monitor: best.ckpt is the last epoch. The module logs {', '.join(logged[:5])}: add "
            f"callbacks.checkpoint.monitor={logged[0]} callbacks.checkpoint.mode={way}."
        )
    return "objective is null: neither objective nor the monitor of callbacks.checkpoint names a metric."


def _why(name: str, result: dict[str, Any]) -> str:
    if "best" in result:
        return str(result["best"]).partition(", ")[2]
    return f"nothing reported it; {did_you_mean(name, [key for key in result if '/' in key])}".rstrip("; ")
