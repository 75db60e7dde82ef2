"""Agreement between the outputs of two nets on the same inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Share of equal predictions (None for "values") and largest difference of outputs."""

    share: float | None
    largest: float
    n: int


class AgreementMeter:
    """Adds up agreement batch by batch.

    A prediction is the largest logit of a row ("classes") or the sign of an output ("labels"); "values" have none.
    """

    def __init__(self, predicts: str = "classes") -> None:
        self._rows = predicts not in ("labels", "values")
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
        outputs, reference = self._table(outputs), self._table(reference)
        if counts is not None:
            chosen = counts.flatten()
            outputs, reference = outputs[chosen], reference[chosen]
        if not len(outputs):
            return
        self._equal += int((self._predicted(outputs) == self._predicted(reference)).sum())
        self._n += len(outputs)
        largest = torch.stack((torch.tensor(self._largest), (outputs - reference).abs().max().cpu()))
        self._largest = float(largest.max())  # keeps a nan, which Python's max may drop

    def _table(self, outputs: Tensor) -> Tensor:
        """Return the outputs with one row per prediction."""
        table = outputs.detach().float()
        return table.flatten(0, -2) if self._rows else table.reshape(-1, 1)

    def _predicted(self, table: Tensor) -> Tensor:
        return table.argmax(-1) if self._rows else table[:, 0] > 0

    @property
    def result(self) -> Agreement:
        """Return the agreement so far. Raise ValueError if nothing was compared."""
        if not self._n:
            raise ValueError("nothing was compared")
        share = None if self._predicts == "values" else self._equal / self._n
        return Agreement(share, self._largest, self._n)
