"""The scheduler of a run, which is stepped after every optimizer step."""

from collections.abc import Callable

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.errors import UserError
from lathe.optim.foreign import build_scheduler, counted_in_steps, wants_length


def make_scheduler(
    make: Callable[..., LRScheduler], optimizer: Optimizer, trainer: Trainer, repeats: int
) -> LRScheduler:
    """What `make` makes of the optimizer, planned for the run's steps, or for each of `repeats` equal parts of them.

    Raises:
        UserError: the scheduler plans for an end, and the run has none, or no step at all.
    """
    steps = None
    if wants_length(make):
        total = trainer.estimated_stepping_batches
        if total == float("inf"):
            raise UserError(
                "trainer.max_epochs=-1 and trainer.max_steps=-1 have no end for the scheduler to plan for: set one of "
                "them."
            )
        if total < 0:
            raise UserError(
                f"The scheduler cannot plan a run of {total} steps: set trainer.max_epochs or trainer.max_steps, and "
                "trainer.limit_train_batches above 0."
            )
        steps = int(total) // repeats
    scheduler = build_scheduler(make, optimizer, steps)
    line = counted_in_steps(make)
    if line is not None and trainer.is_global_zero:
        print(line)
    return scheduler
