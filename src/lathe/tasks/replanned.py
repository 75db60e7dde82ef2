"""Schedules that a checkpoint knows as planned for another length than the run has now."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, OneCycleLR, SequentialLR

# What torch's schedulers keep of the length that they were made for, and the checkpoint's state would bring back.
LENGTHS = ("total_steps", "T_max", "total_iters", "milestones", "_milestones", "_schedule_phases")


def replan(scheduler: Any, fresh: Mapping[str, Any]) -> list[str]:
    """Takes the length back that a scheduler was made for, after its state was restored from a checkpoint of a run that
    was planned to be shorter, and gives the optimizer the rate that belongs to this place in the longer schedule.

    torch restores a scheduler's length with its place: a run whose end is raised would go on with a OneCycleLR that
    refuses to be stepped, or along the wrong side of a cosine. Positions, counts and what is no length stay restored,
    and so does a ChainedScheduler, whose rate can't be told from its place.

    Args:
        scheduler: of torch, or whatever has its attributes.
        fresh: its `state_dict()` before the checkpoint's was loaded.

    Returns:
        What has changed, such as "T_max=4 (was 2)"; nothing where lengths are the same.
    """
    if isinstance(scheduler, ChainedScheduler) or not hasattr(scheduler, "optimizer"):
        return []
    changed = _changed(scheduler, fresh)
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


def _changed(scheduler: Any, fresh: Mapping[str, Any]) -> list[str]:
    said = []
    for name in LENGTHS:
        if name in fresh and vars(scheduler).get(name, fresh[name]) != fresh[name]:
            if name != "_schedule_phases":  # which follow from total_steps
                said.append(f"{name.strip('_')}={_text(fresh[name])} (was {_text(vars(scheduler)[name])})")
            setattr(scheduler, name, fresh[name])
    for part, own in zip(getattr(scheduler, "_schedulers", ()), fresh.get("_schedulers", ()), strict=False):
        said += [] if isinstance(part, ChainedScheduler) else _changed(part, own)
    return said


def _text(value: Any) -> str:
    return str(sorted(value) if isinstance(value, Mapping) else value)


def _rates(scheduler: Any) -> list[float] | None:
    """The learning rates at its place, where they follow from it alone."""
    if isinstance(scheduler, OneCycleLR):
        scheduler._get_lr_called_within_step = True
        try:
            return [float(rate) for rate in scheduler.get_lr()]
        finally:
            scheduler._get_lr_called_within_step = False
    if hasattr(scheduler, "_get_closed_form_lr"):
        return [float(rate) for rate in scheduler._get_closed_form_lr()]
    return None
