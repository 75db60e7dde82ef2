"""How much two nets say the same of the same inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Over `n` predictions: the share that are equal, and the largest difference between two logits of one place."""

    share: float
    largest: float
    n: int


class AgreementMeter:
    """Adds up agreement batch by batch, so that no more than a batch of logits is held."""

    def __init__(self) -> None:
        self._equal, self._n, self._largest = 0, 0, 0.0

    def add(self, outputs: Tensor, reference: Tensor, counts: Tensor | None = None) -> None:
        """Takes logits [..., classes] of both nets in float32; `counts` [...] says which places are compared, None all.

        Raises ValueError for logits of different shapes.
        """
        if outputs.shape != reference.shape:
            raise ValueError(f"logits of shape {list(outputs.shape)} and {list(reference.shape)} can't be compared")
        outputs, reference = outputs.detach().float().flatten(0, -2), reference.detach().float().flatten(0, -2)
        if counts is not None:
            chosen = counts.flatten()
            outputs, reference = outputs[chosen], reference[chosen]
        if not len(outputs):
            return
        self._equal += int((outputs.argmax(-1) == reference.argmax(-1)).sum())
        self._n += len(outputs)
        largest = torch.stack((torch.tensor(self._largest), (outputs - reference).abs().max().cpu()))
        self._largest = float(largest.max())  # of a nan it is nan, unlike Python's own

    @property
    def result(self) -> Agreement:
        """What was found so far. Raises ValueError if nothing was compared."""
        if not self._n:
            raise ValueError("nothing was compared")
        return Agreement(self._equal / self._n, self._largest, self._n)
