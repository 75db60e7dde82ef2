"""Resume learning-rate schedules: those planned for another length, and those that wait for a metric."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, OneCycleLR, SequentialLR

# attributes in which torch's schedulers keep the length they were made for, and which a checkpoint would restore
LENGTHS = ("total_steps", "T_max", "total_iters", "milestones", "_milestones", "_schedule_phases")


def replan(scheduler: Any, fresh: Mapping[str, Any]) -> list[str]:
    """Give a scheduler restored from a shorter run the length it was made for, and the rate at its place in it.

    torch restores a scheduler's length with its place: a run whose end is raised would resume with a OneCycleLR that
    refuses to step, or on the wrong side of a cosine. Positions and counts stay restored. So does a ChainedScheduler,
    whose rate does not follow from its place.

    Args:
        scheduler: of torch, or with the attributes of one.
        fresh: its `state_dict()` before the checkpoint's was loaded.

    Returns:
        The changes, such as "T_max=4 (was 2)"; empty where the lengths are equal.
    """
    if isinstance(scheduler, ChainedScheduler) or not hasattr(scheduler, "optimizer"):
        return []
    changed = _restore_lengths(scheduler, fresh)
    if not changed:
        return []
    active = scheduler
    while isinstance(active, SequentialLR):
        active = active._schedulers[bisect_right(active._milestones, active.last_epoch)]
    rates = _rates(active)
    if rates is not None:
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        scheduler._last_lr = active._last_lr = rates
    return changed


def _restore_lengths(scheduler: Any, fresh: Mapping[str, Any]) -> list[str]:
    changed, own = [], vars(scheduler)
    for name in LENGTHS:
        if name in fresh and own.get(name, fresh[name]) != fresh[name]:
            if name != "_schedule_phases":  # these follow from total_steps
                now, was = (sorted(x) if isinstance(x, Mapping) else x for x in (fresh[name], own[name]))
                changed.append(f"{name.strip('_')}={now} (was {was})")
            setattr(scheduler, name, fresh[name])
    for part, state in zip(getattr(scheduler, "_schedulers", ()), fresh.get("_schedulers", ()), strict=False):
        changed += [] if isinstance(part, ChainedScheduler) else _restore_lengths(part, state)
    return changed


def _rates(scheduler: Any) -> list[float] | None:
    """Return the learning rates at the scheduler's place, or None where they depend on more than that."""
    if isinstance(scheduler, OneCycleLR):
        scheduler._get_lr_called_within_step = True
        try:
            return [float(rate) for rate in scheduler.get_lr()]
        finally:
            scheduler._get_lr_called_within_step = False
    closed = getattr(scheduler, "_get_closed_form_lr", None)
    return None if closed is None else [float(rate) for rate in closed()]


class PlateauResume:
    """Steps that a resumed run owes to schedulers with `reduce_on_plateau` of a user's LightningModule.

    Lightning 2.6 steps a ReduceLROnPlateau after the checkpoint of the same moment is written, saves no metric for it,
    and skips it in the first epoch after a resume: such a run lacks one of its steps. Here a checkpoint holds which
    steps are owed and the metrics for them, and the resumed run takes them first.
    """

    def __init__(self, loop: Any, state: dict[str, Any] | None) -> None:
        """Begin with the `state` of a checkpoint, and take the steps of an epoch that the run does not end again."""
        self.loop, self.trainer = loop, loop.trainer
        self._restored = state is not None  # whether the checkpoint has all this
        state = state or {"owed": [], "epoch": -1, "values": {}, "stepped": {}}
        self._owed: list[int] = list(state["owed"])  # indices of the schedulers with a step to take
        self._values: dict[str, float] = dict(state["values"])  # metrics for the owed steps
        # epoch, or epoch and batch, of each scheduler's last step
        self._stepped: dict[int, list[int]] = dict(state["stepped"])
        if self.trainer.current_epoch > state["epoch"]:
            self.step_owed()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        configs = self._configs()
        values = {config.monitor: self.value(config.monitor) for config in configs.values()}
        return {
            "owed": [index for index, config in configs.items() if index in self._owed or self._is_due(index, config)],
            "epoch": self.trainer.current_epoch,
            "values": {name: float(value) for name, value in values.items() if value is not None},
            "stepped": dict(self._stepped),
        }

    def value(self, monitor: str) -> Any:
        """Return a metric as reported last, by this process or before the checkpoint; None if it never was."""
        reported = self.trainer.callback_metrics.get(monitor)
        return self._values.get(monitor) if reported is None else reported

    def can_step_at_epoch_end(self) -> bool:
        """Return whether the metrics are known that schedulers need at the first epoch's end after a resume."""
        monitors = [config.monitor for config in self._configs().values() if config.interval == "epoch"]
        return self._restored or (bool(monitors) and all(self.value(monitor) is not None for monitor in monitors))

    def note_stepped(self, interval: str) -> None:
        """Note that Lightning has stepped the schedulers of this interval that were due."""
        for index, config in self._configs().items():
            if config.interval == interval and self._ends_period(config):
                self._stepped[index] = self._place(interval)
                self._owed = [owed for owed in self._owed if owed != index]

    def step_owed(self) -> None:
        """Take the owed steps, before the next batch, but for those whose metric the checkpoint did not know either."""
        owed, self._owed = self._owed, []
        for index in owed:
            config = self.trainer.lr_scheduler_configs[index]
            if (value := self.value(config.monitor)) is not None:
                self.loop.scheduler_progress.increment_ready()
                call._call_lightning_module_hook(self.trainer, "lr_scheduler_step", config.scheduler, value)
                self.loop.scheduler_progress.increment_completed()

    def _configs(self) -> dict[int, Any]:
        return {
            index: config for index, config in enumerate(self.trainer.lr_scheduler_configs) if config.reduce_on_plateau
        }

    def _place(self, interval: str) -> list[int]:
        epoch = self.trainer.current_epoch
        return [epoch, self.loop.batch_idx] if interval == "step" else [epoch]

    def _ends_period(self, config: Any) -> bool:
        return bool((self._place(config.interval)[-1] + 1) % config.frequency == 0)

    def _is_due(self, index: int, config: Any) -> bool:
        """Return whether the scheduler's step is due and Lightning has not taken it yet."""
        loop, batches = self.loop, self.loop.batch_progress.current
        if batches.processed != batches.ready or batches.ready == 0 or not self._ends_period(config):
            return False
        ended = loop._num_ready_batches_reached() if config.interval == "epoch" else not loop._should_accumulate()
        return bool(ended) and self._stepped.get(index) != self._place(config.interval)
