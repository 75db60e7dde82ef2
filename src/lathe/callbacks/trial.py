"""Report validations to Optuna and stop pruned runs."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn


class TrialReport(Callback):
    """Report `monitor` to an Optuna `trial` (rank 0's) after each validation, and stop if it is pruned.

    The step of a report is the number of validations; `pruned` is the optimizer step of the stop. The last validation
    does not prune.
    """

    def __init__(self, trial: Any, monitor: str) -> None:
        self.trial, self.monitor = trial, monitor
        self.pruned: int | None = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value = trainer.callback_metrics.get(self.monitor)
        stop = self.trial is not None and value is not None and self._behind(trainer, float(value))
        if trainer.strategy.broadcast(stop):
            self.pruned, trainer.should_stop = trainer.global_step, True

    def _behind(self, trainer: Trainer, value: float) -> bool:
        step = validations(trainer)
        if step not in self.trial.storage.get_trial(self.trial._trial_id).intermediate_values:  # unless repeated
            self.trial.report(value, step)
        return not at_end(trainer) and bool(self.trial.should_prune())


def at_end(trainer: Trainer) -> bool:
    """Return whether training ends with this validation anyway."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
    return 0 <= steps <= trainer.global_step or (last_epoch and trainer.is_last_batch)


def validations(trainer: Trainer) -> int:
    """Count the validations, including this one; the same after a resume."""
    every = trainer.val_check_batch
    if isinstance(every, int) and every < trainer.num_training_batches:
        return round((trainer.fit_loop.total_batch_idx + 1) / every)
    return (trainer.current_epoch + 1) // (trainer.check_val_every_n_epoch or 1)
