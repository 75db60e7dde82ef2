"""Ranges of activations of one batch, and histograms of calibration data."""

import torch
from torch import Tensor

OBSERVERS = ("minmax", "moving_average", "percentile")
METHODS = ("minmax", "percentile", "entropy")
BINS = 2048
SAMPLE = 16384  # values of a batch for a percentile in training


def affine(low: Tensor, high: Tensor, levels: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of integers 0 to `levels` for `low` <= 0 to `high` >= 0; zero is exact."""
    width = high - low
    scale = (width + (width == 0)) / levels
    return scale, (-low / scale).round()


def batch_range(x: Tensor, observer: str, percentile: float) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of x, each of shape [1].

    With `percentile`, those of at most 16384 evenly spaced values within that share on each side.
    """
    if observer != "percentile":
        low, high = torch.aminmax(x)
        return low.view(1), high.view(1)
    flat = x.detach().flatten()
    flat = flat[:: max(1, flat.numel() // SAMPLE)].float().sort().values
    drop = round((flat.numel() - 1) * (1 - percentile / 100))
    return flat[drop].view(1), flat[flat.numel() - 1 - drop].view(1)


class Histogram:
    """Counts of values in 2048 equal bins between `low` and `high`, on the CPU."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = min(low, 0.0), max(high, 0.0)
        self.counts = torch.zeros(BINS, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        if self.high > self.low:
            self.counts += torch.histc(x.detach().float(), BINS, self.low, self.high).cpu().double()

    def range(self, method: str, percentile: float, bits: int) -> tuple[float, float]:
        """Return the range by `entropy` or `percentile` (share inside; the rest half on each nonzero side)."""
        if method == "minmax" or not self.counts.sum():
            return self.low, self.high
        return self._percentile(percentile) if method == "percentile" else self._entropy(2**bits)

    def _percentile(self, percentile: float) -> tuple[float, float]:
        share = self.counts.cumsum(0) / self.counts.sum()
        one_sided = self.low == 0.0 or self.high == 0.0
        outside = (1 - percentile / 100) / (1 if one_sided else 2)
        width = (self.high - self.low) / BINS
        below = int(torch.searchsorted(share, outside)) if self.low < 0 else 0
        above = int(torch.searchsorted(share, 1 - outside)) + 1 if self.high > 0 else BINS
        return min(self.low + below * width, 0.0), max(self.low + min(above, BINS) * width, 0.0)

    def _entropy(self, levels: int) -> tuple[float, float]:
        """Return the clipping of least KL divergence (Migacz 2017, "8-bit Inference with TensorRT").

        Both ends move towards zero together, as in ONNX Runtime.
        """
        width = (self.high - self.low) / BINS
        zero = round(-self.low / width)
        reach = max(zero, BINS - zero)  # bins on the longer side
        best, chosen = float("inf"), reach
        step = max(1, reach // 128)
        for bins in range(max(levels // 2 if zero else levels, step), reach + 1, step):
            start, stop = max(0, zero - bins), min(BINS, zero + bins)
            if stop - start < levels:
                continue
            distance = self._divergence(start, stop, levels)
            if distance < best:
                best, chosen = distance, bins
        start, stop = max(0, zero - chosen), min(BINS, zero + chosen)
        return (self.low if start == 0 else self.low + start * width), (
            self.high if stop == BINS else self.low + stop * width
        )

    def _divergence(self, start: int, stop: int, levels: int) -> float:
        inner = self.counts[start:stop]
        p = inner.clone()
        p[0] += self.counts[:start].sum()
        p[-1] += self.counts[stop:].sum()
        # q: the same counts in `levels` bins, each spread evenly over its nonempty original bins
        place = torch.arange(stop - start) * levels // (stop - start)
        filled = (p > 0).double()
        total = torch.zeros(levels, dtype=torch.float64).index_add_(0, place, inner)
        number = torch.zeros(levels, dtype=torch.float64).index_add_(0, place, filled)
        q = (total / number.clamp_min(1))[place] * filled
        if not q.sum():
            return float("inf")
        p, q = _smoothed(p / p.sum()), _smoothed(q / q.sum())
        return float((p * (p / q).log()).where(p > 0, torch.zeros(())).sum())


def _smoothed(p: Tensor, epsilon: float = 1e-4) -> Tensor:
    """Move some mass to empty bins, as ONNX Runtime does, so that the divergence is finite."""
    empty = p == 0
    n = int(empty.sum())
    if n == 0 or n == p.numel():
        return p
    return torch.where(empty, epsilon, p - epsilon * n / (p.numel() - n)).clamp_min(1e-12)
