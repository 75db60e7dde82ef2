"""Lightning's loop of epochs, which goes on behind an epoch that was finished."""

from typing import Any

from lightning.pytorch.loops import _FitLoop, _Loop


class FitLoop(_FitLoop):
    """Lightning's loop of epochs, without an epoch that is ended twice.

    Where `trainer.max_steps` is given, Lightning 2.6 takes a checkpoint of an epoch's end for one amid the epoch. It
    goes on within it: unless a validation falls on its last batch, a batch is trained on that is the next epoch's, and
    the epoch is counted again.
    """

    @property
    def restarting(self) -> bool:
        """Whether the run goes on within an epoch."""
        return self._restarting

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        current: Any = self.epoch_progress.current
        parents: Any = _Loop.restarting
        parents.fset(self, restarting and not current.ready == current.started == current.processed)
