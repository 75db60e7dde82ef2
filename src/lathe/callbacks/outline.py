"""Of what a checkpoint consists, kept in it: parts that are taken out, or are of another kind, are noticed whoever
they belong to, a user's own callback as well as Lathe's.
"""

import hashlib
from collections.abc import Iterator, Mapping
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
    """Holds a checkpoint that was read from `path`, which the configuration's `key` names, against its outline. Earlier
    versions, and Lightning, write none.

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
    return hashlib.sha256("\n".join(sorted(_lines(part))).encode(errors="backslashreplace")).hexdigest()[:16]


def _lines(tree: Any, at: str = "") -> Iterator[str]:
    if isinstance(tree, Tensor):
        yield f"{at} {tree.dtype} {list(tree.shape)}"
        return
    inside: Any = tree.items() if isinstance(tree, Mapping) else ()
    if isinstance(tree, (list, tuple)):
        inside = enumerate(tree)
    yield f"{at} {'dict' if isinstance(tree, Mapping) else type(tree).__name__}"
    for name, value in inside:
        yield from _lines(value, f"{at}.{name!a}")
