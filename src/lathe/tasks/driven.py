"""What a run asks of a task beside its steps."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule

from lathe.tasks.from_checkpoint import FromCheckpoint
from lathe.tasks.hooks import foreign_hook


class Driven(FromCheckpoint):
    """A part that a run is made of, and the LightningModule that its Trainer drives: itself, unless it stands for
    another.
    """

    @property
    def driven(self) -> LightningModule:
        """What the Trainer is given."""
        return self

    @property
    def logs_more(self) -> bool:
        """Whether its `self.log` may report names that it does not declare."""
        return not type(self).__module__.startswith("lathe.")

    def own_hook(self) -> str | None:
        """A hook on its modules or parameters that a part of the user's own has put there."""
        return foreign_hook(self.driven)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raises UserError where the net does not fit what the data declares; called on the CPU before any data is
        touched.
        """

    def take_logits(self, facts: Mapping[str, Any], train: bool) -> None:
        """Reduces what the net returns to logits, in a task that takes these alone."""

    def check_training(self) -> None:
        """Raises UserError where it can't be trained with what it was given."""

    def check_run(self, cfg: Mapping[str, Any]) -> None:
        """Raises UserError where it can't do what a resolved configuration asks for; called before any data is
        touched.
        """

    def own_callbacks(self) -> list[Callback]:
        """Those that it can't do without."""
        return []
