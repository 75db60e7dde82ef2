"""Weights of elsewhere: files of other programs, under other names, of a net that is partly another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lathe.errors import UserError, refuse, require, uninstalled
from lathe.runs.checkpoints import plain_tensor, read_checkpoint, read_plain

WRAPPED = ("state_dict", "model_state_dict", "model")  # where other programs put the weights in what they save


def read_weights(path: Path, key: str) -> dict[str, Any]:
    """The contents of a checkpoint to take weights from: one that Lathe or Lightning wrote, or as `state_dict` alone
    the tensors of a .safetensors file, or of a file with a state dict, by itself or under a name such as model.

    Raises:
        UserError: it is none of these, or holds more than plain data.
    """
    if path.suffix == ".safetensors":
        return {"state_dict": _safetensors(path, key)}
    if not path.is_file():
        return read_checkpoint(path, key)  # a folder that ranks wrote, or nothing
    state = read_plain(path, key)
    if isinstance(state, dict) and "global_step" in state:
        return read_checkpoint(path, key)
    inner = (
        next((state[name] for name in WRAPPED if isinstance(state.get(name), dict)), state)
        if isinstance(state, dict)
        else None
    )
    found = {name: value for name, value in (inner or {}).items() if isinstance(name, str) and plain_tensor(value)}
    require(bool(found), f"{key}={path} holds no weights: expected names with tensors, as net.state_dict() has them.")
    left = sorted(str(name) for name in inner.keys() - found.keys()) if inner else []
    require(not left, f"{key}={path} holds {', '.join(left[:3])}, which is no tensor: expected a state dict.")
    return {"state_dict": found}


def _safetensors(path: Path, key: str) -> dict[str, Tensor]:
    require(path.is_file(), f"{key}={path}: there is no such file.")
    lacking = uninstalled("export", "safetensors")
    require(lacking is None, f"{key}={path}: {lacking}")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{key}={path} can't be read as safetensors ({error}): take another.") from error


def renamed_weights(weights: Mapping[str, Tensor], table: Mapping[str, str | None], key: str) -> dict[str, Tensor]:
    """The weights under the names of here: of each name the longest prefix that the table has is replaced, and what it
    leads to null is left out.

    Raises:
        UserError: a prefix that no name begins with, or two names that become one; `key` begins the sentence.
    """
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    came: dict[str, str] = {}
    for name, value in weights.items():
        prefix = max((part for part in table if name.startswith(part)), key=len, default=None)
        if prefix is None:
            new: str | None = name
        else:
            used.add(prefix)
            target = table[prefix]
            new = None if target is None else target + name[len(prefix) :]
        if new is None:
            continue
        require(new not in found, f"{key}: {came.get(new)} and {name} would both be {new}: give them other names.")
        found[new], came[new] = value, name
    first = next(iter(weights), "nothing")
    refuse(f"{key}: no weight's name begins with {part!r}; the first is {first}." for part in table if part not in used)
    return found


def take_what_fits(net: nn.Module, weights: Mapping[str, Tensor], key: str) -> list[str]:
    """Puts those weights into the net whose name and shape it has, and says so: lines of what was taken, what the net
    keeps as it was made, and what the file has for nobody.

    Raises:
        UserError: none fits.
    """
    own = net.state_dict()
    fits = {name: value for name, value in weights.items() if name in own and value.shape == own[name].shape}
    if not fits:
        some, others = next(iter(weights), "nothing"), next(iter(own), "nothing")
        raise UserError(
            f"{key} fits this net nowhere: its first weight is {some}, the net's {others}; ckpt_map renames."
        )
    with torch.no_grad():
        net.load_state_dict({**own, **fits})
    shapes = [
        f"{name} ({list(weights[name].shape)} there, {list(own[name].shape)} here)"
        for name in weights
        if name in own and name not in fits
    ]
    lines = [f"{key}: {len(fits)} of {len(own)} weights are taken."]
    for said, names in (
        ("Not in the file, so as they were made", [name for name in own if name not in weights]),
        ("Of another shape, so as they were made", shapes),
        ("In the file alone", [name for name in weights if name not in own]),
    ):
        if names:
            lines.append(f"{said}: {', '.join(names)}.")
    return lines
