"""The beginning of training, and its end by Ctrl-C or a signal with the command that resumes the run."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe import loggers
from lathe.callbacks import Preemption
from lathe.config.compression_plan import methods
from lathe.config.resolve import flatten
from lathe.errors import Stopped
from lathe.loggers import CSVLogger, main_facts, run_facts
from lathe.runs.rundir import RunDir, point_latest, run_command
from lathe.training.trainer_setup import OWN_CHECKPOINTS, describe_device

SAME_PRESS_S = 1.0  # seconds within which a second Ctrl-C counts as the first


class RunStart(Callback):
    """Record on disk and in the loggers that data and devices are ready and training begins.

    Until then the directory of a run that fails is removed.
    """

    def __init__(self, run: RunDir, cfg: dict[str, Any], first_step: int, monitor: str | None) -> None:
        self.run, self.cfg, self.first_step, self.monitor = run, cfg, first_step, monitor
        self.begun = self.interrupted = False
        self.given: list[Callback] = []  # to the Trainer
        self.command = run_command("train.py", "resume", run.path)  # continues the run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:  # would use the first logger's
                callback.dirpath = str(self.run.path / OWN_CHECKPOINTS)
        for given in self.given:
            if stage == "fit" and given not in trainer.callbacks:  # type: ignore[attr-defined]
                kind, module = type(given).__name__, type(pl_module).__name__
                rank_zero_warn(f"callbacks: a {kind} of {module}.configure_callbacks takes the place of the run's own.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.begun:
            return
        self.begun = True
        self._log_facts(trainer)
        if trainer.is_global_zero:
            self._save_class_names(getattr(trainer.datamodule, "class_names", None))  # type: ignore[attr-defined]
            log_dir = Path(self.cfg["paths"]["log_dir"])
            has_checkpoints = trainer.checkpoint_callbacks and not trainer.fast_dev_run  # type: ignore[attr-defined]
            if has_checkpoints and log_dir.resolve() == self.run.path.resolve().parent.parent:  # not in a copied run
                point_latest(log_dir, self.run.path)
            if self.cfg["trainer"].get("accelerator") == "auto":
                print(describe_device(trainer), flush=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.interrupted = isinstance(exception, KeyboardInterrupt)

    def _log_facts(self, trainer: Trainer) -> None:
        facts, tags = run_facts(flatten(self.cfg)), self.cfg.get("tags") or []
        compression = ",".join(methods(self.cfg.get("compression") or {}))  # Hydra does not record choices of a list
        choices = {"compression": compression or None} | self.run.environment.get("choices", {})
        main = main_facts(facts, choices, self.run.overrides)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.begin()
            else:
                loggers.log_facts(logger, facts, main, tags, self.first_step, self.monitor)

    def _save_class_names(self, names: list[str] | None) -> None:
        """Save class names that came with the data in config.yaml, where prediction and serving read them."""
        data = self.cfg["data"]
        if names and "class_names" in data and data["class_names"] is None:
            self.run.save_config({**self.cfg, "data": {**data, "class_names": list(names)}})


@contextmanager
def interruptible(run: RunStart) -> Iterator[None]:
    """Raise `Stopped` for Ctrl-C and for the signal of a Preemption callback.

    Lightning catches KeyboardInterrupt, ends the process silently, and leaves the signal ignored, as a second one
    should be.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if in_main and before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _OncePerPress(run))
    try:
        yield
    except SIGTERMException as error:
        received = next((callback.received for callback in run.given if isinstance(callback, Preemption)), None)
        raise Stopped(received or "SIGTERM", run.command) from error
    except BaseException as error:
        if not _follows_interrupt(error):
            raise
        run.interrupted = True  # also if on_exception was not called
        before = signal.SIG_IGN
        raise Stopped("SIGINT", run.command if run.begun else None) from error
    finally:
        if in_main and before is not None:  # None: a handler that was not set from Python, and can't be restored
            signal.signal(signal.SIGINT, before)


class _OncePerPress:
    """Raise KeyboardInterrupt, but not twice within a second, and not while the run is ending.

    Lightning stops ignoring the signal before it has returned, and a Ctrl-C after that would have no run to report. One
    that was lost can be repeated, since Python ignores what is raised in a destructor.
    """

    def __init__(self, run: RunStart) -> None:
        self.run, self.last = run, float("-inf")

    def __call__(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if now - self.last >= SAME_PRESS_S and not self.run.interrupted:
            self.last = now
            raise KeyboardInterrupt


def _follows_interrupt(error: BaseException | None) -> bool:
    """Return whether `error` is a Ctrl-C or came from one: Lightning's exit, or an error of a half-written file."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
