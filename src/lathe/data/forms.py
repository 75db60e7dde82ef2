"""Shapes and dtypes of samples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lathe.errors import UserError

# Dtypes that torch can compare and count with; uint16 and wider only store.
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def form(sample: Any) -> str:
    """Describe a sample in short: shapes of arrays, within tuples and dicts."""
    if isinstance(sample, (Tensor, np.ndarray)):
        return f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name}: {form(value)}" for name, value in sample.items()) + "}"
    if isinstance(sample, (tuple, list)) and len(sample) <= 8:
        return "(" + ", ".join(map(form, sample)) + ")"
    if isinstance(sample, (tuple, list)):
        return f"a {type(sample).__name__} of {len(sample)}"
    return "None" if sample is None else type(sample).__name__


def mixed(column: Sequence[Any]) -> bool:
    """Return whether arrays at the same place of similar samples are partly floating point."""
    first = column[0]
    if isinstance(first, Tensor):
        return len({one.is_floating_point() for one in column}) > 1
    if isinstance(first, np.ndarray):
        return len({one.dtype.kind == "f" for one in column}) > 1
    if isinstance(first, Mapping):
        return any(mixed([one[name] for one in column]) for name in first)
    return isinstance(first, (tuple, list)) and any(mixed(part) for part in zip(*column, strict=False))


def check_pairs(batch: Any, key: str) -> None:
    """Raise UserError if a batch is not inputs and targets; warn if it has more than these."""
    ways = "give (input, target), or write a task of your own for samples like these"
    if isinstance(batch, Mapping):
        names = ", ".join(map(str, batch))
        raise UserError(f"{key}: samples have the keys {names}: name two in data.input and data.target.")
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or isinstance(batch[0], str):
        raise UserError(f"{key}: a batch is {form(batch)}, expected inputs and their targets: {ways}.")
    if len(batch) > 2:
        rank_zero_warn(
            f"{key}: samples have {len(batch)} parts, of which the task takes the first two, input and target: "
            "the others are not used."
        )
