"""Build the optimizer and the scheduler, which steps after optimizer steps, after epochs, or with a metric."""

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
from lathe.optim.build import factory_of, with_kernels
from lathe.optim.plan import Plan, build_scheduler, counted_in_steps, direction, monitored, plan_of, wants_length

KEY = "trainer.fused_optimizer=auto"
NEVER = 2**62  # as a frequency: Lightning leaves a scheduler to `SchedulerCallback`


def make_optimizers(task: Any, make: Any, scheduled: Any) -> Any:
    """Return what `configure_optimizers` of a task returns, from the factories of its optimizer and scheduler."""
    if make is None:
        return None
    with under("optimizer"):
        optimizer = _kernels(task, factory_of(make))(task.net)
    trainer = getattr(task, "_trainer", None)  # None: not attached to a Trainer yet
    if trainer is not None and getattr(trainer.precision_plugin, "scaler", None) is None:
        vars(optimizer)["_step_supports_amp_scaling"] = False  # else Lightning refuses to clip, though nothing scales
    if scheduled is None:
        return optimizer
    with under("scheduler"):
        return {"optimizer": optimizer, "lr_scheduler": make_scheduler(scheduled, optimizer, task)}


def another_optimizer(make: Any, net: nn.Module, kernels: Mapping[str, Any] | None) -> Optimizer:
    """Return the run's optimizer over another net; `kernels` as in `Task.optimizer_over`."""
    factory = factory_of(make)
    factory = with_kernels(factory, net.parameters(), False)[0] if kernels is None else partial(factory, **kernels)
    optimizer: Optimizer = factory(net)
    return optimizer


def _kernels(task: Any, factory: Any) -> Any:
    """Return `factory` with the kernels that `trainer.fused_optimizer` asks for."""
    if not task.fused_optimizer:
        return factory
    trainer = task.trainer
    whole = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not whole or isinstance(trainer.strategy, DeepSpeedStrategy):
        line = f": no effect under {type(trainer.strategy).__name__}."
    elif "whole_step" in vars(task.driven):
        line = ": no effect, as compile.scope=step compiles the optimizer's step."
    else:
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        factory, line = with_kernels(factory, task.net.parameters(), scaled and bool(trainer.gradient_clip_val))
    if trainer.is_global_zero:
        print(f"{KEY}{line}", flush=True)
    return factory


def make_scheduler(made: Any, optimizer: Optimizer, task: Any) -> dict[str, Any]:
    """Return Lightning's mapping of the scheduler that `made` makes, planned for the run's steps or epochs, or for each
    of the equal parts of a run that repeats its schedule (`task.schedule_repeats`).

    Raises:
        UserError: the scheduler plans for an end, and the run has none, or no steps; or a repeated schedule does not
            count optimizer steps.
    """
    trainer, plan = task.trainer, plan_of(made)
    if task.schedule_repeats > 1 and not plan.plain:
        raise UserError(
            "compression.lottery repeats a schedule of optimizer steps: leave out scheduler.interval and "
            "scheduler.frequency, and use no scheduler with a monitor."
        )
    factory = plan.with_mode(direction(plan, task)) if plan.waits else plan.factory
    scheduler = build_scheduler(factory, optimizer, _length(plan, trainer, task.schedule_repeats))
    if isinstance(scheduler, ReduceLROnPlateau) and not plan.waits:
        raise ArgumentError("_target_ returns a ReduceLROnPlateau: use that class itself, with its monitor.")
    line = counted_in_steps(factory) if plan.interval is None and not plan.waits else None
    if line is not None and trainer.is_global_zero:
        print(line)
    if plan.plain:
        return {"scheduler": scheduler, "interval": "step"}
    trainer.callbacks.insert(0, SchedulerCallback(scheduler, plan, monitored(plan, task) if plan.waits else ""))
    return {"scheduler": scheduler, "interval": "step", "frequency": NEVER, "reduce_on_plateau": False}


def _length(plan: Plan, trainer: Trainer, repeats: int) -> int | None:
    """Return the number of steps of a scheduler that plans for the run's end; None for others."""
    if not wants_length(plan.factory):
        return None
    if plan.interval == "epoch":
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            raise UserError("scheduler.interval=epoch requires trainer.max_epochs.")
        return max(trainer.max_epochs // plan.frequency, 1)
    total = trainer.estimated_stepping_batches
    if total == float("inf"):
        raise UserError("The scheduler requires an end of the run: set trainer.max_epochs or trainer.max_steps.")
    if total < 0:
        raise UserError(
            f"The scheduler cannot plan a run of {total} steps: set trainer.max_epochs or trainer.max_steps, and "
            "trainer.limit_train_batches above 0."
        )
    return int(total) // repeats // plan.frequency


def check_lengths(trainer: Trainer) -> None:
    """Compare torch's OneCycleLR, which raises after its last step, with the rest of the run.

    Raises:
        UserError: the run is longer.
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
            f"OneCycleLR ends after {left} more {unit}, and this run takes {end - done}. Use "
            "total_steps=self.trainer.estimated_stepping_batches, or a shorter run."
        )


class SchedulerCallback(Callback):
    """Step a scheduler that counts epochs, every n-th optimizer step, or validations.

    Lightning steps after the checkpoint of an epoch's end, and after that of a validation: a run resumed from either
    would miss the step, or take it twice. Here the state determines how many steps are due, and all ranks use the
    metric of rank 0.
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
        while isinstance(chained, ChainedScheduler):  # it has no counter
            chained = chained._schedulers[0]
        while chained.last_epoch < due:
            before = chained.last_epoch
            with warnings.catch_warnings():  # the optimizer of a resumed run has not stepped yet
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.scheduler.step()
            if chained.last_epoch <= before:
                break  # a user's scheduler that counts otherwise takes one step at a time

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.plan.waits or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        state: Any = self.scheduler  # its attributes are its state in checkpoints
        if getattr(state, "validated_step", None) == trainer.global_step:
            return  # a resumed run validates again
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            hint = did_you_mean(self.monitor, list(trainer.callback_metrics))
            raise UserError(f"scheduler.monitor={self.monitor}: no validation reports it; {hint}")
        state.validated_step = trainer.global_step
        state.validations = getattr(state, "validations", 0) + 1
        if state.validations % self.plan.frequency == 0:
            state.step(trainer.strategy.broadcast(float(value)))
