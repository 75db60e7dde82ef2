"""What every task shares: optimizers, running sums of its metrics, and plain names in checkpoints."""

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.compression.structure import structure_of
from lathe.data.steps import reached, steps_before
from lathe.tasks import ranks, written
from lathe.tasks.meters import SPLITS, Meters
from lathe.tasks.microbatches import microbatches
from lathe.tasks.module_protocol import ModuleProtocol
from lathe.tasks.scheduler import another_optimizer, make_optimizers
from lathe.tasks.sums import Sums

Objective = Callable[[Any, Any], dict[str, Tensor]]


class Task(Sums, ModuleProtocol):
    """A net, an objective and the metrics that are reported for it.

    A subclass names its `metrics` and gives their sums over a batch (`reduce`); `computed` names metrics that follow
    from the means of those (`compute`); `logged` may name what a subclass's own `self.log` reports, such as "val/f1",
    for callbacks to monitor; of `minimised` lower is better. `monitor` is what chooses the best epoch ("": nothing
    does), `unit` what throughput counts. Sums are kept on the device and read once per logged step or epoch: a read
    waits for the device, and metric objects per step cost several times the step of a small net. All ranks' sums are
    added before they are divided, so metrics do not depend on the number of devices. `meters` are torchmetrics, which
    are updated with every batch's `scored`; of those in `undirected` nobody knows whether higher is better.

    `optimizer` makes an Optimizer from the net, or is a class of one; `scheduler` makes a scheduler from it, which is
    stepped after every optimizer step, and gets the run's number of them if it has a parameter `total_steps`, or it is
    Lightning's mapping of one with `interval`, `frequency` and `monitor`. Both are null for evaluation alone. Nothing
    goes into hyper-parameters: the run directory rebuilds the task from its configuration.
    """

    metrics: tuple[str, ...] = ("loss",)
    computed: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()
    minimised: tuple[str, ...] = ("loss", "perplexity")
    undirected: tuple[str, ...] = ()
    monitor = "val/loss"
    unit = "samples"
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
        self.onlookers: list[Callable[[str, Any, Any], None]] = []  # are shown split, outputs and batch of each step
        self._logged_step = -1
        self._restored: dict[str, list[list[float]]] = {}
        self._restored_log: list[dict[str, Any]] = []
        self.latest: dict[str, float] = {}
        self._rows: list[tuple[dict[str, Any], int]] = []  # of logged steps, and their epochs, to be filled in
        self.fused_optimizer: bool | str = False  # auto: as one kernel where there is one
        self.schedule_repeats = 1  # how often a run goes through its schedule; who raises it starts the schedule again

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        written.check_signatures(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the running hook's name some forty times a step; a Module looks each up among parameters and
        # buffers first.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def metric_names(self) -> list[str]:
        """Every metric that this task reports, which a callback may monitor."""
        return [*(f"{split}/{metric}" for split in SPLITS for metric in self.reported), *self.logged]

    @property
    def reported(self) -> tuple[str, ...]:
        """The metrics of each split."""
        return (*self.metrics, *self.computed, *(() if self.meters is None else self.meters.names))

    def losses(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Named loss terms whose sum is trained on. Callbacks wrap this by replacing `objective`."""
        raise NotImplementedError

    def reduce(self, outputs: Any, batch: Any, loss: Tensor) -> Tensor:
        """Sums over the batch of each of `metrics`, and last the number of samples that count: [len(metrics) + 1],
        detached.

        `loss` is the mean over the counted samples.
        """
        raise NotImplementedError

    def scored(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Predictions and targets of the batch's rows that count, for `meters`."""
        raise NotImplementedError

    def compute(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics named in `computed`, from the means of `metrics`."""
        return {}

    def count_units(self, batch: Any) -> int:
        """How many of `unit` this process's batch holds."""
        return len(batch[0])

    def configure_callbacks(self) -> list[Any]:
        """Return none; in the first hook that knows the metrics, keep Lightning from advising `sync_dist` for them:
        sums of all ranks are added already.
        """
        names = "|".join(map(re.escape, self.metric_names))
        warnings.filterwarnings("ignore", message=rf".*recommended to use `self\.log\('({names})', .*sync_dist=True")
        return []

    def configure_model(self) -> None:
        """Lets the strategy spread the net over its devices, before the optimizer is built."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def optimizer_over(self, net: nn.Module, kernels: Mapping[str, Any] | None) -> Optimizer:
        """Another optimizer such as the run's, over another net, with these values of `fused` and `foreach`; None takes
        the quickest that there is.
        """
        return another_optimizer(self._make_optimizer, net, kernels)

    def has_default_step(self) -> bool:
        """Return whether `training_step` and `training_loss` are Task's own."""
        kind = type(self)
        return kind.training_step is Task.training_step and kind.training_loss is Task.training_loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss. To run several optimizer steps in one call later, override this one method: metrics add up
        in the same way.
        """
        return self.training_loss(self.net(batch[0]), batch)

    training_step.is_in_whole_step = True  # type: ignore[attr-defined]  # compile.scope=step does the same

    def training_loss(self, outputs: Any, batch: Any) -> Tensor:
        """The loss to train on, after adding the batch's metrics."""
        found = self.objective(outputs, batch)
        if not self._adding:
            written.check_losses(self, found)
        terms = list(found.values())
        loss = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
        self.add_training(outputs, batch, loss.detach())
        for look in self.onlookers:
            look("train", outputs, batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate_outputs("val", self.net(batch[0]), batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate_outputs("test", self.net(batch[0]), batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def evaluate_outputs(self, split: str, outputs: Any, batch: Any) -> None:
        """Adds the metrics of a batch that is not trained on."""
        found = self.losses(outputs, batch)
        if split not in self._sums:
            written.check_losses(self, found)
        loss = torch.stack(list(found.values())).sum()
        self._add(split, self.reduce(outputs, batch, loss))
        if self.meters is not None:
            self.meters.update(split, *self.scored(outputs, batch))
        for look in self.onlookers:
            look(split, outputs, batch)

    def split_batch(self, batch: Any, n: int) -> list[Any]:
        """A batch as `n` micro-batches along the first dimension; numbers, such as a count of targets, are shared out.

        Raises:
            UserError: the samples do not divide by `n`.
        """
        return microbatches(batch, n)

    def skippable_steps(self, trainer: Any) -> float:
        """Count the steps before the next logged one, which need no hook (`lathe.callbacks.SkippableHooks`)."""
        return steps_before(trainer, trainer.log_every_n_steps)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log_step()

    def _log_step(self) -> None:
        """Logs the mean since the last logged step, every `trainer.log_every_n_steps` optimizer steps."""
        trainer = self.trainer
        step, interval = trainer.global_step, trainer.log_every_n_steps
        if step > 0 and reached(trainer, interval) and step != self._logged_step and self._adding:
            self._logged_step = step
            self.latest = self._means("train", self._take("train"))
            self.write(self.latest)

    def write(self, metrics: dict[str, float]) -> None:
        """Sends metrics to all loggers at the current optimizer step."""
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
        self._rows.append((row, trainer.current_epoch))
        return row

    def complete_deferred_rows(self, trainer: Any) -> None:
        """Fill in the rows of logged steps, after a group of steps."""
        rows, self._rows = self._rows, []
        for (row, epoch), sums in zip(rows, self.ended(), strict=True):
            self.latest = self._means("train", sums)
            row.update(self.latest, epoch=epoch)

    def on_train_epoch_end(self) -> None:
        if self._adding:
            self._take("train")
        if "train" in self._epoch_sums:
            means = self._means("train", self._epoch_sums.pop("train")) | self._metered("train")
            self.write({f"{name}_epoch": value for name, value in means.items()})
            self._monitor(means, logger=False)

    def on_validation_epoch_end(self) -> None:
        self._report_split("val")

    def on_test_epoch_end(self) -> None:
        self._report_split("test")

    def _report_split(self, split: str) -> None:
        if split in self._sums:
            self._monitor(self._means(split, self._sums.pop(split)) | self._metered(split))

    def _metered(self, split: str) -> dict[str, float]:
        found = {} if self.meters is None else self.meters.take(split, self.trainer)
        return {f"{split}/{name}": value for name, value in found.items()}

    def _monitor(self, means: dict[str, float], logger: bool | None = None) -> None:
        """Hands metrics to callbacks and the bar; with `logger` null to the loggers too, and to what `validate` and
        `test` return.
        """
        exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in means.items()}
        self.log_dict(exact, logger=logger, prog_bar=not self.trainer.testing, rank_zero_only=False)

    def configure_optimizers(self) -> Any:
        return make_optimizers(self, self._make_optimizer, self._make_scheduler)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leaves the net's own plain names in `state_dict`, and keeps the metrics that are under way.

        What this step has to log is logged and on disk before the checkpoint is: callbacks save before this module's
        turn comes, and a continued run does not log the step again.
        """
        self._log_step()
        own = ranks.logs(self.trainer, self)
        for logger in self.trainer.loggers:
            logger.save()
        checkpoint["state_dict"] = {
            name.removeprefix("net."): value for name, value in checkpoint["state_dict"].items()
        }
        sums = ranks.tables(self._tables, self._nothing(), self.trainer)
        structure = structure_of(self.net)
        if structure:
            checkpoint["structure"] = structure
        # `held` tells sums that are not there from those that somebody has taken out
        checkpoint["task"] = {"sums": sums, "held": sorted(sums), "logged_step": self._logged_step, "log": own}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}
        state = checkpoint.get("task")
        if state is not None:
            self._logged_step, self._restored = state["logged_step"], state["sums"]
            self._restored_log = state.get("log", [])

    def on_train_start(self) -> None:
        for kind, rows in self._restored.items():
            self._tables[kind]["train"] = ranks.own_sums(rows, self.trainer, self._nothing())
        ranks.restore_logs(self._restored_log, self.trainer, self)
        self._restored, self._restored_log = {}, []
