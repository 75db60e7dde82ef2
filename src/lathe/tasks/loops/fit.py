"""Lightning's loop of epochs, with what it leaves out of a checkpoint."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loops import _FitLoop, _Loop
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lathe.errors import UserError

# What of a Trainer a callback may set for the rest of the run.
SETTINGS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
)


class FitLoop(_FitLoop):
    """Lightning's loop of epochs, without an epoch that is ended twice, and with the state that callbacks change.

    Where `trainer.max_steps` is given, Lightning 2.6 takes a checkpoint of an epoch's end for one within the epoch. It
    continues there: unless a validation falls on its last batch, it trains on a batch of the next epoch, and counts the
    epoch again.

    Checkpoints also hold what callbacks have changed since the start: settings of the Trainer, which parameters are
    trained and which modules are in evaluation mode.
    """

    _at_start: dict[str, dict[str, Any]] | None = None
    _changes: dict[str, dict[str, Any]] | None = None

    @property
    def restarting(self) -> bool:
        """Whether the run continues within an epoch."""
        return self._restarting

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        current: Any = self.epoch_progress.current
        parents: Any = _Loop.restarting
        parents.fset(self, restarting and not current.ready == current.started == current.processed)

    def on_run_start(self) -> None:
        super().on_run_start()
        module = self.trainer.lightning_module
        call_train_overrides(module)
        self._at_start = self._state()
        changes, self._changes = self._changes or {}, None
        for name, value in changes.get("trainer", {}).items():
            setattr(self.trainer, name, value)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(changes.get("requires_grad", {}).get(name, parameter.requires_grad))
        for name, part in module.named_modules():
            part.training = changes.get("training", {}).get(name, part.training)

    def advance(self) -> None:
        """Train on an epoch. A loader without a batch is asked once more, since some reset only when they are read
        beyond their end.

        Raises:
            UserError: the epoch has no batch, such as a generator's second one.
        """
        super().advance()
        seen = self.epoch_loop.batch_progress.current
        if seen.ready == 0:
            super().advance()
        if seen.ready == 0:
            way = "Return an object that starts again at each iter()." if self.trainer.current_epoch else "Is it empty?"
            raise UserError(f"data: train_dataloader has no batch in epoch {self.trainer.current_epoch + 1}. {way}")

    def on_advance_end(self) -> None:
        super().on_advance_end()
        forget_early_stop(self)

    def on_save_checkpoint(self) -> dict[str, Any]:
        state = super().on_save_checkpoint()
        if self._at_start is not None:
            now = self._state()
            changes = {
                kind: {name: value for name, value in now[kind].items() if before.get(name, value) != value}
                for kind, before in self._at_start.items()
            }
            if any(changes.values()):
                state["changes"] = changes
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._changes = state_dict.get("changes")

    def _state(self) -> dict[str, dict[str, Any]]:
        trainer, module = self.trainer, self.trainer.lightning_module
        training = {name: part.training for name, part in module.named_modules()}
        if trainer.validating:  # these are the modes that Lightning puts back afterwards
            training.update(self.epoch_loop.val_loop._module_mode.mode)
        return {
            "trainer": {
                **{name: getattr(trainer, name) for name in SETTINGS},
                "should_stop": bool(trainer.should_stop and not self._can_stop_early),  # else the run is at its end
            },
            "requires_grad": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
            "training": training,
        }


def forget_early_stop(loop: _FitLoop) -> None:
    """Let EarlyStopping decide again where `trainer.min_epochs` or `trainer.min_steps` did not let it stop the run."""
    trainer = loop.trainer
    if trainer.should_stop and not loop._can_stop_early and trainer.early_stopping_callbacks:
        rank_zero_info("Training continues until trainer.min_epochs and trainer.min_steps.")
        trainer.should_stop = False


def call_train_overrides(module: LightningModule) -> None:
    """Call `train()` of modules that override it, as a loop in plain torch does. Lightning only sets `training`.

    A module that was in evaluation mode stays so.
    """
    parts = list(module.modules())
    still = [part for part in parts if not part.training]
    for part in parts:
        if part.training and type(part).train is not nn.Module.train:
            part.train()
    for part in still:
        part.training = False
