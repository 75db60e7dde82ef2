"""Checks of samples against the configuration, and labels that are read without samples."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from lathe.data.forms import INTEGERS, form
from lathe.data.items import Items
from lathe.data.splits import Labels
from lathe.errors import UserError


def check_target(batch: Any, items: Items, num_classes: int) -> None:
    """Raise UserError if a batch's targets are neither class numbers nor scores of `num_classes` classes."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return
    y = batch[1]
    expected = f"expected a whole number from 0 to {num_classes - 1}, or {num_classes} scores of classes, as"
    got = f"a list of {form(y[0])}" if isinstance(y, (tuple, list)) and len(y) else form(y)
    scores = isinstance(y, Tensor) and y.ndim > 1 and y.shape[1] == num_classes
    numbers = isinstance(y, Tensor) and y.dtype in INTEGERS and not (y.ndim == 2 and y.shape[1] == 1)
    if not scores and not numbers:
        raise UserError(
            f"{items.key}: targets of a batch are {got}, {expected} data.num_classes={num_classes} says: change the "
            "dataset's targets, or set data.num_classes=null for a task that takes them so."
        )


def tell_undivided(batch: Any, items: Items) -> None:
    """Warn that a split is not stratified, if targets are class numbers."""
    y = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        rank_zero_warn(
            f"{items.key}: {type(items.dataset).__name__} has no labels at hand (an attribute targets or labels), so "
            "it is divided without regard to its classes."
        )


def check_image(sample: Any, declared: Mapping[str, int | None], items: Items, split: str, precision: str) -> None:
    """Raise UserError if a split's first sample is not a floating-point image of the `declared` shape."""
    shape = list(getattr(sample[0], "shape", ())) if isinstance(sample, (tuple, list)) else []
    if len(shape) != 3:
        raise UserError(
            f"{items.key}: item {items.row(0)} is {form(sample)}, expected an image [channels, height, width] and its "
            "target, as data.channels and data.image_size say: set both to null for other inputs."
        )
    check_pixels(sample[0], items, f"data.{'' if split == 'train' else 'eval_'}transform", precision)
    for key, value in {"channels": shape[0], "image_size": max(shape[1:])}.items():
        if declared[key] not in (None, value):
            raise UserError(
                f"data.{key}={declared[key]} is not what item {items.row(0)} of {items.key} has, which is "
                f"{form(sample[0])}: set data.{key}={value}, or change the transform of {split}."
            )


def check_pixels(image: Any, items: Items, transform: str, precision: str) -> None:
    """Raise UserError if an image's dtype does not fit the run's precision."""
    dtype = str(image.dtype).removeprefix("torch.")
    others = {"float32": True, "float64": precision.startswith("64")}
    half = dtype in ("float16", "bfloat16") and precision.startswith(("16", "bf16", "transformer"))
    if not (others.get(dtype, False) or half):
        raise UserError(
            f"{items.key}: item {items.row(0)} is an image of {dtype}, expected float32: convert it in the dataset or "
            f"by {transform}, pixels / 255 less data.mean over data.std."
        )


def labels_at_hand(dataset: Any, target: str | None) -> Labels | None:
    """Return all class numbers, int64 [n], if known without reading samples, else None."""
    n = len(dataset)
    if isinstance(dataset, Subset):
        inner = labels_at_hand(dataset.dataset, target)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    found: Any = None
    if isinstance(dataset, TensorDataset):
        found = dataset.tensors[-1]
    elif target is not None and target in (getattr(dataset, "column_names", None) or ()):
        found = dataset[target]
    else:
        found = next(
            (value for name in ("targets", "labels") if (value := getattr(dataset, name, None)) is not None), None
        )
    try:
        labels = np.asarray(found[:] if hasattr(found, "__getitem__") else found)
    except (TypeError, ValueError):
        return None
    return labels.astype(np.int64) if labels.shape == (n,) and labels.dtype.kind in "iu" else None
