"""The beginning of training: checks before it, Lightning's errors under our keys, and an end by Ctrl-C or a signal."""

import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe import data, loggers
from lathe.callbacks import Preemption
from lathe.callbacks.module_access import is_users
from lathe.config.compression_plan import methods
from lathe.config.resolve import flatten
from lathe.config.schema import with_keys
from lathe.data.base import ExactDataModule
from lathe.errors import Stopped, UserError, did_you_mean, require
from lathe.loggers import CSVLogger, main_facts, run_facts
from lathe.runs.rundir import RunDir, point_latest, run_command
from lathe.tasks import Task
from lathe.training.trainer_setup import OWN_CHECKPOINTS, describe_device

COUNTS = ("parameters", "best_step", "epochs", "steps", "seed", "devices", "seconds")
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
SAME_PRESS_S = 1.0  # seconds within which a second Ctrl-C counts as the first


def check_components(
    cfg: dict[str, Any], datamodule: LightningDataModule, task: Task, callbacks: Sequence[Callback]
) -> None:
    """Raise UserError before training for what the task, the data or the monitors can't do; warn if the run replaces
    the default callbacks and so has no checkpoints.
    """
    task.check_run(cfg)
    check_loaders(cfg, datamodule, task.driven)
    check_metric_names(cfg, task, callbacks)
    task.check_facts(cfg["data"])
    names, options = cfg["callbacks"], cfg["trainer"]
    wants_checkpoints = options["enable_checkpointing"] and not options["fast_dev_run"]
    has_checkpoints = any(isinstance(callback, Checkpoint) for callback in callbacks)
    if names and "checkpoint" not in names and wants_checkpoints and not has_checkpoints:
        rank_zero_warn(
            "No checkpoint callback: this run can't be resumed or evaluated. "
            f"callbacks=[default,{','.join(names)}] keeps one."
        )


def check_loaders(cfg: dict[str, Any], datamodule: LightningDataModule, module: LightningModule) -> None:
    """Raise UserError before training if a loader is missing, which Lightning notices when it needs it, or not read."""
    is_ours = isinstance(datamodule, ExactDataModule)
    owner = module if not is_ours and isinstance(datamodule, data.ModuleDataModule) else datamodule
    name = f"data: {type(owner).__name__} has no"
    require(is_overridden("train_dataloader", owner), f"{name} train_dataloader: write one.")
    require(
        not cfg["test"] or is_overridden("test_dataloader", owner),
        f"{name} test_dataloader: write one, or add test=false.",
    )
    unread = [hook for hook in LOADERS if owner is not module and is_overridden(hook, module)]
    require(
        not unread,
        f"data: {type(module).__name__}.{unread[0] if unread else ''} is not used. Add data=module, or move it to a "
        "LightningDataModule, data={_target_: mine.Data}.",
    )


def check_metric_names(cfg: dict[str, Any], task: Task, callbacks: Sequence[Callback]) -> None:
    """Compare the monitors and the objective with the metrics that the task declares and the run adds.

    A user's task or callback may log any name. Early stopping then looks for it after the first validation.
    """
    declared, any_name = task.metric_names, task.logs_more or any(map(is_users, callbacks))
    for callback in callbacks:
        if isinstance(monitor := getattr(callback, "monitor", None), str):
            kind = type(callback).__name__
            nodes = {name: node for name, node in cfg["callbacks"].items() if isinstance(node, dict)}
            same = [name for name, node in nodes.items() if str(node.get("_target_")).rpartition(".")[2] == kind]
            same.sort(key=lambda name: nodes[name].get("monitor") != monitor)
            key = f"callbacks.{same[0] if same else kind}.monitor={monitor}"
            known = [name for name in declared if not name.startswith("test/")]
            require(not monitor.startswith("test/"), f"{key}: the test split is evaluated after training; monitor val.")
            is_known = any_name or monitor in known
            require(is_known, f"{key}: the task reports no such metric; {did_you_mean(monitor, known)}")
            waits = isinstance(callback, EarlyStopping) and not callback._check_on_train_epoch_end
            require(
                not waits or cfg["trainer"]["limit_val_batches"] != 0,
                f"{key} is looked at after a validation, and trainer.limit_val_batches=0 leaves them out: drop one.",
            )
    objective = cfg["objective"]
    if objective is None:
        return
    needs_test = not cfg["test"] and objective.startswith("test/")
    require(not needs_test, f"objective={objective} needs the test that test=false leaves out.")
    added = [
        name for callback in callbacks if hasattr(callback, "result_names") for name in callback.result_names(task)
    ]
    known = [*declared, *COUNTS, *added]
    of_method = objective.partition("/")[0] in methods(cfg.get("compression") or {})  # its reports depend on the net
    is_known = any_name or of_method or objective in known
    require(is_known, f"objective={objective}: the run reports no such metric; {did_you_mean(objective, known)}")


class RunStart(Callback):
    """Record on disk and in the loggers that data and devices are ready and training begins.

    Until then the directory of a run that fails is removed.
    """

    def __init__(self, run: RunDir, cfg: dict[str, Any], first_step: int, monitor: str | None) -> None:
        self.run, self.cfg, self.first_step, self.monitor = run, cfg, first_step, monitor
        self.begun = self.interrupted = False
        self.callbacks: list[Callback] = []  # of the run
        self.command = run_command("train.py", "resume", run.path)  # continues the run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:  # would use the first logger's
                callback.dirpath = str(self.run.path / OWN_CHECKPOINTS)
        for own in self.callbacks:
            if stage == "fit" and own not in trainer.callbacks:  # type: ignore[attr-defined]
                kind, module = type(own).__name__, type(pl_module).__name__
                rank_zero_warn(f"callbacks: a {kind} of {module}.configure_callbacks takes the place of the run's own.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.begun:
            return
        self.begun = True
        facts, tags = run_facts(flatten(self.cfg)), self.cfg.get("tags") or []
        compression = ",".join(methods(self.cfg.get("compression") or {}))  # Hydra does not record choices of a list
        choices = {"compression": compression or None} | self.run.environment.get("choices", {})
        main = main_facts(facts, choices, self.run.overrides)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.begin()
            else:
                loggers.log_facts(logger, facts, main, tags, self.first_step, self.monitor)
        if trainer.is_global_zero:
            names = getattr(trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
            data = self.cfg["data"]
            if names and "class_names" in data and data["class_names"] is None:  # prediction and serving read them
                self.run.save_config({**self.cfg, "data": {**data, "class_names": list(names)}})
            log_dir = Path(self.cfg["paths"]["log_dir"])
            has_checkpoints = trainer.checkpoint_callbacks and not trainer.fast_dev_run  # type: ignore[attr-defined]
            if has_checkpoints and log_dir.resolve() == self.run.path.resolve().parent.parent:  # not in a copied run
                point_latest(log_dir, self.run.path)
            if self.cfg["trainer"].get("accelerator") == "auto":
                print(describe_device(trainer), flush=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.interrupted = isinstance(exception, KeyboardInterrupt)


@contextmanager
def interruptible(start: RunStart) -> Iterator[None]:
    """Raise `Stopped` for Ctrl-C and for the signal of a Preemption callback.

    Lightning catches KeyboardInterrupt, ends the process silently, and leaves the signal ignored, as a second one
    should be.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if in_main and before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _OncePerPress(start))
    try:
        yield
    except SIGTERMException as error:
        received = next((callback.received for callback in start.callbacks if isinstance(callback, Preemption)), None)
        raise Stopped(received or "SIGTERM", start.command) from error
    except BaseException as error:
        if not _follows_interrupt(error):
            raise
        start.interrupted = True  # also if on_exception was not called
        before = signal.SIG_IGN
        raise Stopped("SIGINT", start.command if start.begun else None) from error
    finally:
        if in_main and before is not None:  # None: a handler that was not set from Python, and can't be restored
            signal.signal(signal.SIGINT, before)


class _OncePerPress:
    """Raise KeyboardInterrupt, but not twice within a second, and not while the run is ending.

    Lightning stops ignoring the signal before it has returned, and a Ctrl-C after that would have no run to report. One
    that was lost can be repeated, since Python ignores what is raised in a destructor.
    """

    def __init__(self, start: RunStart) -> None:
        self.start, self.last = start, float("-inf")

    def __call__(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if now - self.last >= SAME_PRESS_S and not self.start.interrupted:
            self.last = now
            raise KeyboardInterrupt


def _follows_interrupt(error: BaseException | None) -> bool:
    """Return whether `error` is a Ctrl-C or came from one: Lightning's exit, or an error of a half-written file."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@contextmanager
def explain_lightning_errors(trainer: Trainer, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Raise UserError if Lightning refuses the run: before training has begun, or when it verifies a component."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError, MisconfigurationException) as error:
        if str(error).startswith("Early stopping conditioned on metric"):
            raise UserError(f"callbacks.early_stopping: {' '.join(str(error).split())}") from error
        frames = traceback.extract_tb(error.__traceback__)
        verifies = frames[-1].name.startswith("_verify_")
        if frames[-1].name == "__getattr__":  # of a module: its caller asked for a missing attribute
            frames.pop()
        theirs = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(lightning.__file__).parent)
        if (has_begun() and not verifies) or not theirs:
            raise
        message = with_keys(str(error))
        if getattr(trainer, "overfit_batches", 0):  # from which Lightning sets these limits
            message = re.sub(r"trainer\.limit_(?:train|val)_batches", "trainer.overfit_batches", message)
        raise UserError(f"Lightning refuses this run: {message}") from error
