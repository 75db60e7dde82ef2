"""From logits to what a client reads: the likeliest classes with their names and probabilities. Imports no torch."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def answer(logits: Array, facts: dict[str, Any], top_k: int, single: bool) -> dict[str, Any]:
    """`{"predictions": [{"class", "index", "probability"}, ...]}`, the likeliest first; a list of such lists unless
    `single`.

    Args:
        logits: `[n, classes]`, or `[n, time, vocabulary]`, of which the last position counts: the token that comes
            next.
        facts: the export's manifest; without names of classes, their numbers are the names.
        top_k: how many classes, from 1; all if there are fewer. Of equal ones the lower index comes first.
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
    """Softmax over the last axis, in float64.

    Raises:
        ValueError: as `answer`.
    """
    wide = logits.astype(np.float64)
    largest = wide.max(axis=-1, keepdims=True)
    if not np.isfinite(
        largest
    ).all():  # NaN is larger than everything; -inf beside finite logits is a class that can't be
        raise ValueError("the net's answer has NaN or infinite logits, which are no probabilities")
    shares = np.exp(wide - largest)
    total: Array = shares / shares.sum(axis=-1, keepdims=True)
    return total


def likeliest(row: Array, top_k: int) -> list[int]:
    """Indices of the `top_k` largest values of a vector, the largest first; of equal ones the lower index comes
    first.
    """
    top_k = min(top_k, len(row))
    least = np.partition(row, -top_k)[-top_k]  # sorting a large vocabulary would take longer than a small net
    found = np.flatnonzero(row >= least)
    return [int(index) for index in found[np.argsort(-row[found], kind="stable")][:top_k]]
