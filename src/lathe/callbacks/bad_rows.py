"""What is wrong with a batch whose numbers are not finite, and which samples those are."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from torch import Tensor

from lathe.errors import UserError

ROWS = 5  # of a bad batch that are named
Names = Callable[[list[int]], str]  # of rows of a batch, joined; empty where they have none


def names_of(trainer: Trainer, split: str, loader: Any, batch: int, rows: list[int]) -> str:
    """What rows of this process's batch of a split are called, where its loader and its data module know."""
    numbers, name_of = getattr(loader, "numbers", None), getattr(getattr(trainer, "datamodule", None), "name_of", None)
    if numbers is None or name_of is None:
        return ""
    samples = numbers(batch)
    found = [name_of(split, samples[row]) for row in rows if row < len(samples)]
    return ", ".join(name for name in found if name is not None)


def bad_batch(trainer: Trainer) -> str:
    """The first batch of this process's validation that is not finite, in words; empty where there is none. It reads
    them again.
    """
    loaders: Any = trainer.val_dataloaders
    listed = loaders if isinstance(loaders, list) else [loaders]
    for loader, count in zip(listed, trainer.num_val_batches, strict=False):
        for number, batch in enumerate(loader):
            if number >= count:
                break
            fault = bad_rows(batch, named=partial(names_of, trainer, "val", loader, number))
            if fault:
                return fault.replace("the batch itself", f"batch {number} of validation", 1)
    return ""


def blame(what: str, fault: str) -> NoReturn:
    """Raises UserError where the data are to blame, which no setting of the training mends."""
    raise UserError(
        f"Training stopped: {what}: {fault}; drop such rows from the data, or fill in what they lack, where they are "
        "read."
    )


def bad_rows(batch: Any, infinite: bool = False, named: Names = lambda rows: "") -> str:
    """Which rows of a batch are not finite, in words; empty where all are. Only what the net takes, which comes first,
    may hold no inf either, unless nothing may be `infinite`: masks hold -inf. `named` says what rows are called."""
    for number, (name, tensor) in enumerate(_tensors(batch, "batch")):
        if not tensor.is_floating_point():
            continue
        bad = tensor.isnan() if number and not infinite else ~tensor.isfinite()
        if bad.any():
            rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist() if bad.dim() else []
            listed = ", ".join(map(str, rows[:ROWS])) + (f" and {len(rows) - ROWS} more" if len(rows) > ROWS else "")
            where = f", in {'row' if len(rows) == 1 else 'rows'} {listed} of {len(bad)}" if rows else ""
            called = named(rows[:ROWS]) if rows else ""
            return f"the batch itself holds {kind_of(tensor)} ({name}{where}{called and f': {called}'})"
    return ""


def _tensors(node: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch and where they stand in it; what `net_input` finds is the first."""
    if isinstance(node, Tensor):
        yield name, node
    elif isinstance(node, dict | list | tuple):
        for key, part in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _tensors(part, f"{name}[{key!r}]")


def kind_of(tensor: Tensor) -> str:
    return "nan" if tensor.isnan().any() else "inf"
