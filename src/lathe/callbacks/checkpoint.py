"""Write best.ckpt and last.ckpt, from which a run resumes bit for bit; also when a signal asks it to stop."""

import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.callbacks import Checkpoint as CheckpointBase
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from pydantic import Field
from torch import Tensor

from lathe.callbacks.checkpoint_io import AsyncCheckpointIO, AtomicCheckpointIO
from lathe.callbacks.module_access import on_any_rank
from lathe.compression.callback import compressions
from lathe.config.types import Count, Name
from lathe.config.validation import validated
from lathe.data.steps import reached, steps_before
from lathe.errors import ArgumentError, UserError, did_you_mean, require
from lathe.files import whole, write_atomically

LIST = "top.json"


class Top:
    """The `count` best epochs (-1: all that were judged; 1: only best.ckpt).

    `entries` has names, scores and steps, the best first; of equal ones the later, as for best.ckpt.
    """

    def __init__(self, count: int, mode: str) -> None:
        self.count, self.sign = count, -1.0 if mode == "max" else 1.0
        self.entries: list[dict[str, Any]] = []

    def judge(self, checkpoint: Any, trainer: Trainer, score: float) -> None:
        """Write a checkpoint if the epoch just judged is among the best, then remove the one it replaces.

        A collective. A run resumed from an earlier checkpoint repeats this.
        """
        if self.count == 1 or math.isnan(score):
            return
        name = f"epoch={trainer.current_epoch}-step={trainer.global_step}"
        entry = {"name": name, "score": score, "step": trainer.global_step}
        previous = [other for other in self.entries if other["name"] != name]
        ranked = sorted([entry, *previous], key=lambda other: (self.sign * other["score"], -other["step"]))
        count = len(ranked) if self.count < 0 else self.count
        if entry not in ranked[:count]:
            return
        checkpoint.save(trainer, name)
        self.entries = ranked[:count]
        drain = getattr(trainer.strategy.checkpoint_io, "drain", None)
        if ranked[count:] and drain is not None:
            drain()  # a thread may still write a file
        trainer.strategy.barrier("top")
        if trainer.is_global_zero:
            folder = checkpoint.path(name).parent
            write_atomically(folder / LIST, json.dumps(self.entries, indent=2) + "\n")
            for other in ranked[count:]:
                path = checkpoint.path(other["name"])
                written = path.resolve()
                path.unlink(missing_ok=True)
                if written != path and written.is_dir():  # a folder of a sharded strategy, and the link to it
                    shutil.rmtree(written, ignore_errors=True)


Asynchronous = TypedDict("Asynchronous", {"async": bool}, total=False)  # a keyword of Python's


class Checkpoint(CheckpointBase):
    """Keep the best epoch by a monitored metric, and the latest state.

    - best.ckpt: judged when the metric is reported, after a validation or at the end of the training epoch, once every
      compression method has the net in its final form. Of equal epochs the later one is kept, which trained longer. If
      no epoch was judged, it is the latest state, and `unjudged` is the reason.
    - last.ckpt: written after every `every_n_epochs` epochs (None: only after the last), and every
      `every_n_train_steps` optimizer steps; after a validation that is due then, so that a resumed run neither misses
      nor repeats it.

    Args:
        dirpath: always checkpoints/ of the run directory.
        save_top_k: above 1, or -1 for all: also keep that many of the best epochs, with epoch and step in their names.
        async: write files in a thread during training; not with a checkpoint that ranks write together.
    """

    @validated
    def __init__(
        self,
        dirpath: None = None,
        monitor: Name | None = "val/accuracy",
        mode: Literal["auto", "min", "max"] = "max",
        every_n_train_steps: Count | None = None,
        every_n_epochs: Count | None = 1,
        save_top_k: Annotated[int, Field(ge=-1)] = 1,
        **options: Unpack[Asynchronous],
    ) -> None:
        super().__init__()
        self.asynchronous = options.pop("async", False)
        if mode == "auto":
            raise ArgumentError("mode=auto requires a configuration: choose max or min.")
        if save_top_k == 0:
            raise ArgumentError("save_top_k=0: the best epoch is always kept. Choose 1, more, or -1 for all.")
        if monitor is None and save_top_k != 1:
            raise ArgumentError(f"save_top_k={save_top_k} requires a monitor.")
        if options:
            raise TypeError(f"Checkpoint() got an unexpected keyword argument {next(iter(options))!r}")
        self._dirpath: Path | None = None
        self.monitor, self.mode = monitor, mode
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps, every_n_epochs
        self.top = Top(save_top_k, mode)
        self.best_score: float | None = None
        self.best_step = 0
        self.best_metrics: dict[str, float] = {}
        self.latest: dict[str, float] = {}  # metrics of the last epoch's final weights
        self.unjudged: str | None = None
        # optimizer steps of this process's newest last.ckpt, and of the last validation; -1 before the first
        self.saved_step = self.validated_step = -1
        self._validated: dict[str, float] = {}  # metrics of the last validation
        self._stopped: list[float | None] | None = None
        self._due = self._due_at_epoch_end = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._dirpath is None:
            self._dirpath = Path(trainer.default_root_dir) / "checkpoints"
        # last, so that the state of a user's ModelCheckpoint is in the files
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]  # type: ignore[attr-defined]
        writer = trainer.strategy.checkpoint_io
        require(
            not (self.asynchronous and getattr(trainer.strategy, "_save_distributed_checkpoint", False)),
            "callbacks.checkpoint.async=true does not work with strategy.checkpoint=sharded: choose one.",
        )
        if self.asynchronous and not isinstance(writer, AsyncCheckpointIO):
            trainer.strategy.checkpoint_io = AsyncCheckpointIO(getattr(writer, "read_folder", None))

    def path(self, name: str) -> Path:
        """Return the path of checkpoint `name` (best or last)."""
        assert self._dirpath is not None
        return self._dirpath / f"{name}.ckpt"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is None or not trainer.limit_val_batches:  # as the user chose
            return
        if not is_overridden("validation_step", pl_module):
            reason = f"{type(pl_module).__name__} has no validation_step"
        elif trainer.val_dataloaders is not None and not sum(trainer.num_val_batches):  # set in the first epoch
            reason = "the data have no validation batches"
        else:
            return
        rank_zero_warn(
            f"callbacks.checkpoint.monitor={self.monitor}: {reason}, so best.ckpt is the last state unless training "
            f"reports {self.monitor}."
        )

    def skippable_steps(self, trainer: Trainer) -> float:
        """Count the steps before the next saved one."""
        return steps_before(trainer, self.every_n_train_steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.every_n_train_steps:
            return
        due = reached(trainer, self.every_n_train_steps) and not trainer.fit_loop._should_accumulate()
        if not due or trainer.global_step == self.saved_step:
            return
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._due_at_epoch_end = True
            return
        if validation_follows(trainer):
            self._due = True
        else:
            self.save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.validated_step, self._validated = trainer.global_step, _reported(trainer)
        self._keep_best(trainer, self._validated)
        if self._due and not stop_is_due(trainer):  # else the epoch's end follows, and saves the stop
            self.save_last(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        stopped = stop_is_due(trainer)
        last_epoch = epoch == trainer.max_epochs or stopped or 0 <= trainer.max_steps <= trainer.global_step
        reported, fresh = _reported(trainer), self.validated_step == trainer.global_step
        metrics = {**self._validated, **reported}
        if self._validated and self.monitor is not None and self.monitor not in metrics:
            raise UserError(
                f"callbacks.checkpoint.monitor={self.monitor}: the first epoch and its validation do not report it; "
                f"{did_you_mean(self.monitor, metrics)}"
            )
        self.latest = metrics if fresh else reported
        if self.monitor not in self._validated:
            self._keep_best(trainer, self.latest)
        if self.monitor is not None and last_epoch and self.best_score is None:
            late = [type(method).__name__ for method in compressions(trainer) if not method.ready(trainer)]
            self.keep_newest(trainer, f"{' and '.join(late)} ended with the run" if late else "no validation ran")
        self._stopped = ends(trainer) if stopped else None
        if self.monitor is None:
            self.save(trainer, "best")
        if last_epoch or self._due_at_epoch_end or (self.every_n_epochs and epoch % self.every_n_epochs == 0):
            self.save_last(trainer, like_best=self.monitor is None)

    def keep_newest(self, trainer: Trainer, reason: str) -> None:
        """Write best.ckpt from the current state, unjudged for this `reason`; a collective."""
        self.best_score, self.best_metrics, self.unjudged = None, {}, reason
        self.save(trainer, "best")

    def save_last(self, trainer: Trainer, like_best: bool = False) -> None:
        """Write last.ckpt; `like_best` if best.ckpt was just written from the same state."""
        self._due = self._due_at_epoch_end = False
        self.saved_step = trainer.global_step
        best, last = self.path("best"), self.path("last")
        alone = trainer.world_size == 1 and type(trainer.strategy.checkpoint_io) is AtomicCheckpointIO
        if not (like_best and alone and best.is_file()) or last.is_symlink():
            self.save(trainer, "last")
            return
        with whole(last) as temporary:
            try:
                os.link(best, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(best, temporary)

    @property
    def dirpath(self) -> str | None:
        """Return the folder of the checkpoints, None before `setup`, as ModelCheckpoint."""
        return None if self._dirpath is None else str(self._dirpath)

    @property
    def best_model_path(self) -> str:
        """Return the path of best.ckpt, empty before it exists, as ModelCheckpoint."""
        return str(self.path("best")) if self._dirpath is not None and self.path("best").exists() else ""

    @property
    def last_model_path(self) -> str:
        """Return the path of last.ckpt, empty before it exists, as ModelCheckpoint."""
        return str(self.path("last")) if self._dirpath is not None and self.path("last").exists() else ""

    @property
    def best_model_score(self) -> Tensor | None:
        """Return the best value of the monitor, a scalar, None before the first, as ModelCheckpoint."""
        return None if self.best_score is None else torch.tensor(self.best_score)

    def save(self, trainer: Trainer, name: str) -> None:
        """Write checkpoint `name`; a collective."""
        trainer.save_checkpoint(self.path(name))

    def _keep_best(self, trainer: Trainer, reported: dict[str, float]) -> None:
        if self.monitor is None or self.monitor not in reported:
            return
        if not all(method.ready(trainer) for method in compressions(trainer)):
            return
        score, best = reported[self.monitor], self.best_score
        if trainer.world_size > 1:  # metrics of a user's self.log may differ between ranks
            score = trainer.strategy.broadcast(score)
        first = best is None or math.isnan(best)  # anything is better than nan
        if first or (score >= best if self.mode == "max" else score <= best):  # type: ignore[operator]
            self.best_score, self.best_step, self.unjudged = score, trainer.global_step, None
            self.best_metrics = reported
            self.save(trainer, "best")
        self.top.judge(self, trainer, score)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_score": self.best_score,
            "best_step": self.best_step,
            "best_metrics": self.best_metrics,
            "latest": self.latest,
            "unjudged": self.unjudged,
            "validated_step": self.validated_step,
            "stopped": self._stopped,
            "top": self.top.entries,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Do not restart a run that was stopped early, unless its end was raised since.

        Raises:
            UserError: a file of this folder lacks this callback's state.
        """
        require(
            self.state_key in checkpoint["callbacks"] or Path(str(trainer.ckpt_path)).parent != self._dirpath,
            f"checkpoint={trainer.ckpt_path} lacks `callbacks.{self.state_key}`: resume from another checkpoint, or "
            "start a new run from its weights with ckpt_path.",
        )
        stopped = checkpoint["callbacks"].get(self.state_key, {}).get("stopped")
        if stopped == ends(trainer) and self.path("last").exists():
            trainer.should_stop = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.path("last").exists():
            return  # the state of another run, whose weights this one starts from
        self.best_score, self.best_step = state_dict["best_score"], state_dict["best_step"]
        self.best_metrics = state_dict["best_metrics"]
        self.latest, self.unjudged = state_dict["latest"], state_dict["unjudged"]
        self.validated_step, self._stopped = state_dict["validated_step"], state_dict["stopped"]
        self.top.entries = state_dict["top"]


def _reported(trainer: Trainer) -> dict[str, float]:
    """Return the metrics of the loop that has just ended; `trainer.callback_metrics` has older ones too."""
    results, metrics = trainer._results, dict[str, Any]()
    assert results is not None
    for loader in dict.fromkeys((*(item.meta.dataloader_idx for item in results.values()), None)):  # None: of all
        results.dataloader_idx = loader
        metrics |= trainer._logger_connector.metrics["callback"]
    return numbers(metrics)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers, without the learning rates of Lightning's monitor."""
    return {name: float(value) for name, value in metrics.items() if not name.startswith("lr-")}


def ends(trainer: Trainer) -> list[float | None]:
    """Return the limits that end the run: epochs, steps, and Timer's seconds (`trainer.max_time`)."""
    timers = [callback._duration for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    return [trainer.max_epochs, trainer.max_steps, *timers]


def stop_is_due(trainer: Trainer) -> bool:
    """Return whether the run ends with this epoch because a stop was requested."""
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def validation_follows(trainer: Trainer) -> bool:
    """Return whether Lightning validates right after the batch that has just ended."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and loop._should_check_val_fx(fetcher)


# SLURM's --signal is USR1 by convention, a terminal that closes sends HUP; Windows has neither
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


class Preemption(Callback):
    """Finish the optimizer step on SIGTERM, SIGHUP or SIGUSR1, write last.ckpt and stop.

    A due validation runs first. A signal that the process ignores, as SIGHUP under nohup, stays ignored. Lightning's
    handler starts a collective inside the signal handler, which can interleave with another rank's gradient reduction.
    This one only stores the signal; every `every_n_steps` optimizer steps the ranks agree whether one was signalled,
    and stop at the same step. A stop at an epoch's last step waits for the next step: no checkpoint contains the end of
    an epoch (its row, a due stop), and a resumed run would skip it. After the last epoch, the run stops before the
    test.
    """

    stops_all = True  # the ranks agree on a stop here, so Lightning need not ask them before every batch

    @validated
    def __init__(self, every_n_steps: Count = 10) -> None:
        self.every_n_steps = every_n_steps
        self.received: str | None = None
        self._before: dict[int, Any] = {}
        self._agreed = self._alone = self._waits = False

    def skippable_steps(self, trainer: Trainer) -> float:
        """Return inf for one process without a signal; several ranks agree at every n-th step."""
        if self.received is not None or self._agreed:
            return 0
        return math.inf if self._alone else steps_before(trainer, self.every_n_steps)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._alone = trainer.world_size == 1
        # Not sooner: Lightning registers its handlers after on_fit_start, and would call them before this one.
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        if threading.current_thread() is not threading.main_thread():  # handlers can be set only in the main thread
            heard = []
        self._before = {number: signal.signal(number, self._note) for number in heard}

    def _note(self, number: int, frame: Any) -> None:
        self.received = signal.Signals(number).name

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._alone and self.received is None and not self._agreed:
            return
        if trainer.fit_loop._should_accumulate():
            return  # no checkpoint contains accumulated gradients
        if not self._agreed:
            if trainer.world_size > 1 and not reached(trainer, self.every_n_steps):
                return
            self._agreed = self._any_rank(trainer)
        if self._agreed and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            # If the flag is set during validation, Lightning stops between two of its batches, and a resumed run lacks
            # that validation. A validation that was waited for and did not come has no batches.
            self._waits = validation_follows(trainer) and not self._waits
            trainer._signal_connector.received_sigterm = not self._waits  # raises SIGTERMException after the step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._waits:
            self._waits, trainer._signal_connector.received_sigterm = False, True

    def _any_rank(self, trainer: Trainer) -> bool:
        stop = on_any_rank(trainer, self.received is not None)
        if stop:
            self.received = self.received or "SIGTERM"
        return stop

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()
        if self._agreed or self._any_rank(trainer):
            raise SIGTERMException

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()
        if isinstance(exception, SIGTERMException):
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoint) and callback.saved_step != trainer.global_step:
                    callback.save_last(trainer)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
