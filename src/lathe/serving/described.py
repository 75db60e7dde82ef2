"""Validates a manifest, which may come from another machine, before it is served. Imports no torch."""

import math
from typing import Any

LARGEST = 2**31  # of a size, and of a sample's values


def described(facts: dict[str, Any]) -> bool:
    """Return whether a manifest (from `lathe.export.manifest.read`) has what requests and the page need."""
    given, preprocess, classes = facts["input"], facts["preprocess"], facts.get("classes")
    shape, many, words = given["shape"], facts["output"]["shape"][-1:], "vocab_size" in given
    texts = [facts.get("run"), facts.get("checkpoint"), *(classes if isinstance(classes, list) else [])]
    if len(many) != 1 or words != (preprocess is None) or len(shape) != (2 if words else 4):
        return False
    sizes = [side for side in shape[1:] if side not in ("height", "width", "time")] + many
    if words:
        sizes += [given["vocab_size"], 1 if given.get("longest") is None else given["longest"]]
    else:
        channels, per_channel = shape[1], [preprocess["mean"], preprocess["std"]]
        if channels in ("height", "width", "time") or [len(values) for values in per_channel] != [channels] * 2:
            return False
        if not isinstance(classes, list) or [len(classes)] != many or len(preprocess["size"]) != 2:
            return False
        if not all(_is(value, (int, float)) and abs(value) < 1e9 for values in per_channel for value in values):
            return False
        sizes += preprocess["size"]
    if not all(_is(size, int) and 1 <= size <= LARGEST for size in sizes):
        return False
    fixed = math.prod(side for side in [*shape[1:], *(preprocess or {}).get("size", [])] if isinstance(side, int))
    return fixed <= LARGEST and all(isinstance(text, str) and text.isprintable() for text in texts)


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
