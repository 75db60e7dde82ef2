"""What a user's own task has written, held against what `Task` asks for: a sentence in the place of a traceback."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lathe.errors import UserError, refuse

TAKES = {"losses": ("outputs", "batch"), "reduce": ("outputs", "batch", "loss"), "compute": ("means",)}


def check_signatures(kind: type) -> None:
    """Raises UserError where a method that the machinery calls takes other arguments."""
    found = {name: vars(kind)[name] for name in TAKES if inspect.isfunction(vars(kind).get(name))}
    refuse(
        f"{_name(kind)}.{name}({', '.join(inspect.signature(method).parameters)}): expected {name}(self, "
        f"{', '.join(TAKES[name])})."
        for name, method in found.items()
        if not _binds(method, 1 + len(TAKES[name]))
    )


def _binds(method: Any, count: int) -> bool:
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    return True


def check_losses(task: Any, found: Any) -> None:
    """Raises UserError unless `losses` has given scalars by name; asked once for each logged window."""
    terms = list(found.values()) if isinstance(found, Mapping) else []
    if not terms or not all(isinstance(term, Tensor) and term.numel() == 1 for term in terms):
        within = f" of {', '.join(map(_seen, terms))}" if terms else ""
        raise UserError(
            f"{_name(type(task))}.losses returned {_seen(found)}{within}: expected a dict of scalar tensors by name, "
            "whose sum is trained on."
        )


def check_sums(task: Any, sums: Any) -> None:
    """Raises UserError unless `reduce` has given a sum for each metric, and the count."""
    wanted = len(task.metrics) + 1
    if not isinstance(sums, Tensor) or sums.shape != (wanted,):
        raise UserError(
            f"{_name(type(task))}.reduce returned {_seen(sums)}: expected a tensor [len(metrics) + 1] = [{wanted}], "
            f"the sums over the batch of {', '.join(task.metrics)}, and last the number of samples."
        )


def _seen(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
