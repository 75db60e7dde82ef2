"""What a run prints: a progress bar on a terminal, one row per epoch, and a table of the net's layers."""

import math
import sys
from itertools import accumulate
from time import perf_counter
from typing import Annotated, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from lightning.pytorch.utilities.model_summary import summarize
from pydantic import Field
from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from lathe.config.metric_names import split_of
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.measure.shards import local

BAR = 8  # minimum width of the bar itself
OTHERS = 43  # columns of that line without metrics: epoch, bar, batches and time left


class Progress(RichProgressBar):
    """Lightning's rich bar, drawn a few times a second, and a row for each finished epoch.

    The bar shows the epoch (counted from 1), batches, the time left in the epoch, the last training loss, and more
    metrics if they fit; the loss is read only then, as reading waits for a GPU. If the output is not a terminal, only
    rows are printed, without control codes. A row has the epoch's seconds, `train/loss` over all batches and ranks if
    the task logs it, and the newest validation metrics: all of them in a file, as many as fit into one line on a
    terminal.

    Args:
        refresh_rate: draws per second.
        leave: keep one finished bar per epoch on the screen.
        plain: rows without a bar; None: if standard output is not a terminal.
        max_metrics: most metrics beside the bar, if they fit into its line.
    """

    acts_in_final_test = True

    @validated
    def __init__(
        self, refresh_rate: Count = 5, leave: bool = False, plain: bool | None = None, max_metrics: Count = 3
    ) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave, theme=RichProgressBarTheme(metrics_format="#.3g"))
        self.plain, self.max_metrics = plain, max_metrics
        self._rows = False
        self._due = 0.0
        self._outputs: Any = None
        self._started = 0.0
        self._validated = False  # since the last row: an older validation's metrics belong to that one
        self._row: list[str] = []  # of the epoch that has just ended, until its metrics are known

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.plain or (self.plain is None and not sys.stdout.isatty()):
            self.disable()  # Lightning's bar
        super().setup(trainer, pl_module, stage)
        self._rows = trainer.is_global_zero

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        text, bar, batches, *_ = super().configure_columns(trainer)
        bar.bar_width = max(BAR, min(5 * BAR, BAR + self._width() - 100))
        return [text, bar, batches, TimeRemainingColumn(compact=True)]

    def _init_progress(self, trainer: Trainer) -> None:
        super()._init_progress(trainer)
        if self.progress is not None:
            self.progress.live.transient = not self._leave  # the rows stay

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{_count(self.trainer, current_epoch).capitalize():{len(self.validation_description)}}"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # an epoch that is resumed inside has no on_train_epoch_start
        self._started = perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print(trainer, pl_module)
        super().on_train_epoch_start(trainer, pl_module)
        self._started = perf_counter()

    def skippable_steps(self, trainer: Trainer) -> float:
        """Return inf: a group of steps is shorter than the time between two draws."""
        return math.inf

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._outputs = outputs
        now = perf_counter()
        if now >= self._due and self.is_enabled:
            self._due = now + 1 / self.refresh_rate
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_enabled:
            # the bar was last drawn some batches ago
            self._update(self.train_progress_bar_id, trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        super().on_train_epoch_end(trainer, pl_module)
        if self._rows:
            step = [] if self.is_enabled else [f"step {trainer.global_step}"]
            self._row = [_count(trainer, trainer.current_epoch), *step, f"{perf_counter() - self._started:.1f} s"]

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
        """Print the row of the epoch that has ended: callbacks run before the task logs the epoch's means."""
        if not self._row:
            return
        metrics = self.get_metrics(trainer, pl_module)
        if "train/loss" in metrics:
            if "train/loss" in trainer.callback_metrics:  # over all batches and ranks
                metrics["train/loss"] = float(local(trainer.callback_metrics["train/loss"]))
            else:  # the module logs it under another name, or not at all
                metrics = {"last batch's loss" if k == "train/loss" else k: v for k, v in metrics.items()}
        new = {name: value for name, value in metrics.items() if self._validated or split_of(name) != "val"}
        row = [*self._row, *(f"{name} {value:#.4g}" for name, value in new.items())]
        self._row, self._validated = [], False
        if self.is_enabled and self._console is not None:  # above the bar
            fitting = row[: _fitting(row, self._width(), len(" | "))]
            self._console.print(" | ".join(fitting), soft_wrap=True, highlight=False, markup=False)
        else:
            print(" | ".join(row), flush=True)

    def _update_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.is_enabled or self._metric_component is None:
            return
        metrics = list(self.get_metrics(trainer, pl_module).items())
        texts = [f"{name}: {value:{self.theme.metrics_format}}" for name, value in metrics]
        self._metric_component.update(
            dict(metrics[: min(self.max_metrics, _fitting(texts, self._width() - OTHERS, 1))])
        )

    def _width(self) -> int:
        assert self._console is not None
        return self._console.width

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the last loss, monitored and validation metrics, and those logged with `prog_bar=True`."""
        loss = self._outputs.get("loss") if isinstance(self._outputs, dict) else self._outputs
        metrics: dict[str, Any] = {} if loss is None else {"train/loss": loss}
        monitored = {getattr(callback, "monitor", None) for callback in trainer.callbacks}  # type: ignore[attr-defined]
        logged = trainer.callback_metrics
        names = [*(name for name in logged if name in monitored), *(name for name in logged if split_of(name) == "val")]
        metrics |= {name: logged[name] for name in names}
        metrics |= {name: value for name, value in trainer.progress_bar_metrics.items() if name not in metrics}
        # reading the full value of a sharded loss is a collective, and only this rank draws
        values = {name: float(local(value) if isinstance(value, Tensor) else value) for name, value in metrics.items()}
        if "train/loss" in values and pl_module.automatic_optimization:
            values["train/loss"] *= trainer.accumulate_grad_batches  # Lightning divided it by this
        loss = values.get("train/loss")
        if any(values[name] == loss for name in trainer.progress_bar_metrics if name != "train/loss"):
            del values["train/loss"]  # the module logs it under another name
        return values


def _count(trainer: Trainer, epoch: int) -> str:
    """Return the epoch's number, from 1, and the total if known."""
    return f"epoch {epoch + 1}" + ("" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}")


def _fitting(texts: list[str], width: int, gap: int) -> int:
    """Count the texts that fit into `width` columns, `gap` columns apart."""
    return sum(end - gap <= width for end in accumulate(len(text) + gap for text in texts))


SHOWN = ("Name", "Type", "Params", "In sizes", "Out sizes")


class ModelSummary(RichModelSummary):
    """Lightning's summary with names, types and parameter counts of the modules that have parameters.

    Lightning's FLOPs column is 0 unless the task has an example input. Once a strategy has sharded the net, rank 0
    would count its own shard.
    """

    @validated
    def __init__(self, max_depth: Annotated[int, Field(ge=-1)] = 1, **options: Any) -> None:
        super().__init__(max_depth, **options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            super().on_fit_start(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do nothing: `setup` prints the table."""

    def _summary(self, trainer: Trainer, pl_module: LightningModule) -> Summary:
        return summarize(pl_module, max_depth=self._max_depth)  # not DeepSpeed's own: the net is not sharded yet

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]], total_parameters: int, trainable_parameters: int, *_: Any, **__: Any
    ) -> None:
        columns = {name: values for name, values in summary_data if name in SHOWN}
        table = Table()
        for name in columns:
            table.add_column(name, justify="right" if name == "Params" else "left")
        for *row, count in zip(*columns.values(), columns["Params"], strict=True):
            if count.strip() != "0":
                table.add_row(*row)
        console = Console()
        console.print(table)
        console.print(f"{total_parameters:,} parameters, {trainable_parameters:,} of them trainable")
