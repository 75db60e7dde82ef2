"""What every task shares: optimizers, running sums of its metrics, and plain names in checkpoints."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.compression.structure import structure_of
from lathe.tasks import logged, ranks, written
from lathe.tasks.driven import Driven
from lathe.tasks.loops import until
from lathe.tasks.meters import SPLITS, Meters
from lathe.tasks.microbatches import microbatches
from lathe.tasks.older import refuse_older_names
from lathe.tasks.scheduler import make_optimizers

Objective = Callable[[Any, Any], dict[str, Tensor]]
MOST_WAITING = 16  # batches whose sums are made together


class Task(Driven):
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
        self.onlookers: list[Callable[[str, Any, Any], None]] = []  # are shown split, outputs and batch of evaluations
        self._sums: dict[str, Tensor] = {}
        self._waiting: list[tuple[Any, Any, Tensor]] = []  # outputs, batch and loss of steps that are not in the sums
        self._epoch_sums: dict[str, Tensor] = {}
        self._logged_step = -1
        self._restored: dict[str, list[list[float]]] = {}
        self._restored_log: list[dict[str, Any]] = []
        self.latest: dict[str, float] = {}
        self.schedule_repeats = 1  # how often a run goes through its schedule; who raises it starts the schedule again

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_older_names(cls)
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

    def reduce_later(self, outputs: Any, batch: Any) -> bool:
        """Whether the sums of this batch of training may wait for those of the next ones, to be made together by
        `reduce_several`: a small net's step is as short as a dozen operations on a small batch are.
        """
        return False

    def reduce_several(self, waiting: list[tuple[Any, Any, Tensor]]) -> Tensor:
        """What `reduce` makes of each (outputs, batch, loss), of equal shapes, in one: [batches, len(metrics) + 1]."""
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
        """None; the first hook that knows the Trainer sees to it that `self.log` writes in the row of its optimizer
        step.
        """
        logged.install(self.trainer)
        logged.silence(self.metric_names)  # their ranks' sums are added up already; a user's own are not
        return []

    def configure_model(self) -> None:
        """Lets the strategy spread the net over its devices, before the optimizer is built."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss. To run several optimizer steps in one call later, override this one method: metrics add up
        in the same way.
        """
        return self.training_loss(self.net(batch[0]), batch)

    def training_loss(self, outputs: Any, batch: Any) -> Tensor:
        """The loss to train on, after adding the batch's metrics."""
        found = self.objective(outputs, batch)
        if "train" not in self._sums:
            written.check_losses(self, found)
        terms = list(found.values())
        loss = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
        self.add_training(outputs, batch, loss.detach())
        return loss

    def add_training(self, outputs: Any, batch: Any, loss: Tensor) -> None:
        """Adds the metrics of a batch that is trained on; `loss` without its graph."""
        if "train" in self._sums and self.reduce_later(outputs, batch):
            self._wait(outputs.detach(), batch, loss)
        else:
            self._settle()
            self._add("train", self.reduce(outputs, batch, loss))
        if self.meters is not None:
            self.meters.update("train", *self.scored(outputs.detach(), batch))

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

    def add_nothing(self, split: str) -> None:
        """What a rank that sees no outputs adds (all but the last stage of a pipeline), so that every rank has a sum to
        report.
        """
        self._add(split, self._nothing())

    def _nothing(self) -> Tensor:
        return torch.zeros(len(self.metrics) + 1, dtype=torch.float32, device=self.device)

    @property
    def _tables(self) -> dict[str, dict[str, Tensor]]:
        """The sums under way, by what they are reset after, and by split."""
        self._settle()
        return {"window": self._sums, "epoch": self._epoch_sums}

    def split_batch(self, batch: Any, n: int) -> list[Any]:
        """A batch as `n` micro-batches along the first dimension; numbers, such as a count of targets, are shared out.

        Raises:
            UserError: the samples do not divide by `n`.
        """
        return microbatches(batch, n)

    def _add(self, split: str, sums: Tensor) -> None:
        total = self._sums.get(split)
        if total is None:
            written.check_sums(self, sums)
        self._sums[split] = sums if total is None else total + sums

    def _wait(self, outputs: Tensor, batch: Any, loss: Tensor) -> None:
        if self._waiting and (len(self._waiting) == MOST_WAITING or self._waiting[0][0].shape != outputs.shape):
            self._settle()
        self._waiting.append((outputs, batch, loss))

    def _settle(self) -> None:
        """Adds up what waits, one batch after the other: the same digits as if none had waited."""
        if self._waiting:
            rows = self.reduce_several(self._waiting)
            self._waiting = []
            total = self._sums["train"]
            added = np.add.accumulate(torch.cat((total[None], rows)).numpy(), axis=0, dtype=np.float32)
            self._sums["train"] = torch.from_numpy(added[-1].copy())

    def quiet_steps(self, trainer: Any) -> float:
        """How many of the next optimizer steps its hooks of a batch can do without: those before one that is logged."""
        return until(trainer.global_step, trainer.log_every_n_steps)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log_step()

    def _log_step(self) -> None:
        """Logs the mean since the last logged step, every `trainer.log_every_n_steps` optimizer steps."""
        step, interval = self.trainer.global_step, self.trainer.log_every_n_steps  # type: ignore[attr-defined]  # a connector sets it
        if step > 0 and step % interval == 0 and step != self._logged_step and "train" in self._sums:
            self._logged_step = step
            self.latest = self._means("train", self._take("train"))
            self.write(self.latest)

    def _take(self, split: str) -> Tensor:
        """The sums since the last call; those of training are also added to the epoch's."""
        self._settle()
        sums = self._sums.pop(split)
        if split == "train":
            epoch = self._epoch_sums.get(split)
            self._epoch_sums[split] = sums if epoch is None else epoch + sums
        return sums

    def _means(self, split: str, sums: Tensor) -> dict[str, float]:
        if self.trainer.world_size > 1:
            sums = self.trainer.strategy.reduce(sums.clone(), reduce_op="sum")
        *values, count = sums.tolist()
        if not count:
            return {}
        means = {name: value / count for name, value in zip(self.metrics, values, strict=True)}
        return {f"{split}/{name}": value for name, value in {**means, **self.compute(means)}.items()}

    def write(self, metrics: dict[str, float]) -> None:
        """Sends metrics to all loggers at the current optimizer step."""
        for logger in self.trainer.loggers:
            logger.log_metrics({**metrics, "epoch": self.trainer.current_epoch}, step=self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        if "train" in self._sums:
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
        checkpoint["task"] = {"sums": sums, "logged_step": self._logged_step, "log": own}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}
        state = checkpoint.get("task")
        if state is not None:
            self._logged_step, self._restored = state["logged_step"], state["sums"]
            self._restored_log = state.get("log", [])

    def on_train_start(self) -> None:
        for kind, rows in self._restored.items():
            self._tables[kind]["train"] = ranks.own_sums(rows, self.trainer, self.device)
        ranks.restore_logs(self._restored_log, self.trainer, self)
        self._restored, self._restored_log = {}, []
