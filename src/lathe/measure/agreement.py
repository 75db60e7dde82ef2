"""Agreement between the outputs of two nets on the same inputs."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Share of equal predictions (None for "values") and largest difference of outputs, over `n` predictions."""

    share: float | None
    largest: float
    n: int


class AgreementMeter:
    """Adds up agreement batch by batch.

    A prediction is the largest logit of a row ("classes") or the sign of an output ("labels"); "values" have none.
    """

    def __init__(self, predicts: str = "classes") -> None:
        self._predicts = predicts
        self._equal, self._n, self._largest = 0, 0, 0.0

    def add(self, outputs: Tensor, reference: Tensor, counts: Tensor | None = None) -> None:
        """Add the float32 outputs of both nets: [..., classes], or any shape for labels and values.

        `counts` is a boolean mask [...] of the predictions to compare, None for all.

        Raises:
            ValueError: the outputs differ in shape.
        """
        if outputs.shape != reference.shape:
            raise ValueError(f"outputs of shape {list(outputs.shape)} and {list(reference.shape)} can't be compared")
        columns = 1 if self._predicts in ("labels", "values") else outputs.shape[-1]
        mine, other = (each.detach().float().reshape(-1, columns) for each in (outputs, reference))
        if counts is not None:
            mine, other = mine[counts.flatten()], other[counts.flatten()]
        if not len(mine):
            return
        answers = [
            each.argmax(-1) if columns > 1 or self._predicts == "classes" else each > 0 for each in (mine, other)
        ]
        self._equal += int((answers[0] == answers[1]).sum())
        self._n += len(mine)
        largest = float((mine - other).abs().max())
        self._largest = largest if math.isnan(largest) else max(self._largest, largest)  # a nan stays

    @property
    def result(self) -> Agreement:
        """Return the agreement so far. Raise ValueError if nothing was compared."""
        if not self._n:
            raise ValueError("nothing was compared")
        share = None if self._predicts == "values" else self._equal / self._n
        return Agreement(share, self._largest, self._n)
