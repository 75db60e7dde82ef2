"""What a checkpoint may hold: values that are read again without running code, as every reader of Lathe's does."""

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import Container
from torch import Tensor, nn

from lathe.errors import UserError, require

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})
TENSORS = (Tensor, nn.Parameter)
_read: set[type] = set()  # classes of tensors of which one has been read again: each would be copied for it


def check_checkpoint(checkpoint: Mapping[str, Any], mappings: bool = False) -> None:
    """Raises UserError where a checkpoint that is about to be written would not be opened again, with the place in it.

    Tensors are not copied. With `mappings` the writer makes dicts of every mapping, as sharded strategies do.
    """
    odd = _odd(checkpoint, "", mappings, set())
    if odd is not None:
        place, value = odd
        kind = name_of(value).removeprefix("builtins.")
        raise UserError(
            f"checkpoint: {place} is of type {kind}, and checkpoints hold plain values, which are read without running "
            f"code: put {_way(value)} there."
        )
    for name, value in checkpoint.get("state_dict", {}).items():
        require(
            isinstance(value, Tensor),
            f"checkpoint: state_dict.{name} is of type {type(value).__name__}, and weights are tensors: make it one "
            "(get_extra_state gives it), or keep it in the state_dict of a callback.",
        )


def check_hyper_parameters(part: LightningModule | LightningDataModule, key: str) -> None:
    """Raises UserError where `save_hyperparameters` of the part at `key` keeps what can't be read from a checkpoint
    again without running code.
    """
    held: Any = part.hparams
    whole = isinstance(held, Container)  # which Lightning writes as it is
    kept = {str(getattr(part, "_hparams_name", None) or "hparams"): held} if whole else held
    odd = {name: type(value).__name__ for name, value in kept.items() if not readable(value)}
    if odd:
        # what Hydra makes of a node with _partial_
        told = " and ".join(f"{n}, a {'partial' if kind == '_DeferredTarget' else kind}," for n, kind in odd.items())
        ignored = ", ".join(f'"{name}"' for name in odd)
        raise UserError(
            f"{key}: {name_of(part)} keeps {told} by save_hyperparameters, and checkpoints hold plain values: "
            f"save_hyperparameters(ignore=[{ignored}]), and what is read as self.hparams.{next(iter(odd))} as an "
            f"attribute of your own, self.{next(iter(odd))} = {next(iter(odd))}."
        )


def readable(value: Any) -> bool:
    """Whether `value` can be written, and read again without running code."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception:  # whatever pickle has to say of it
        return False
    return True


def name_of(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _odd(tree: Any, place: str, mappings: bool, seen: set[int]) -> tuple[str, Any] | None:
    """The first place in nested containers, and what stands there, that a reader would refuse."""
    kind = type(tree)
    tensor = kind in TENSORS
    walked = kind in (dict, OrderedDict) or (mappings and isinstance(tree, Mapping))
    if not (tensor or walked or kind in (list, tuple)):
        return None if kind in PLAIN or _readable_leaf(tree) else (place, tree)
    if id(tree) in seen:
        return None
    seen.add(id(tree))
    inside: list[tuple[str, Any]] = []
    if kind in (list, tuple):
        inside = [(f"{place}[{at}]", value) for at, value in enumerate(tree) if type(value) not in PLAIN]
    elif walked:
        odd = next((name for name in tree if type(name) not in PLAIN and not readable(name)), None)
        if odd is not None:
            return f"the key {odd!a} of {place or 'it'}", odd
        dot = f"{place}." if place else ""
        inside = [(f"{dot}{name}", value) for name, value in tree.items() if type(value) not in PLAIN]
    if tensor or kind is OrderedDict:  # what these carry besides is written as well
        inside += [(f"{place}.{name}", value) for name, value in vars(tree).items()]
    return next((odd for at, value in inside if (odd := _odd(value, at, mappings, seen))), None)


def _readable_leaf(value: Any) -> bool:
    kind = type(value)
    if not isinstance(value, Tensor):
        return readable(value)
    if kind.__module__.startswith("torch.distributed.tensor"):  # gathered, or written beside the rest
        return True
    if kind not in _read and readable(value):
        _read.add(kind)
    return kind in _read


def _way(value: Any) -> str:
    """What to put in the place of `value`."""
    if isinstance(value, np.generic):
        plain = type(value.item())
        return f"{plain.__name__}(...)" if plain in PLAIN else "str(...)"
    if isinstance(value, np.ndarray):
        return "torch.as_tensor(...)"
    if isinstance(value, Container):
        return "OmegaConf.to_container(...)"
    if isinstance(value, Mapping):
        return "dict(...)"
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes)):
        return "list(...)"
    return "str(...)"
