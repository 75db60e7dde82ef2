"""Checks that a checkpoint can be read again without running code, as `torch.load(weights_only=True)` does."""

import io
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import Container, OmegaConf
from torch import Tensor, nn

from lathe.errors import UserError, require

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})
TENSORS = (Tensor, nn.Parameter)
_readable_tensors: set[type] = set()  # tensor classes that have passed: a test copies the tensor


def check_checkpoint(checkpoint: Mapping[str, Any], mappings: bool = False) -> None:
    """Check a checkpoint before it is written. Plain tensors are not copied.

    Args:
        mappings: accept every mapping, as the writers of sharded strategies make dicts of them.
    """
    unreadable = _find_unreadable(checkpoint, "", mappings, set())
    if unreadable is not None:
        entry, value = unreadable
        raise UserError(
            f"checkpoint: {entry} is a {name_of(value).removeprefix('builtins.')}. Checkpoints hold plain values "
            "(numbers, strings, lists, dicts, tensors): convert it."
        )
    for name, value in checkpoint.get("state_dict", {}).items():
        require(
            isinstance(value, Tensor),
            f"checkpoint: state_dict.{name} is a {type(value).__name__}, not a tensor: return a tensor from "
            "get_extra_state, or keep it in a callback's state_dict.",
        )


def without_numpy(tree: Any, inside: frozenset[int] = frozenset()) -> Any:
    """Return nested containers with NumPy's numbers as Python's; containers without any are returned as they are.

    `inside` has the ids of the containers around `tree`: a list may hold itself.
    """
    if isinstance(tree, np.generic):
        return tree.item()
    if type(tree) not in (dict, OrderedDict, list, tuple) or id(tree) in inside:
        return tree
    inside |= {id(tree)}
    pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    converted = [(name, without_numpy(value, inside)) for name, value in pairs]
    if all(new is old for (_, new), (_, old) in zip(converted, pairs, strict=True)):
        return tree
    result = type(tree)(converted if isinstance(tree, dict) else [value for _, value in converted])
    if isinstance(tree, OrderedDict):  # a module's state_dict has the module's version as an attribute
        vars(result).update(vars(tree))
    return result


def readable_hyper_parameters(part: LightningModule | LightningDataModule) -> tuple[dict[str, Any], list[str]]:
    """Return what `save_hyperparameters` of `part` puts into checkpoints, and the names that are left out.

    An object such as a net or a class could not be read again without running code. The run directory's config.yaml
    builds `part`, so nothing needs it.
    """
    saved: Any = part.hparams
    plain = OmegaConf.to_container(saved) if isinstance(saved, Container) else dict(saved)
    assert isinstance(plain, dict)
    values = {str(name): _plain(value) for name, value in plain.items()}
    left_out = [name for name, value in values.items() if not is_readable(value)]
    return {name: value for name, value in values.items() if name not in left_out}, left_out


def _plain(value: Any) -> Any:
    return without_numpy(OmegaConf.to_container(value) if isinstance(value, Container) else value)


def print_left_out(part: LightningModule | LightningDataModule, key: str) -> None:
    """Name the hyper-parameters of the module or data module at `key` that checkpoints leave out."""
    _, left_out = readable_hyper_parameters(part)
    if left_out:
        rank_zero_only(print)(
            f"{key}: checkpoints leave out the hyper-parameters {', '.join(left_out)} of {name_of(part)}, which are no "
            "plain values; config.yaml builds it.",
            flush=True,
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


def _find_unreadable(tree: Any, path: str, mappings: bool, seen: set[int]) -> tuple[str, Any] | None:
    """Return the place and value of the first leaf in nested containers that could not be read again."""
    kind = type(tree)
    is_mapping = kind in (dict, OrderedDict) or (mappings and isinstance(tree, Mapping))
    if kind not in TENSORS and not is_mapping and kind not in (list, tuple):
        return None if kind in PLAIN or _is_readable_leaf(tree) else (path, tree)
    if id(tree) in seen:
        return None
    seen.add(id(tree))
    inside: list[tuple[str, Any]] = []
    if kind in (list, tuple):
        inside = [(f"{path}[{index}]", value) for index, value in enumerate(tree) if type(value) not in PLAIN]
    elif is_mapping:
        key = next((name for name in tree if type(name) not in PLAIN and not is_readable(name)), None)
        if key is not None:
            return f"the key {key!a} of {path or 'it'}", key
        dot = f"{path}." if path else ""
        inside = [(f"{dot}{name}", value) for name, value in tree.items() if type(value) not in PLAIN]
    if kind in TENSORS or kind is OrderedDict:  # their attributes are written too
        inside += [(f"{path}.{name}", value) for name, value in vars(tree).items()]
    return next((leaf for inner, value in inside if (leaf := _find_unreadable(value, inner, mappings, seen))), None)


def _is_readable_leaf(value: Any) -> bool:
    kind = type(value)
    if not isinstance(value, Tensor):
        return is_readable(value)
    if kind.__module__.startswith("torch.distributed.tensor"):  # gathered, or written in files of its own
        return True
    if kind not in _readable_tensors and is_readable(value):
        _readable_tensors.add(kind)
    return kind in _readable_tensors
