"""Tests the best checkpoint after training, and collects the final metrics for result.json."""

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lathe.callbacks import Checkpoint, numbers
from lathe.callbacks.module_access import is_based_on_lathe
from lathe.compression import Compression
from lathe.config.metric_names import directions, lower_is_better, split_of
from lathe.errors import did_you_mean
from lathe.loggers.csv_logger import Discard
from lathe.runs.build import make_task
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.rundir import RunDir
from lathe.tasks import Task
from lathe.tasks.core import is_foreign
from lathe.training.checkpoint_restore import RestoreOwnState
from lathe.training.trainer_setup import make_trainer, to_double


def evaluate_best(
    cfg: dict[str, Any], run: RunDir, trainer: Trainer, task: Task, datamodule: Any, callbacks: list[Callback]
) -> dict[str, Any]:
    """Test the best checkpoint, and return the final metrics, keyed by `split/metric` or by their own names.

    If no validation ran, the last weights become best.ckpt, and `best` says so.
    """
    compression = [callback for callback in callbacks if isinstance(callback, Compression)]
    checkpoint = next((c for c in callbacks if isinstance(c, Checkpoint)), None)
    needs_validation = any(getattr(callback, "needs_final_validation", False) for callback in callbacks)
    result: dict[str, Any] = {
        "steps": trainer.global_step,
        "devices": trainer.world_size,
        # unlike `current_epoch` it counts an epoch that max_steps has cut
        "epochs": trainer.fit_loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
    }
    tester, changed = trainer, False
    if checkpoint is None:
        reported = numbers(trainer.callback_metrics)
    else:
        state = _best_state(cfg, trainer, checkpoint, compression)
        reported = checkpoint.latest | checkpoint.best_metrics
        changed = bool(compression) and bool(state.get("finalised", False))
        if cfg["test"] or changed or needs_validation:
            if compression or getattr(trainer.strategy, "reshapes", False):  # the trained net can't take the weights
                task = make_task(cfg, train=False)
                to_double(task, cfg)
                testing = [callback for callback in callbacks if getattr(callback, "acts_in_final_test", False)]
                foreign = is_foreign(task.driven)  # its steps may ask a logger for more than numbers
                tester = make_trainer(
                    cfg, run.path, [*task.own_callbacks(), *testing], [Discard()] if foreign else None
                )
            restore(task.net, state, str(checkpoint.path("best")), finite=False)  # the result reports what isn't
            tester.callbacks.append(RestoreOwnState(state))  # type: ignore[attr-defined]  # a connector sets it
        if changed:
            tester.validate(task.driven, datamodule=datamodule, verbose=False)
            reported |= numbers(tester.callback_metrics)
        if compression:
            result |= {"parameters": sum(p.numel() for p in task.net.parameters()), **state.get("report", {})}
        result |= _describe_best(cfg, checkpoint, task, state, result["steps"], changed)
    if needs_validation and not changed:
        tester.validate(task, datamodule=datamodule, verbose=False)
    objective = _objective(cfg, result)
    result |= {name: value for name, value in reported.items() if not name.startswith("train/") or name == objective}
    if cfg["test"]:
        if tester is not trainer:
            _continue_from(tester, trainer, callbacks)
        tester.test(task.driven, datamodule=datamodule, verbose=False)
        result |= numbers(tester.callback_metrics)
    for callback in callbacks:
        if hasattr(callback, "result_names"):
            result |= callback.summary()  # type: ignore[attr-defined]
    for method in compression:
        result |= method.report()
    tags = {"tags": cfg["tags"]} if cfg.get("tags") else {}
    return {**result, "seed": cfg["seed"], "name": cfg["name"], **tags}


def _best_state(
    cfg: dict[str, Any], trainer: Trainer, checkpoint: Checkpoint, compression: list[Compression]
) -> dict[str, Any]:
    """Return the best checkpoint, after the compression methods that act on it."""
    best = checkpoint.path("best")
    if not best.exists():
        reason = "no validation ran" if checkpoint.best_score is None else "best.ckpt was not there"
        checkpoint.keep_newest(trainer, reason)
    if compression:
        if trainer.is_global_zero:
            from lathe.training.compression_finalize import finalize_compression  # most runs compress nothing

            finalize_compression(cfg, best, compression)
        trainer.strategy.barrier()
    return read_checkpoint(best)


def _describe_best(
    cfg: dict[str, Any], checkpoint: Checkpoint, task: Task, state: dict[str, Any], steps: int, changed: bool
) -> dict[str, Any]:
    """Return the step and the monitor of the best checkpoint, and notes if the monitor has not chosen it."""
    found: dict[str, Any] = {
        "best_step": int(state["global_step"]),
        "monitor": checkpoint.monitor,
        "directions": directions(task, checkpoint.monitor, checkpoint.mode),
    }
    if checkpoint.monitor is None and not changed and 0 <= checkpoint.validated_step < steps:
        found["notes"] = [
            f"The last validation was at step {checkpoint.validated_step} of {steps}, of other weights than the last, "
            "so its metrics are not here: validate at the end, or let callbacks.checkpoint.monitor choose."
        ]
    if checkpoint.monitor is not None and checkpoint.best_score is None:
        reason = checkpoint.unjudged or f"nothing reported {checkpoint.monitor}"
        initial = "the initial weights" if cfg.get("ckpt_path") is None else "the weights of ckpt_path"
        found["best"] = f"the last weights, {reason}" if steps else f"{initial}, nothing was trained"
    return found


def _continue_from(tester: Trainer, trained: Trainer, callbacks: list[Callback]) -> None:
    """Give a new Trainer the step, the loggers and the user's callbacks of the one that has trained.

    Lathe's callbacks act on the net that was trained.
    """
    present: list[Callback] = tester.callbacks  # type: ignore[attr-defined]  # a connector sets it
    present[:0] = [callback for callback in callbacks if not is_based_on_lathe(callback)]
    tester.loggers = trained.loggers
    tester.fit_loop.load_state_dict(trained.fit_loop.state_dict())


def add_objective(cfg: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Add the metric that a sweeper optimises as `objective`, replace what is not finite by None, and explain both in
    `notes`.
    """
    wild = sorted(name for name, value in result.items() if isinstance(value, float) and not math.isfinite(value))
    result = {name: None if name in wild else value for name, value in result.items()}
    name = _objective(cfg, result)
    result["objective"] = result.get(name) if name else None
    notes = list(result.get("notes", []))
    if not name:
        logged = sorted((key for key in result if split_of(key) == "val"), key=lower_is_better)
        example = f", such as callbacks.checkpoint.monitor={logged[0]}" if logged else ""
        notes.append(f"objective is null: name its metric by objective or callbacks.checkpoint.monitor{example}.")
    elif result["objective"] is None:
        reason = "it is not finite" if name in wild else _why_missing(name, result)
        notes.append(f"objective is null: there is no {name}, {reason}; a sweeper that optimises gets no number")
    if wild:
        notes.append(f"Not finite, and null in result.json: {', '.join(wild)}.")
    return {**result, "notes": notes} if notes else result


def _objective(cfg: dict[str, Any], result: dict[str, Any]) -> str | None:
    return cfg["objective"] or result.get("monitor")


def _why_missing(name: str, result: dict[str, Any]) -> str:
    if "best" in result:
        return str(result["best"]).partition(", ")[2]
    return f"nothing reported it; {did_you_mean(name, [key for key in result if '/' in key])}".rstrip("; ")
