"""A run's optimizer, and its scheduler: stepped after every optimizer step, after every epoch, or with a metric."""

import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau

from lathe.errors import ArgumentError, UserError, did_you_mean, under
from lathe.optim.build import factory_of
from lathe.optim.foreign import build_scheduler, counted_in_steps, wants_length
from lathe.optim.kernels import with_kernels
from lathe.optim.plan import Plan, direction, monitored, plan_of

KEY = "trainer.fused_optimizer=auto"
NEVER = 2**62  # a frequency in which Lightning leaves a scheduler to `Stepping`


def make_optimizers(task: Any, make: Any, scheduled: Any) -> Any:
    """What Lightning's `configure_optimizers` returns of a task, by what makes its optimizer and its scheduler."""
    if make is None:
        return None
    with under("optimizer"):
        optimizer = _kernels(task, factory_of(make))(task.net)
    trainer = getattr(task, "_trainer", None)  # None: in nobody's hands yet
    if trainer is not None and getattr(trainer.precision_plugin, "scaler", None) is None:
        vars(optimizer)["_step_supports_amp_scaling"] = False  # by which Lightning refuses to clip what nothing scales
    if scheduled is None:
        return optimizer
    with under("scheduler"):
        return {"optimizer": optimizer, "lr_scheduler": make_scheduler(scheduled, optimizer, task)}


def another_optimizer(make: Any, net: nn.Module, kernels: Mapping[str, Any] | None) -> Optimizer:
    """What makes a run's optimizer, called for another net; `kernels` as `Task.optimizer_over` has them."""
    factory = factory_of(make)
    factory = with_kernels(factory, net.parameters(), False)[0] if kernels is None else partial(factory, **kernels)
    optimizer: Optimizer = factory(net)
    return optimizer


def _kernels(task: Any, factory: Any) -> Any:
    """`factory` with what `trainer.fused_optimizer` asks for."""
    if not task.fused_optimizer:
        return factory
    trainer = task.trainer
    whole = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not whole or isinstance(trainer.strategy, DeepSpeedStrategy):
        line = f": the optimizer's step stays as it is under {type(trainer.strategy).__name__}."
    elif "whole_step" in vars(task.driven):
        line = ": the optimizer's step stays as it is, since compile.scope=step compiles it."
    else:
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        factory, line = with_kernels(factory, task.net.parameters(), scaled and bool(trainer.gradient_clip_val))
    if trainer.is_global_zero:
        print(f"{KEY}{line}", flush=True)
    return factory


def make_scheduler(made: Any, optimizer: Optimizer, task: Any) -> dict[str, Any]:
    """Lightning's mapping of the scheduler that `made` makes of the optimizer, planned for the run's steps or epochs.
    In a run that goes through its schedule several times (`task.schedule_repeats`), planned for each of the equal
    parts.

    Raises:
        UserError: the scheduler plans for an end, and the run has none, or no step at all; or what is to be repeated
            does not count optimizer steps.
    """
    trainer, plan = task.trainer, plan_of(made)
    if task.schedule_repeats > 1 and not plan.plain:
        raise UserError(
            "compression.lottery goes through the schedule again in each round, by optimizer steps: leave out "
            "scheduler.interval and scheduler.frequency, and a scheduler that waits for a metric."
        )
    factory = plan.with_mode(direction(plan, task)) if plan.waits else plan.factory
    scheduler = build_scheduler(factory, optimizer, _length(plan, trainer, task.schedule_repeats))
    if isinstance(scheduler, ReduceLROnPlateau) and not plan.waits:
        raise ArgumentError("_target_ makes a ReduceLROnPlateau: name that class itself, with its monitor.")
    line = counted_in_steps(factory) if plan.interval is None and not plan.waits else None
    if line is not None and trainer.is_global_zero:
        print(line)
    if plan.plain:
        return {"scheduler": scheduler, "interval": "step"}
    trainer.callbacks.insert(0, Stepping(scheduler, plan, monitored(plan, task) if plan.waits else ""))
    return {"scheduler": scheduler, "interval": "step", "frequency": NEVER, "reduce_on_plateau": False}


def _length(plan: Plan, trainer: Trainer, repeats: int) -> int | None:
    """How often a scheduler that plans for the run's end will be stepped; None for others."""
    if not wants_length(plan.factory):
        return None
    if plan.interval == "epoch":
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            raise UserError(
                "scheduler.interval=epoch: the scheduler plans for the run's epochs, so set trainer.max_epochs."
            )
        return max(trainer.max_epochs // plan.frequency, 1)
    total = trainer.estimated_stepping_batches
    if total == float("inf"):
        raise UserError(
            "trainer.max_epochs=-1 and trainer.max_steps=-1 have no end for the scheduler to plan for: set one of them."
        )
    if total < 0:
        raise UserError(
            f"The scheduler cannot plan a run of {total} steps: set trainer.max_epochs or trainer.max_steps, and "
            "trainer.limit_train_batches above 0."
        )
    return int(total) // repeats // plan.frequency


def check_lengths(trainer: Trainer) -> None:
    """Holds torch's OneCycleLR, which ends with an error, against what is left of the run.

    Raises:
        UserError: the run is longer than one of them.
    """
    if not trainer.lightning_module.automatic_optimization:
        return
    for config in trainer.lr_scheduler_configs:
        if not isinstance(config.scheduler, OneCycleLR):
            continue
        left = config.scheduler.total_steps - config.scheduler.last_epoch
        if config.interval == "epoch":
            end, done = trainer.max_epochs, trainer.current_epoch
        else:
            end, done = int(min(trainer.estimated_stepping_batches, NEVER)), trainer.global_step
        if end is None or not 0 <= end < NEVER or (end - done) // config.frequency <= left:
            continue
        unit = "epochs" if config.interval == "epoch" else "steps"
        raise UserError(
            f"The learning rate's schedule refuses to go on after {left} more {unit} (OneCycleLR), and this run makes "
            f"{end - done}: plan it for them, as by total_steps=self.trainer.estimated_stepping_batches, or let the "
            "run end sooner (trainer.max_epochs, trainer.max_steps)."
        )


class Stepping(Callback):
    """Steps a scheduler that counts epochs, every n-th optimizer step or validations.

    In Lightning's own places, an epoch's step falls behind the checkpoint of its end, and one with a metric behind that
    of its validation: a run that goes on from either would lack the step, or take it twice. Here it is the state that
    says how many steps are due, and all ranks see the metric of the first.
    """

    def __init__(self, scheduler: LRScheduler, plan: Plan, monitor: str) -> None:
        self.scheduler, self.plan, self.monitor = scheduler, plan, monitor

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plan.interval == "epoch" and not self.plan.waits:
            self._catch_up(trainer.current_epoch // self.plan.frequency)

    every_step = ("on_train_batch_end",)

    def skippable_steps(self, trainer: Trainer) -> float:
        """Return inf: the hook that acts at each step is in `every_step`."""
        return math.inf

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.plan.interval in (None, "step") and not self.plan.waits:
            self._catch_up(trainer.global_step // self.plan.frequency)

    def _catch_up(self, due: int) -> None:
        chained = self.scheduler
        while isinstance(chained, ChainedScheduler):  # which counts nothing itself
            chained = chained._schedulers[0]
        while chained.last_epoch < due:
            before = chained.last_epoch
            with warnings.catch_warnings():  # the optimizer of a continued run has not made a step yet
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.scheduler.step()
            if chained.last_epoch <= before:
                break  # one of the user's own that counts otherwise takes a step at a time

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.plan.waits or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        state: Any = self.scheduler  # whose attributes are its state in checkpoints
        if getattr(state, "validated_step", None) == trainer.global_step:
            return  # a continued run validates again
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            hint = did_you_mean(self.monitor, list(trainer.callback_metrics))
            raise UserError(f"scheduler.monitor={self.monitor}: no validation has reported it; {hint}")
        state.validated_step = trainer.global_step
        state.validations = getattr(state, "validations", 0) + 1
        if state.validations % self.plan.frequency == 0:
            state.step(trainer.strategy.broadcast(float(value)))
