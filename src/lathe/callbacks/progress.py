"""Progress on a terminal, and plain lines everywhere else."""

import math
import sys
from time import perf_counter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor

from lathe.callbacks.throughput import Throughput
from lathe.config.schema.held import held
from lathe.config.splits import split_of
from lathe.measure.shards import local


@held("lathe.callbacks.Progress")
class Progress(RichProgressBar):
    """Lightning's rich bar, touched a few times a second instead of at every batch; one line per epoch where it cannot
    draw.

    Shows epoch, batches, time, batches per second, the last training loss, the latest validation metrics, and what the
    newest epoch took. Reading the loss waits for a GPU, so that too happens only when the bar is drawn. Where the
    output is not a terminal (a file, a pipe, a notebook), each epoch prints one line without control codes and flushes
    it; there train/loss is the epoch's own, of all batches and processes, where the task logs that.

    Args:
        refresh_rate: draws per second.
        leave: keep one finished bar per epoch on the screen.
        plain: lines instead of a bar; None decides by whether standard output is a terminal.
    """

    def __init__(self, refresh_rate: int = 5, leave: bool = False, plain: bool | None = None) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self.plain = plain
        self._lines = False
        self._due = 0.0
        self._outputs: Any = None
        self._batches = 0
        self._started = 0.0
        self._validated = False  # since the last line: an older validation's metrics belong to that one
        self._line = ""  # of the epoch that has just ended, until its metrics are known

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._lines = self.plain if self.plain is not None else not sys.stdout.isatty()
        if self._lines:
            self.disable()  # Lightning's half
        super().setup(trainer, pl_module, stage)
        self._lines = self._lines and trainer.is_global_zero

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # An epoch that is continued in its middle has no on_train_epoch_start.
        self._batches, self._started = 0, perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print(trainer, pl_module)
        super().on_train_epoch_start(trainer, pl_module)
        self._batches, self._started = 0, perf_counter()

    def quiet_steps(self, trainer: Trainer) -> float:
        """All: whoever makes several at once takes no longer than two draws lie apart."""
        return math.inf

    def on_quiet_steps(self, trainer: Trainer, pl_module: LightningModule, batches: list[Any], waited: float) -> None:
        self._batches += len(batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._outputs = outputs
        self._batches += 1
        now = perf_counter()
        if now >= self._due and self.is_enabled:
            self._due = now + 1 / self.refresh_rate
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_enabled:
            # The bar was drawn last some batches ago.
            self._update(self.train_progress_bar_id, trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        super().on_train_epoch_end(trainer, pl_module)
        if self._lines:
            seconds = perf_counter() - self._started
            last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
            parts = [
                f"epoch {trainer.current_epoch + 1}{last}",
                f"step {trainer.global_step}",
                f"{self._batches / seconds:.1f} it/s",
            ]
            self._line = " | ".join(parts)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = True
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._print(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)

    def _print(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The line of the epoch that has ended: callbacks come before the task, which logs the epoch's means at its
        end.
        """
        if self._line:
            metrics = self.get_metrics(trainer, pl_module)
            if "train/loss" in metrics:
                if "train/loss" in trainer.callback_metrics:  # of all batches, of all processes
                    metrics["train/loss"] = float(local(trainer.callback_metrics["train/loss"]))
                else:  # the module logs it under another name, or not at all
                    metrics = {"loss of the last batch" if k == "train/loss" else k: v for k, v in metrics.items()}
            new = {name: value for name, value in metrics.items() if self._validated or split_of(name) != "val"}
            print(" | ".join([self._line, *(f"{name} {value:.4g}" for name, value in new.items())]), flush=True)
            self._line, self._validated = "", False

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The loss of the last batch, then every metric of validation (`val/` as a task names it, or `val_`,
        `validation_` as a module does), those that callbacks monitor and whatever was logged with `prog_bar=True`;
        where `Throughput` measures, the newest epoch's seconds and the most memory so far, in GiB.
        """
        loss = self._outputs.get("loss") if isinstance(self._outputs, dict) else self._outputs
        found: dict[str, Any] = {} if loss is None else {"train/loss": loss}
        monitored = {getattr(callback, "monitor", None) for callback in trainer.callbacks}  # type: ignore[attr-defined]
        shown = {name for name in trainer.callback_metrics if split_of(name) == "val"} | monitored
        found |= {name: value for name, value in trainer.callback_metrics.items() if name in shown}
        found |= {name: value for name, value in trainer.progress_bar_metrics.items() if name not in found}
        told = next((callback for callback in trainer.callbacks if isinstance(callback, Throughput)), None)  # type: ignore[attr-defined]
        found |= {} if told is None else told.shown
        # A loss that is spread over processes would want all of them to read it, and only this one draws.
        values = {name: float(local(value) if isinstance(value, Tensor) else value) for name, value in found.items()}
        if "train/loss" in values and pl_module.automatic_optimization:
            values["train/loss"] *= trainer.accumulate_grad_batches  # by which Lightning has divided it
        loss = values.get("train/loss")
        if any(values[name] == loss for name in trainer.progress_bar_metrics if name != "train/loss"):
            del values["train/loss"]  # which the module logs under a name of its own
        return values
