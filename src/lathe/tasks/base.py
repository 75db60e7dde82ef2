"""Base class of tasks: optimizers, running sums of metrics, plain names in checkpoints."""

import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.compression.structure import structure_of
from lathe.data.steps import reached, steps_before
from lathe.errors import require
from lathe.tasks.metric_sums import SPLITS, MetricSums
from lathe.tasks.metric_sync import gather_logs, gather_sums, own_sums, restore_logs
from lathe.tasks.module_protocol import ModuleProtocol
from lathe.tasks.scheduler import another_optimizer, make_optimizers

if TYPE_CHECKING:
    from lathe.tasks.torchmetrics_adapter import Meters

Objective = Callable[[Any, Any], dict[str, Tensor]]


class Task(MetricSums, ModuleProtocol):
    """A net, an objective and the metrics that are reported for it.

    A subclass declares what it reports:

    - `metrics`, whose sums over a batch `reduce` returns; `computed`, metrics that `compute` derives from their means;
      `logged`, full names such as "val/f1" of what its own `self.log` reports;
    - `minimised`: metrics of which lower is better; `undirected`: those without a better direction;
    - `monitor`: the metric that chooses the best epoch ("" for none); `unit`: what throughput counts.

    Sums stay on the device and are read once per logged step or epoch: a read waits for the device, and metric objects
    per step cost several times the step of a small net. The sums of all ranks are added before they are divided, so
    metrics do not depend on the number of devices. `meters` are torchmetrics, updated with `scored` of every batch.

    `optimizer` makes an Optimizer from the net, or is an optimizer class. `scheduler` makes a scheduler from the
    optimizer, which steps after every optimizer step and gets the run's number of steps if it has a parameter
    `total_steps`; or it is Lightning's mapping with `interval`, `frequency` and `monitor`. Both are None for
    evaluation. No argument is a hyper-parameter: the run directory rebuilds the task from its configuration.
    """

    metrics: tuple[str, ...] = ("loss",)
    computed: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()
    minimised: tuple[str, ...] = ("loss", "perplexity")
    undirected: tuple[str, ...] = ()
    monitor = "val/loss"
    unit = "samples"
    brings_module = False  # True for a LightningModule that runs as it is
    predicts = "classes"  # what scripts/predict.py takes outputs for

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self.objective: Objective = self.losses
        self.meters: Meters | None = None
        self.observers: list[Callable[[str, Any, Any], None]] = []  # called with split, outputs and batch of each step
        self._logged_step = -1
        self._restored_sums: dict[str, list[list[float]]] = {}
        self._restored_log: list[dict[str, Any]] = []
        self.latest: dict[str, float] = {}
        self._deferred_rows: list[tuple[dict[str, Any], int]] = []  # of logged steps, with their epochs
        self.fused_optimizer: bool | str = False  # auto: as one kernel where there is one
        self.schedule_repeats = 1  # how often a run goes through its schedule

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets the running hook's name some forty times a step; a Module looks each up among parameters and
        # buffers first.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def metric_names(self) -> list[str]:
        """Return every metric that this task reports, which a callback may monitor."""
        return [*(f"{split}/{metric}" for split in SPLITS for metric in self.reported), *self.logged]

    @property
    def reported(self) -> tuple[str, ...]:
        """Return the metrics of each split."""
        return (*self.metrics, *self.computed, *(() if self.meters is None else self.meters.names))

    def losses(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Return named loss terms, whose sum is trained on. Callbacks wrap this by replacing `objective`."""
        raise NotImplementedError

    def reduce(self, outputs: Any, batch: Any, loss: Tensor) -> Tensor:
        """Return sums over the batch of each of `metrics`, and the number of counted samples: [len(metrics) + 1],
        detached.

        `loss` is the mean over the counted samples.
        """
        raise NotImplementedError

    def scored(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of the batch's counted rows, for `meters`."""
        raise NotImplementedError

    def compute(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics named in `computed`, from the means of `metrics`."""
        return {}

    def count_units(self, batch: Any) -> int:
        """Return the number of `unit` in this process's batch."""
        return len(batch[0])

    def configure_callbacks(self) -> list[Any]:
        """Return none; in the first hook that knows the metrics, keep Lightning from advising `sync_dist` for them:
        sums of all ranks are added already.
        """
        names = "|".join(map(re.escape, self.metric_names))
        warnings.filterwarnings("ignore", message=rf".*recommended to use `self\.log\('({names})', .*sync_dist=True")
        return []

    def configure_model(self) -> None:
        """Let the strategy shard the net, before the optimizer is built."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def optimizer_over(self, net: nn.Module, kernels: Mapping[str, Any] | None) -> Optimizer:
        """Return an optimizer like the run's over another net, with these values of `fused` and `foreach`; None takes
        the fastest.
        """
        return another_optimizer(self._make_optimizer, net, kernels)

    def has_default_step(self) -> bool:
        """Return whether `training_step` and `training_loss` are Task's own."""
        kind = type(self)
        return kind.training_step is Task.training_step and kind.training_loss is Task.training_loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self.training_loss(self.net(batch[0]), batch)

    training_step.is_in_whole_step = True  # type: ignore[attr-defined]  # compile.scope=step does the same

    def training_loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the loss to train on, after adding the batch's metrics."""
        terms = self.objective(outputs, batch)
        if not self._has_training_sums:
            self._check_losses(terms)
        values = list(terms.values())
        loss = values[0] if len(values) == 1 else torch.stack(values).sum()
        self.add_training(outputs, batch, loss.detach())
        for observe in self.observers:
            observe("train", outputs, batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate_outputs("val", self.net(batch[0]), batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate_outputs("test", self.net(batch[0]), batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def evaluate_outputs(self, split: str, outputs: Any, batch: Any) -> None:
        """Add the metrics of a batch of validation or test."""
        terms = self.losses(outputs, batch)
        if split not in self._sums:
            self._check_losses(terms)
        loss = torch.stack(list(terms.values())).sum()
        self._add(split, self.reduce(outputs, batch, loss))
        if self.meters is not None:
            self.meters.update(split, *self.scored(outputs, batch))
        for observe in self.observers:
            observe(split, outputs, batch)

    def _check_losses(self, terms: Any) -> None:
        values = list(terms.values()) if isinstance(terms, Mapping) else []
        require(
            bool(values) and all(isinstance(value, Tensor) and value.numel() == 1 for value in values),
            f"{type(self).__module__}.{type(self).__qualname__}.losses: return a dict of scalar tensors by name.",
        )

    def split_batch(self, batch: Any, n: int) -> list[Any]:
        """Return a batch as `n` micro-batches along the first dimension; scalars, such as a count of targets, are
        divided by `n`.

        Raises:
            UserError: the samples do not divide by `n`.
        """
        size = len(batch[0])
        require(size % n == 0, f"strategy.microbatches={n} does not divide a replica's batch of {size} samples.")
        parts = [[item / n] * n if item.dim() == 0 else list(item.chunk(n)) for item in batch]
        return [tuple(part) for part in zip(*parts, strict=True)]

    def skippable_steps(self, trainer: Any) -> float:
        """Count the steps before the next logged one, which need no hook (`lathe.callbacks.SkippableHooks`)."""
        return steps_before(trainer, trainer.log_every_n_steps)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log_step()

    def _log_step(self) -> None:
        """Log the mean since the last logged step, every `trainer.log_every_n_steps` optimizer steps."""
        trainer = self.trainer
        step, interval = trainer.global_step, trainer.log_every_n_steps
        if step > 0 and reached(trainer, interval) and step != self._logged_step and self._has_training_sums:
            self._logged_step = step
            self.latest = self._means("train", self._take("train"))
            self.write(self.latest)

    def write(self, metrics: dict[str, float]) -> None:
        """Send metrics to all loggers at the current optimizer step."""
        trainer = self.trainer
        row, step = {**metrics, "epoch": trainer.current_epoch}, trainer.global_step
        for logger in trainer.loggers:
            logger.log_metrics(dict(row), step=step)

    def can_defer_log(self, trainer: Any) -> bool:
        """Return whether the row of a logged step may be written after steps that follow it."""
        return type(self).write is Task.write and "write" not in vars(self)

    def deferred_row(self, trainer: Any) -> dict[str, Any]:
        """Return the row of a logged step, which `complete_deferred_rows` fills in."""
        self._logged_step = trainer.global_step
        self.end_window()
        row: dict[str, Any] = {}
        self._deferred_rows.append((row, trainer.current_epoch))
        return row

    def complete_deferred_rows(self, trainer: Any) -> None:
        """Fill in the rows of logged steps, after a group of steps."""
        rows, self._deferred_rows = self._deferred_rows, []
        for (row, epoch), sums in zip(rows, self.take_windows(), strict=True):
            self.latest = self._means("train", sums)
            row.update(self.latest, epoch=epoch)

    def on_train_epoch_end(self) -> None:
        if self._has_training_sums:
            self._take("train")
        if "train" in self._epoch_sums:
            means = self._means("train", self._epoch_sums.pop("train")) | self._take_meters("train")
            self.write({f"{name}_epoch": value for name, value in means.items()})
            self._log_exact(means, logger=False)

    def on_validation_epoch_end(self) -> None:
        self._report_split("val")

    def on_test_epoch_end(self) -> None:
        self._report_split("test")

    def _report_split(self, split: str) -> None:
        if split in self._sums:
            self._log_exact(self._means(split, self._sums.pop(split)) | self._take_meters(split))

    def _take_meters(self, split: str) -> dict[str, float]:
        values = {} if self.meters is None else self.meters.take(split, self.trainer)
        return {f"{split}/{name}": value for name, value in values.items()}

    def _log_exact(self, means: dict[str, float], logger: bool | None = None) -> None:
        """Log metrics for callbacks and the progress bar; with `logger=None` also for the loggers, and in what
        `validate` and `test` return.
        """
        exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in means.items()}
        self.log_dict(exact, logger=logger, prog_bar=not self.trainer.testing, rank_zero_only=False)

    def configure_optimizers(self) -> Any:
        return make_optimizers(self, self._make_optimizer, self._make_scheduler)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Use the net's own names in `state_dict`, and keep the metrics in progress.

        The current step is logged and on disk before the checkpoint is: callbacks save before this module's hook, and a
        resumed run does not log the step again.
        """
        self._log_step()
        log = gather_logs(self.trainer, self)
        for logger in self.trainer.loggers:
            logger.save()
        checkpoint["state_dict"] = {
            name.removeprefix("net."): value for name, value in checkpoint["state_dict"].items()
        }
        structure = structure_of(self.core)
        if structure:
            checkpoint["structure"] = structure
        sums = gather_sums(self._training_sums(), self._zeros(), self.trainer)
        checkpoint["task"] = {"sums": sums, "logged_step": self._logged_step, "log": log}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}
        state = checkpoint.get("task")
        if state is not None:
            self._logged_step, self._restored_sums = state["logged_step"], state["sums"]
            self._restored_log = state.get("log", [])

    def on_train_start(self) -> None:
        for kind, rows in self._restored_sums.items():
            sums = self._sums if kind == "window" else self._epoch_sums
            sums["train"] = own_sums(rows, self.trainer, self._zeros())
        restore_logs(self._restored_log, self.trainer, self)
        self._restored_sums, self._restored_log = {}, []
