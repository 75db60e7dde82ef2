"""A monitored metric that nothing logs is told at the end of the first validation, not after the run."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from lathe.config import did_you_mean
from lathe.errors import UserError


class Monitored(Callback):
    """Holds the metrics that callbacks monitor, `monitors` by their configuration key, against what was logged: after the first
    validation for those that look there, after that epoch for the others. A method of compression may report its own later.

    Raises:
        UserError: a metric is not among them; the sentence lists those that are.
    """

    def __init__(self, monitors: dict[str, str], early: dict[str, EarlyStopping]) -> None:
        self.monitors, self.early = dict(monitors), early
        self._validated = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and not self._validated:
            self._validated = True
            for key, callback in self.early.items():
                if not callback._check_on_train_epoch_end and callback.strict:
                    self._check(key, trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated and self.monitors:
            trainer.callback_metrics  # noqa: B018  # the epoch's means are made when they are asked for
            for key in list(self.monitors):
                self._check(key, trainer)
            self.monitors = {}

    def _check(self, key: str, trainer: Trainer) -> None:
        if self.monitors.get(key, "") and self.monitors[key] not in trainer.callback_metrics:
            raise UserError(
                f"{key}={self.monitors[key]}: no part of the run has logged it by the end of the first validation; "
                f"{did_you_mean(self.monitors[key], trainer.callback_metrics)}"
            )
