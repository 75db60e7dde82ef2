"""best.ckpt and last.ckpt, written whole or not at all, at the moments from which a run continues bit for bit."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as CheckpointBase
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.callbacks.checkpoint_io import AsyncCheckpointIO
from lathe.callbacks.compression import compressions
from lathe.config import did_you_mean
from lathe.errors import UserError


class Checkpoint(CheckpointBase):
    """Keeps the best epoch by a monitored figure (of equals the later, which has trained longer), and the newest state. An epoch counts
    once every method of compression has the net as it will ship: one that was better while it was larger is no result.

    last.ckpt is written after every `every_n_epochs` epochs (null: after the last alone), and every `every_n_train_steps` optimizer
    steps. Where a validation is due after such a step it is written after the validation, so that a continued run neither misses nor
    repeats one.

    `dirpath` null means checkpoints/ in the run directory. The key `async`, whose name Python keeps for itself, writes files in a thread
    while training goes on.

    Raises:
        UserError: a mode that is neither max nor min, an interval that is not positive, a key that is not known, or `async` with a
            checkpoint that ranks write together.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        monitor: str | None = "val/accuracy",
        mode: str = "max",
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = 1,
        **options: bool,
    ) -> None:
        super().__init__()
        self.asynchronous = options.pop("async", False)
        for key in options:
            known = ("dirpath", "monitor", "mode", "every_n_train_steps", "every_n_epochs", "async")
            raise UserError(f"callbacks.checkpoint.{key}: there is no such key; {did_you_mean(key, known)}")
        if mode not in ("max", "min"):
            raise UserError(f"callbacks.checkpoint.mode={mode!r}: choose max or min.")
        for key, value in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None and value < 1:
                raise UserError(f"callbacks.checkpoint.{key}={value}: give a whole number from 1, or null.")
        self._dirpath = Path(dirpath) if dirpath else None
        self.monitor, self.mode = monitor, mode
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps, every_n_epochs
        self.best_score: float | None = None
        self.best_step = 0
        self.best_metrics: dict[str, float] = {}
        self._saved_step = -1
        self._due = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._dirpath is None:
            self._dirpath = Path(trainer.default_root_dir) / "checkpoints"
        writer = trainer.strategy.checkpoint_io
        if self.asynchronous and getattr(trainer.strategy, "_save_distributed_checkpoint", False):
            raise UserError(
                "callbacks.checkpoint.async=true writes a file in a thread, strategy.checkpoint=sharded a folder by each rank: drop one."
            )
        if self.asynchronous and not isinstance(writer, AsyncCheckpointIO):
            trainer.strategy.checkpoint_io = AsyncCheckpointIO(getattr(writer, "read_folder", None))

    def path(self, name: str) -> Path:
        """Where checkpoint `name` (best or last) is."""
        assert self._dirpath is not None
        return self._dirpath / f"{name}.ckpt"

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.every_n_train_steps:
            return
        step = trainer.global_step
        if step == self._saved_step or step % self.every_n_train_steps or trainer.fit_loop._should_accumulate():
            return
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return  # the end of the epoch is a moment later, and writes it
        if _validation_follows(trainer):
            self._due = True
        else:
            self.save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._keep_best(trainer)
        if self._due:
            self.save_last(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        last_epoch = epoch == trainer.max_epochs or trainer.should_stop or trainer.global_step == trainer.max_steps
        unmonitored = self.monitor is None
        if last_epoch and not unmonitored and self.best_score is None:
            late = [type(method).__name__ for method in compressions(trainer) if not method.ready(trainer)]
            reason = (
                f"{' and '.join(late)} ended with the run" if late else f"{self.monitor} was never reported (no validation ran?)"
            )
            rank_zero_warn(f"{reason}, so best.ckpt is the newest state.")
            unmonitored = True
        if unmonitored:
            self.save(trainer, "best")
        if last_epoch or (self.every_n_epochs and epoch % self.every_n_epochs == 0):
            self.save_last(trainer)

    def save_last(self, trainer: Trainer) -> None:
        """Writes last.ckpt."""
        self._due, self._saved_step = False, trainer.global_step
        self.save(trainer, "last")

    @property
    def saved_step(self) -> int:
        """The optimizer step of the newest last.ckpt that this process wrote; -1 before the first."""
        return self._saved_step

    def save(self, trainer: Trainer, name: str) -> None:
        """Writes checkpoint `name`; every rank takes part."""
        trainer.save_checkpoint(self.path(name))

    def _keep_best(self, trainer: Trainer) -> None:
        if self.monitor is None or self.monitor not in trainer.callback_metrics:
            return
        if not all(method.ready(trainer) for method in compressions(trainer)):
            return
        score = float(trainer.callback_metrics[self.monitor])
        better = self.best_score is None or (score >= self.best_score if self.mode == "max" else score <= self.best_score)
        if better:
            self.best_score, self.best_step = score, trainer.global_step
            self.best_metrics = {
                name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")
            }
            self.save(trainer, "best")

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_step": self.best_step, "best_metrics": self.best_metrics}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_step = state_dict["best_score"], state_dict["best_step"]
        self.best_metrics = state_dict["best_metrics"]


def _validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning validates right after the batch that has just ended."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and loop._should_check_val_fx(fetcher)
