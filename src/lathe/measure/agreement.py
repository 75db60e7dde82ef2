"""How much two nets say the same of the same inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Over `n` predictions: the share that are equal, None where outputs are values that nothing is predicted from, and
    the largest difference between two outputs of one place."""

    share: float | None
    largest: float
    n: int


class AgreementMeter:
    """Adds up agreement batch by batch, so that no more than a batch of outputs is held.

    `predicts` says what a prediction is: of "classes" the largest of a row's logits, of "labels" the sign of each, and
    of "values" there is none.
    """

    def __init__(self, predicts: str = "classes") -> None:
        self._rows = predicts not in ("labels", "values")
        self._predicts = predicts
        self._equal, self._n, self._largest = 0, 0, 0.0

    def add(self, outputs: Tensor, reference: Tensor, counts: Tensor | None = None) -> None:
        """Takes outputs of both nets in float32: [..., classes], or any shape of labels and values; `counts` says which
        predictions [...] are compared, None all.

        Raises ValueError for outputs of different shapes.
        """
        if outputs.shape != reference.shape:
            raise ValueError(f"outputs of shape {list(outputs.shape)} and {list(reference.shape)} can't be compared")
        outputs, reference = self._table(outputs), self._table(reference)
        if counts is not None:
            chosen = counts.flatten()
            outputs, reference = outputs[chosen], reference[chosen]
        if not len(outputs):
            return
        self._equal += int((self._predicted(outputs) == self._predicted(reference)).sum())
        self._n += len(outputs)
        largest = torch.stack((torch.tensor(self._largest), (outputs - reference).abs().max().cpu()))
        self._largest = float(largest.max())  # of a nan it is nan, unlike Python's own

    def _table(self, outputs: Tensor) -> Tensor:
        """A row for each prediction."""
        table = outputs.detach().float()
        return table.flatten(0, -2) if self._rows else table.reshape(-1, 1)

    def _predicted(self, table: Tensor) -> Tensor:
        return table.argmax(-1) if self._rows else table[:, 0] > 0

    @property
    def result(self) -> Agreement:
        """What was found so far. Raises ValueError if nothing was compared."""
        if not self._n:
            raise ValueError("nothing was compared")
        share = None if self._predicts == "values" else self._equal / self._n
        return Agreement(share, self._largest, self._n)
