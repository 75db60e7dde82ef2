"""Predicates on the state of Lightning's loops."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer


def ends(trainer: Trainer) -> list[float | None]:
    """Return the limits that end the run: epochs, steps, and Timer's seconds (`trainer.max_time`)."""
    timers = [callback._duration for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    return [trainer.max_epochs, trainer.max_steps, *timers]


def stop_is_due(trainer: Trainer) -> bool:
    """Return whether the run ends with this epoch because a stop was requested."""
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def validation_follows(trainer: Trainer) -> bool:
    """Return whether Lightning validates right after the batch that has just ended."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and loop._should_check_val_fx(fetcher)
