"""Digests of the entries of a checkpoint, stored in it to detect removed or replaced entries."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lathe.errors import UserError

KEY = "outline"


def add_digests(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with a digest of each entry's names, types and shapes; values may be edited."""
    parts = {name: part for name, part in checkpoint.items() if name != KEY}
    return {**parts, KEY: {str(name): _digest(part) for name, part in parts.items()}}


def check_digests(checkpoint: Any, path: str | Path, key: str = "checkpoint", parts: tuple[str, ...] = ()) -> None:
    """Raise UserError if a checkpoint differs from its digests, if it has any: Lightning's have none.

    `key` is the configuration's name of the file `path`; `parts` are the entries to compare, all by default.
    """
    if not isinstance(checkpoint, dict) or KEY not in checkpoint:
        return
    saved, found = checkpoint[KEY], {str(name): part for name, part in checkpoint.items()}
    if not isinstance(saved, dict):
        raise UserError(_message(path, key, f"`{KEY}` is of type {type(saved).__name__}"))
    for name in parts or saved:
        if name in saved and name not in found:
            raise UserError(_message(path, key, f"`{name}` is not there"))
        if name in saved and saved[name] != _digest(found[name]):
            raise UserError(_message(path, key, f"something in `{name}` is not there, or is of another type or shape"))


def _message(path: str | Path, key: str, reason: str) -> str:
    return (
        f"{key}={path} is not as it was written, {reason}: use another checkpoint, or start a new run from its weights "
        "with ckpt_path."
    )


def _digest(part: Any) -> str:
    lines: list[str] = []
    _describe(part, "", lines)
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="backslashreplace")).hexdigest()[:16]


def _describe(tree: Any, path: str, lines: list[str]) -> None:
    """Append a line for each node of `tree`, which is at `path`."""
    if isinstance(tree, Tensor):
        lines.append(f"{path} {tree.dtype} {list(tree.shape)}")
    elif isinstance(tree, (dict, Mapping)):
        lines.append(f"{path} dict")
        for name, value in tree.items():
            _describe(value, f"{path}.{name!a}", lines)
    else:
        lines.append(f"{path} {type(tree).__name__}")
        for name, value in enumerate(tree) if isinstance(tree, (list, tuple)) else ():
            _describe(value, f"{path}.{name!a}", lines)
