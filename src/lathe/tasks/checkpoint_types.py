"""Checks that a checkpoint can be read again without running code, as `torch.load(weights_only=True)` does."""

import io
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import Container
from torch import Tensor, nn

from lathe.errors import UserError, require

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})
TENSORS = (Tensor, nn.Parameter)
_readable_tensors: set[type] = set()  # tensor classes that have passed: a test copies the tensor


def check_checkpoint(checkpoint: Mapping[str, Any], mappings: bool = False) -> None:
    """Check a checkpoint before it is written. Plain tensors are not copied.

    Args:
        mappings: accept every mapping, as the writers of sharded strategies make dicts of them.

    Raises:
        UserError: with the place of the first value that could not be read again.
    """
    unreadable = _find_unreadable(checkpoint, "", mappings, set())
    if unreadable is not None:
        place, value = unreadable
        raise UserError(
            f"checkpoint: {place} is a {name_of(value).removeprefix('builtins.')}. Checkpoints hold plain values "
            "(numbers, strings, lists, dicts, tensors): convert it."
        )
    for name, value in checkpoint.get("state_dict", {}).items():
        require(
            isinstance(value, Tensor),
            f"checkpoint: state_dict.{name} is a {type(value).__name__}, not a tensor: return a tensor from "
            "get_extra_state, or keep it in a callback's state_dict.",
        )


def check_hyper_parameters(part: LightningModule | LightningDataModule, key: str) -> None:
    """Check what `save_hyperparameters` of the module or data module at `key` puts into checkpoints.

    Raises:
        UserError: it could not be read again without running code.
    """
    saved: Any = part.hparams
    if isinstance(saved, Container):  # Lightning writes it as one object
        saved = {str(getattr(part, "_hparams_name", None) or "hparams"): saved}
    unreadable = [name for name, value in saved.items() if not is_readable(value)]
    if unreadable:
        ignored = ", ".join(f'"{name}"' for name in unreadable)
        raise UserError(
            f"{key}: {name_of(part)} saves {', '.join(unreadable)} as hyper-parameters. Checkpoints hold plain values: "
            f"use save_hyperparameters(ignore=[{ignored}]) and assign self.{unreadable[0]} yourself."
        )


def is_readable(value: Any) -> bool:
    """Return whether `value` can be written, and read again without running code."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception:  # pickle raises anything
        return False
    return True


def name_of(part: Any) -> str:
    """Return the full name of an object's class."""
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _find_unreadable(tree: Any, place: str, mappings: bool, seen: set[int]) -> tuple[str, Any] | None:
    """Return the place and value of the first leaf in nested containers that could not be read again."""
    kind = type(tree)
    is_mapping = kind in (dict, OrderedDict) or (mappings and isinstance(tree, Mapping))
    if kind not in TENSORS and not is_mapping and kind not in (list, tuple):
        return None if kind in PLAIN or _is_readable_leaf(tree) else (place, tree)
    if id(tree) in seen:
        return None
    seen.add(id(tree))
    inside: list[tuple[str, Any]] = []
    if kind in (list, tuple):
        inside = [(f"{place}[{index}]", value) for index, value in enumerate(tree) if type(value) not in PLAIN]
    elif is_mapping:
        key = next((name for name in tree if type(name) not in PLAIN and not is_readable(name)), None)
        if key is not None:
            return f"the key {key!a} of {place or 'it'}", key
        dot = f"{place}." if place else ""
        inside = [(f"{dot}{name}", value) for name, value in tree.items() if type(value) not in PLAIN]
    if kind in TENSORS or kind is OrderedDict:  # their attributes are written too
        inside += [(f"{place}.{name}", value) for name, value in vars(tree).items()]
    return next((bad for at, value in inside if (bad := _find_unreadable(value, at, mappings, seen))), None)


def _is_readable_leaf(value: Any) -> bool:
    kind = type(value)
    if not isinstance(value, Tensor):
        return is_readable(value)
    if kind.__module__.startswith("torch.distributed.tensor"):  # gathered, or written in files of its own
        return True
    if kind not in _readable_tensors and is_readable(value):
        _readable_tensors.add(kind)
    return kind in _readable_tensors
