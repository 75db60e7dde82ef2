"""Turns logits into the most likely classes with their names and probabilities. Imports no torch."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def answer(logits: Array, facts: dict[str, Any], top_k: int, single: bool) -> dict[str, Any]:
    """Return `{"predictions": [{"class", "index", "probability"}, ...]}`, most likely first.

    Unless `single`, it is a list of such lists, one for each sample.

    Args:
        logits: `[n, classes]`, or `[n, time, vocabulary]`, whose last position (the next token) counts.
        facts: the export's manifest; without class names, the indices are the names.
        top_k: at least 1; all classes if there are fewer. Ties are ordered by index.
        single: whether the request was a single sample.

    Raises:
        ValueError: a logit is NaN or infinity, or all are -infinity.
    """
    last = logits[:, -1] if logits.ndim == 3 else logits
    names = facts.get("classes")
    rows = []
    for row, shares in zip(last, probabilities(last), strict=True):
        best = likeliest(row, top_k)
        rows.append(
            [{"class": names[i] if names else str(i), "index": i, "probability": float(shares[i])} for i in best]
        )
    return {"predictions": rows[0] if single else rows}


def probabilities(logits: Array) -> Array:
    """Return the softmax over the last axis, in float64."""
    wide = logits.astype(np.float64)
    largest = wide.max(axis=-1, keepdims=True)
    if not np.isfinite(largest).all():  # NaN propagates; a logit of -inf next to finite ones is an impossible class
        raise ValueError("the net's answer has NaN or infinite logits, which are no probabilities")
    shares = np.exp(wide - largest)
    total: Array = shares / shares.sum(axis=-1, keepdims=True)
    return total


def likeliest(row: Array, top_k: int) -> list[int]:
    """Return the indices of the `top_k` largest values of a vector, largest first, ties by index."""
    top_k = min(top_k, len(row))
    least = np.partition(row, -top_k)[-top_k]  # O(n): a full sort of a large vocabulary takes longer than a small net
    found = np.flatnonzero(row >= least)
    return [int(index) for index in found[np.argsort(-row[found], kind="stable")][:top_k]]
