"""How many steps can do without whoever wants to be called for a batch."""

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.tasks.loops.step import HOOKS


def until(step: int, every: int | None) -> float:
    """How many steps after `step` come before the one that `every` divides."""
    return every - 1 - step % every if every else math.inf


def _until_logged(trainer: Any) -> float:
    return until(trainer.global_step, trainer.log_every_n_steps)


# Lightning's own that act at steps that are logged
LIGHTNINGS: dict[type, Callable[[Any], float]] = dict.fromkeys((LearningRateMonitor, DeviceStatsMonitor), _until_logged)


def unknown_part(module: Any) -> str | None:
    """What a step of it goes through that is the user's own, and may log or look at anything; None if nothing is."""
    for name in (*HOOKS, "training_step", "losses", "reduce", "scored"):
        if name in vars(module) or not getattr(type(module), name).__module__.startswith(("lathe.", "lightning.")):
            return name
    return "log" if module.logs_more else None


def says(callback: Callback, hooks: list[str]) -> Callable[[Any], float] | None:
    """Its word for how many steps can do without its hooks; that of a class does not hold for those of a subclass."""
    if type(callback) in LIGHTNINGS:
        return LIGHTNINGS[type(callback)]
    kinds = type(callback).__mro__

    def place(name: str) -> int:
        return next((number for number, kind in enumerate(kinds) if name in vars(kind)), len(kinds))

    said = place("quiet_steps")
    left_out = [name for name in hooks if name not in getattr(callback, "each_step", ())]
    held = said < len(kinds) and all(place(name) >= said and name not in vars(callback) for name in left_out)
    return callback.quiet_steps if held else None  # type: ignore[attr-defined]


_TOLD: set[Any] = set()


def tell(part: Any, name: str) -> None:
    """Once, which method of the user's own makes a run go step by step."""
    if not type(part).__module__.startswith(("lathe.", "lightning.")):
        tell_looker(
            f"{type(part).__name__}.{name}", type(part), "; what quiet_steps says of it makes short steps cheaper"
        )


@rank_zero_only
def tell_looker(name: str, key: Any, way: str = "") -> None:
    """Once for each `key`, what makes a run go step by step."""
    if key not in _TOLD:
        _TOLD.add(key)
        print(
            f"trainer.steps_per_call=auto: {name} may want to see every step, so each is made by itself{way} "
            "(docs/running.md).",
            flush=True,
        )
