"""Find the samples of a batch that are not finite."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from torch import Tensor

from lathe.errors import UserError

ROWS = 5  # rows of a bad batch that are named
Names = Callable[[list[int]], str]  # from rows of a batch to their joined names; empty if they have none


def names_of(trainer: Trainer, split: str, loader: Any, batch: int, rows: list[int]) -> str:
    """Return the names of rows of this process's batch, if its loader and its data module know them."""
    numbers, name_of = getattr(loader, "numbers", None), getattr(getattr(trainer, "datamodule", None), "name_of", None)
    if numbers is None or name_of is None:
        return ""
    samples = numbers(batch)
    found = [name_of(split, samples[row]) for row in rows if row < len(samples)]
    return ", ".join(name for name in found if name is not None)


def bad_batch(trainer: Trainer) -> str:
    """Read this rank's validation batches again; describe the first one that is not finite, or return ""."""
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
    """Raise UserError for data that are not finite."""
    raise UserError(f"Training stopped: {what}: {fault}; drop or fill such rows in the data.")


def bad_rows(batch: Any, infinite: bool = False, named: Names = lambda rows: "") -> str:
    """Describe the rows of a batch that are not finite; "" if all are.

    Without `infinite`, only the first tensor may not hold inf: the net's input. Masks hold -inf.
    """
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
    """Yield the tensors of a batch with their paths; the net's input comes first."""
    if isinstance(node, Tensor):
        yield name, node
    elif isinstance(node, dict | list | tuple):
        for key, part in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _tensors(part, f"{name}[{key!r}]")


def kind_of(tensor: Tensor) -> str:
    return "nan" if tensor.isnan().any() else "inf"
