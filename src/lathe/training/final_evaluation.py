"""The end of a run: test the best checkpoint, write the result, print it, and say what to try next."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console
from rich.table import Table

import lathe.loggers
from lathe.callbacks import Checkpoint, TrialReport, numbers
from lathe.callbacks.module_access import is_based_on_lathe
from lathe.compression import Compression
from lathe.config.compression_plan import methods
from lathe.config.metric_names import directions, lower_is_better, split_of
from lathe.config.resolve import flatten
from lathe.errors import did_you_mean
from lathe.loggers.csv_logger import CSVLogger, Discard
from lathe.runs.build import make_task
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.instantiate import locate
from lathe.runs.rundir import (
    RunDir,
    display_path,
    drop_overrides,
    quote_value,
    rerun_overrides,
    script_path,
    train_command,
)
from lathe.tasks import Task
from lathe.tasks.core import is_foreign
from lathe.training.checkpoint_restore import RestoreOwnState
from lathe.training.trainer_setup import make_trainer, to_double


def evaluate_best(
    cfg: dict[str, Any], run: RunDir, trainer: Trainer, task: Task, datamodule: Any, callbacks: list[Callback]
) -> dict[str, Any]:
    """Test the best checkpoint, and return the final metrics, keyed by `split/metric` or by their own names.

    If no validation ran, the last weights become best.ckpt, and `best` says so. A run that its search has ended is not
    tested.
    """
    compression = [callback for callback in callbacks if isinstance(callback, Compression)]
    checkpoint = next((callback for callback in callbacks if isinstance(callback, Checkpoint)), None)
    needs_validation = any(getattr(callback, "needs_final_validation", False) for callback in callbacks)
    pruned = next((callback.pruned for callback in callbacks if isinstance(callback, TrialReport)), None)
    tests = cfg["test"] and pruned is None
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
        state = _complete_best(cfg, trainer, checkpoint, compression)
        reported = checkpoint.latest | checkpoint.best_metrics
        changed = bool(compression) and bool(state.get("finalised", False))
        if tests or changed or needs_validation:
            task, tester = _load_best(cfg, run, trainer, task, state, callbacks)
        if changed:
            tester.validate(task.driven, datamodule=datamodule, verbose=False)
            reported |= numbers(tester.callback_metrics)
        if compression:
            result |= {"parameters": sum(p.numel() for p in task.net.parameters()), **state.get("report", {})}
        result |= _describe_best(cfg, checkpoint, task, state, result["steps"], changed)
    if needs_validation and not changed:
        tester.validate(task, datamodule=datamodule, verbose=False)
    objective = cfg["objective"] or result.get("monitor")
    result |= {name: value for name, value in reported.items() if not name.startswith("train/") or name == objective}
    if tests:
        if tester is not trainer:  # it gets the step, the loggers and the user's callbacks of the one that has trained
            tester_callbacks: list[Callback] = tester.callbacks  # type: ignore[attr-defined]
            tester_callbacks[:0] = [callback for callback in callbacks if not is_based_on_lathe(callback)]
            tester.loggers = trainer.loggers
            tester.fit_loop.load_state_dict(trainer.fit_loop.state_dict())
        tester.test(task.driven, datamodule=datamodule, verbose=False)
        result |= numbers(tester.callback_metrics)
    for callback in callbacks:
        if hasattr(callback, "result_names"):
            result |= callback.summary()  # type: ignore[attr-defined]
    for method in compression:
        result |= method.report()
    result |= {"seed": cfg["seed"], "name": cfg["name"], **({"tags": cfg["tags"]} if cfg.get("tags") else {})}
    return result if pruned is None else {**result, "pruned": pruned}


def _complete_best(
    cfg: dict[str, Any], trainer: Trainer, checkpoint: Checkpoint, compression: list[Compression]
) -> dict[str, Any]:
    """Write best.ckpt if it is missing, apply the compression methods that act after training, and return it."""
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


def _load_best(
    cfg: dict[str, Any], run: RunDir, trainer: Trainer, task: Task, state: dict[str, Any], callbacks: list[Callback]
) -> tuple[Task, Trainer]:
    """Return a task with the weights of best.ckpt, and the Trainer to evaluate it: new ones if the trained net can't
    take these weights.
    """
    tester = trainer
    compresses = any(isinstance(callback, Compression) for callback in callbacks)
    if compresses or getattr(trainer.strategy, "reshapes", False):
        task = make_task(cfg, train=False)
        to_double(task, cfg)
        testing = [callback for callback in callbacks if getattr(callback, "acts_in_final_test", False)]
        loggers: Any = [Discard()] if is_foreign(task.driven) else None  # its steps may ask a logger for more
        tester = make_trainer(cfg, run.path, [*task.own_callbacks(), *testing], loggers)
    restore(task.net, state, str(run.best), finite=False)  # the result reports what isn't
    tester.callbacks.append(RestoreOwnState(state))  # type: ignore[attr-defined]  # a connector sets it
    return task, tester


def _describe_best(
    cfg: dict[str, Any], checkpoint: Checkpoint, task: Task, state: dict[str, Any], steps: int, changed: bool
) -> dict[str, Any]:
    """Return the step and the monitor of the best checkpoint, and notes if the monitor has not chosen it."""
    facts: dict[str, Any] = {
        "best_step": int(state["global_step"]),
        "monitor": checkpoint.monitor,
        "directions": directions(task, checkpoint.monitor, checkpoint.mode),
    }
    if checkpoint.monitor is None and not changed and 0 <= checkpoint.validated_step < steps:
        facts["notes"] = [
            f"The last validation was at step {checkpoint.validated_step} of {steps}, of other weights than the last, "
            "so its metrics are not here: validate at the end, or let callbacks.checkpoint.monitor choose."
        ]
    if checkpoint.monitor is not None and checkpoint.best_score is None:
        reason = checkpoint.unjudged or f"nothing reported {checkpoint.monitor}"
        initial = "the initial weights" if cfg.get("ckpt_path") is None else "the weights of ckpt_path"
        facts["best"] = f"the last weights, {reason}" if steps else f"{initial}, nothing was trained"
    return facts


def add_objective(cfg: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Add the metric that a sweeper optimises as `objective`, replace what is not finite by None, and explain both in
    `notes`.
    """
    wild = sorted(name for name, value in result.items() if isinstance(value, float) and not math.isfinite(value))
    result = {name: None if name in wild else value for name, value in result.items()}
    name = cfg["objective"] or result.get("monitor")
    result["objective"] = result.get(name) if name else None
    notes = list(result.get("notes", []))
    if not name:
        logged = sorted((key for key in result if split_of(key) == "val"), key=lower_is_better)
        example = f", such as objective={logged[0]}" if logged else ""
        notes.append(f"objective is null: name its metric by objective or callbacks.checkpoint.monitor{example}.")
    elif result["objective"] is None:
        if name in wild:
            reason = "it is not finite"
        elif "best" in result:
            reason = str(result["best"]).partition(", ")[2]
        else:
            hint = did_you_mean(name, [key for key in result if "/" in key])
            reason = f"nothing reported it; {hint}".rstrip("; ")
        notes.append(f"objective is null: there is no {name}, {reason}; a sweeper that optimises gets no number")
    if wild:
        notes.append(f"Not finite, and null in result.json: {', '.join(wild)}.")
    return {**result, "notes": notes} if notes else result


def report_result(
    cfg: dict[str, Any],
    run: RunDir,
    trainer: Trainer,
    result: dict[str, Any],
    callbacks: list[Callback],
    loggers: list[Logger],
    ended: str,
) -> None:
    """Log and write the result, print the summary with why training `ended`, and measure the receipt."""
    compression = [callback for callback in callbacks if isinstance(callback, Compression)]
    idle = [type(method).__name__ for method in compression if trainer.global_step == 0 and not method.ready(trainer)]
    if idle:
        rank_zero_warn(f"compression: no optimizer step was made, so {' and '.join(idle)} had nothing to do.")
    pages = [page for callback in callbacks if (page := getattr(callback, "page", None)) is not None]
    for logger in (logger for logger in loggers if not isinstance(logger, CSVLogger)):  # the run directory has it all
        for page in pages:
            lathe.loggers.log_page(logger, page)
        lathe.loggers.log_result(logger, result, run.best)
    if trainer.is_global_zero:
        run.finish(result)
        print_summary(result, run, ended=ended)
        if compression and "pruned" not in result and cfg["compression"]["receipt"] != "none":
            from lathe.training.compression_finalize import write_receipt

            write_receipt(run, cfg)
        print_next(run, proposals(run, cfg, result))


def end_reason(cfg: dict[str, Any], trainer: Trainer) -> str:
    """Return why training ended before its last epoch, such as `stopped by early_stopping at epoch 3 of 8`, or ""."""
    step, last = trainer.global_step, trainer.max_epochs
    done: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    if step == 0 or done == last:
        return ""
    at = f"at epoch {done}" + (f" of {last}" if last not in (None, -1) else "")
    if step == trainer.max_steps:
        return f"trainer.max_steps={step} reached {at}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # a connector sets it
        is_early = isinstance(callback, EarlyStopping) and callback.stopping_reason_message is not None
        if is_early and callback.stopped_epoch == done - 1:
            names = [name for name, node in cfg["callbacks"].items() if locate(node) is type(callback)]
            return f"stopped by {names[0] if names else type(callback).__name__} {at}"
        remaining = callback.time_remaining() if isinstance(callback, Timer) else None
        if remaining is not None and remaining <= 0:
            return f"trainer.max_time={cfg['trainer']['max_time']} reached {at}"
    return f"stopped {at}"


def print_summary(result: dict[str, Any], run: RunDir, console: Console | None = None, ended: str = "") -> None:
    """Print the final metrics of `run`, why it `ended` early if it did, and its directory."""
    console = console or Console()
    table = Table(show_header=False)
    names = _of_split(result, "test") or _of_split(result, "val")
    for name in names:
        table.add_row(name, _format(result[name]))
    monitor = result.get("monitor")  # that has chosen best.ckpt
    if monitor in result and monitor not in names:
        table.add_row(monitor, _format(result[monitor]))
    for name in sorted(key for key in result if "/" in key and split_of(key) is None):
        table.add_row(name, _format(result[name]))  # reports of compression and of the user's callbacks
    if "best" in result:
        table.add_row("best", result["best"])
    table.add_row("parameters", f"{result['parameters']:,}")
    if result.get("samples_per_s"):
        table.add_row("samples/s", f"{result['samples_per_s']:,.0f}")
    if result.get("epoch_s"):
        table.add_row("seconds per epoch (median)", f"{result['epoch_s']:.2f}")
    for name, title in (("peak_gpu_bytes", "peak memory, GPU"), ("peak_resident_bytes", "peak memory, resident")):
        if result.get(name):
            table.add_row(title, f"{result[name] / 2**30:.2f} GiB")
    table.add_row("seconds", f"{result['seconds']:.1f}")
    title = f"Run complete: {ended}" if ended else "Run complete"
    console.print(title, style="italic", soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for note in (f"Run directory: {display_path(run.path)}", *result.get("notes", [])):
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def print_next(run: RunDir, commands: list[str], console: Console | None = None) -> None:
    """Print the pages that `run` has written, and commands to try next."""
    console = console or Console()
    pages = [f"Samples page: {display_path(page)}" for page in sorted(run.path.glob("samples/*.html"))]
    for line in (*pages, "Next:", *(f"  {command}" for command in commands)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _of_split(result: Mapping[str, Any], split: str) -> list[str]:
    return sorted(name for name in result if split_of(name) == split)


def _format(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def proposals(run: RunDir, cfg: dict[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return commands to try after `run`: evaluate if its `result` has metrics of a validation, export if compressed,
    train with half the learning rate and with other seeds, report, and open its loggers' files.
    """
    overrides = rerun_overrides(run.overrides if (run.path / "overrides.yaml").is_file() else [], flatten(cfg))
    directory = display_path(run.path)
    evaluate = ["python", script_path("scripts/evaluate.py"), f"run={quote_value(directory)}", "split=val"]
    validated = _of_split(result, "val")
    commands = [*([evaluate] if validated else []), *_exports(run, cfg)] if run.best.exists() else []
    rate = cfg["optimizer"].get("lr")
    if isinstance(rate, (int, float)):
        commands.append([*train_command(), *drop_overrides(overrides, "optimizer.lr"), f"optimizer.lr={rate / 2:g}"])
    commands.append([*train_command(), "-m", *drop_overrides(overrides, "seed"), "seed=1,2,3"])
    commands.append(_report(run))
    if any(run.path.rglob("events.out.tfevents.*")):
        commands.append(["tensorboard", "--logdir", directory])
    if offline := sorted(run.path.glob("wandb/offline-run-*")):
        commands.append(["wandb", "sync", *(display_path(part) for part in offline)])
    return [shlex.join(command) for command in commands]


def proposals_after_compress(run: RunDir, cfg: dict[str, Any]) -> list[str]:
    """Return commands to try after scripts/compress.py has made `run`."""
    return [shlex.join(command) for command in (*_exports(run, cfg), _report(run))]


def _exports(run: RunDir, cfg: dict[str, Any]) -> list[list[str]]:
    """Return the command that exports a compressed run."""
    kinds = {node["kind"] for node in methods(cfg.get("compression") or {}).values()}
    target = "onnx_int8" if {"quantization", "after"} & kinds else "onnx"
    run_word = f"run={quote_value(display_path(run.path))}"
    return [["python", script_path("scripts/export.py"), run_word, f"target={target}"]] if kinds else []


def _report(run: RunDir) -> list[str]:
    return ["python", script_path("scripts/report.py"), f"runs={quote_value(display_path(run.path.parent))}"]
