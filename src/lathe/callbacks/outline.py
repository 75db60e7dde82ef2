"""Of what a checkpoint consists, kept in it: parts that are taken out, or are of another kind, are noticed whoever
they belong to, a user's own callback as well as Lathe's.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lathe.errors import UserError

KEY = "outline"


def outlined(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint as it is written: with a digest of each of its parts, over names, types, and tensors' shapes. Of
    numbers and strings, which may be changed by hand, it says nothing."""
    rest = {name: part for name, part in checkpoint.items() if name != KEY}
    return {**rest, KEY: {str(name): _digest(part) for name, part in rest.items()}}


def check_outline(checkpoint: Any, path: str | Path, key: str = "checkpoint", parts: tuple[str, ...] = ()) -> None:
    """Holds a checkpoint that was read from `path`, which the configuration's `key` names, against its outline.
    Checkpoints that Lightning wrote have none.

    Args:
        parts: that are looked at; none are all.

    Raises:
        UserError: a part is not there, or not as it was written.
    """
    if not isinstance(checkpoint, dict) or KEY not in checkpoint:
        return
    kept, found = checkpoint[KEY], {str(name): part for name, part in checkpoint.items()}
    reason = "" if isinstance(kept, dict) else f"`{KEY}` is of type {type(kept).__name__}"
    for name in () if reason else parts or kept:
        if name in kept and name not in found:
            reason = reason or f"`{name}` is not there"
        elif name in kept and kept[name] != _digest(found[name]):
            reason = reason or f"something in `{name}` is not there, or is of another type or shape"
    if reason:
        raise UserError(
            f"{key}={path} is not as it was written, {reason}: go on from another checkpoint, or start a new run from "
            "its weights with ckpt_path."
        )


def _digest(part: Any) -> str:
    lines: list[str] = []
    _describe(part, "", lines)
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="backslashreplace")).hexdigest()[:16]


def _describe(tree: Any, at: str, lines: list[str]) -> None:
    """Adds a line for each thing in `tree`, which stands at `at`."""
    if isinstance(tree, Tensor):
        lines.append(f"{at} {tree.dtype} {list(tree.shape)}")
    elif isinstance(tree, (dict, Mapping)):
        lines.append(f"{at} dict")
        for name, value in tree.items():
            _describe(value, f"{at}.{name!a}", lines)
    else:
        lines.append(f"{at} {type(tree).__name__}")
        for name, value in enumerate(tree) if isinstance(tree, (list, tuple)) else ():
            _describe(value, f"{at}.{name!a}", lines)
