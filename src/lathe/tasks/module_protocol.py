"""Hooks a Task may implement besides training_step."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule

from lathe.tasks.foreign_hooks import foreign_hook
from lathe.tasks.from_checkpoint import FromCheckpoint


class ModuleProtocol(FromCheckpoint):
    """Base of a task: hooks with defaults, and the module for the Trainer, which is the task or the one it wraps.

    `standard_step = True` in the body of a class states that its step reads inputs and targets of the batch, logs only
    the declared metrics and looks at no loop: several steps may run per call (`trainer.steps_per_call`). A subclass
    states it again, as it may do more.
    """

    standard_step = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.standard_step = vars(cls).get("standard_step", False)

    @property
    def driven(self) -> LightningModule:
        """Return the module for the Trainer."""
        return self

    @property
    def logs_more(self) -> bool:
        """Return whether `self.log` may report names that the task does not declare."""
        return not self.standard_step

    def own_hook(self) -> str | None:
        """Return a description of a user's hook on the modules or parameters, if there is one."""
        return foreign_hook(self.driven)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise UserError if the net does not fit the facts of the data; called on the CPU before data is touched."""

    def take_logits(self, facts: Mapping[str, Any], train: bool) -> None:
        """Reduce the net's outputs to logits, in a task that takes only these."""

    def check_training(self) -> None:
        """Raise UserError if the task can't be trained with its arguments."""

    def check_run(self, cfg: Mapping[str, Any]) -> None:
        """Raise UserError if the task can't do what a configuration asks for; called before data is touched."""

    def own_callbacks(self) -> list[Callback]:
        """Return callbacks that the task needs."""
        return []
