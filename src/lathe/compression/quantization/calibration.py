"""Ranges of activations: calibration before use, and moving averages during training."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lathe.compression.modes import evaluated, uncompiled
from lathe.compression.quantization.fake_quant import FakeQuantize, affine
from lathe.compression.quantization.layers import some_quantizers
from lathe.errors import require
from lathe.measure.calls import run
from lathe.measure.shards import whole

Observer = Literal["minmax", "percentile", "entropy"]
BINS = 2048
MEMORY = 0.01  # of the newest step in a moving average, as in torch's observers


def calibrate(net: nn.Module, batches: Iterable[Any], method: Observer = "minmax", percentile: float = 99.99) -> None:
    """Set the ranges of activations from `batches`, fix them and turn rounding on.

    Batches are inputs, tensors or Calls, or tuples that begin with them. `minmax` takes the extremes, `percentile` that
    share of the values, `entropy` the clipping of least KL divergence (Migacz 2017); the last two read the batches
    twice, and keep those of an iterator in memory.
    """
    require(method in get_args(Observer), f"method={method}: choose one of {', '.join(get_args(Observer))}.")
    every = some_quantizers(net)
    watched = [q for q in every if not q.symmetric and not q.follows]
    data = batches if method == "minmax" or not hasattr(batches, "__next__") else list(batches)
    for q in every:
        q.switch(enabled=False)
    extremes = {id(q): (torch.zeros(1), torch.zeros(1)) for q in watched}

    def widen(q: FakeQuantize, x: Tensor) -> None:
        low, high = q.extremes(x)
        was = extremes[id(q)]
        extremes[id(q)] = torch.minimum(was[0], low.cpu()), torch.maximum(was[1], high.cpu())

    require(_passes(net, data, watched, widen) > 0, "Calibration was given no batch: give at least one.")
    if method != "minmax":
        found = {id(q): Histogram(*(float(end) for end in extremes[id(q)])) for q in watched}
        _passes(net, data, watched, lambda q, x: found[id(q)].add(x))
        for q in watched:
            low, high = found[id(q)].range(method, percentile, q.bits)
            extremes[id(q)] = torch.tensor([low]), torch.tensor([high])
    for q in watched:
        q.set_range(*extremes[id(q)])
        q.switch(observing=False)
    for q in every:
        q.switch(enabled=True)


def _passes(
    net: nn.Module, batches: Iterable[Any], watched: list[FakeQuantize], see: Callable[[FakeQuantize, Tensor], None]
) -> int:
    """Run the net over the batches and pass each quantizer's input to `see`; return the number of batches."""
    handles = [q.register_forward_pre_hook(lambda q, args: see(q, args[0].detach())) for q in watched]
    count = 0
    with evaluated(net, handles), torch.no_grad(), uncompiled(net):
        for batch in batches:
            run(net, batch[0] if isinstance(batch, tuple | list) else batch)
            count += 1
    return count


def update_quantizers(quantizers: Sequence[FakeQuantize], reduce_max: Callable[[Tensor], None] | None = None) -> None:
    """Set ranges from the forwards since the last call, and LSQ's scales; call once per optimizer step.

    A moving average starts as a plain mean: the t-th update weighs max(1/t, 0.01). Quantizers without values and steps
    that are not finite (fp16) keep their range. `reduce_max` replaces a tensor by its maximum over all ranks, in place:
    ranges then equal those of one process with the whole batch.
    """
    with torch.no_grad():
        for q in quantizers:
            if q.lsq and q.is_enabled:
                q.scale.copy_(q.first * whole(q.growth).float().exp())  # under fsdp a DTensor
        watching = [q for q in quantizers if q.is_observing and not q.follows]
        if not watching:
            return
        seen = torch.stack(
            [-torch.cat([q.batch_minimum for q in watching]), torch.cat([q.batch_maximum for q in watching])]
        ).float()
        if reduce_max is not None:
            reduce_max(seen)
        counts = torch.stack([q.updates for q in watching])
        old = torch.stack([-torch.cat([q.minimum for q in watching]), torch.cat([q.maximum for q in watching])]).float()
        new = seen.clamp_min(0)  # the range includes zero
        valid = seen.isfinite().all(0)
        first = counts == 0
        weight = (1 / (counts + 1)).clamp_min(MEMORY)
        widest = torch.tensor([q.observer == "minmax" for q in watching], device=seen.device)
        mixed = torch.where(widest & ~first, torch.maximum(old, new), torch.lerp(old, new, weight))
        low, high = torch.where(valid, mixed, old)
        low = -low
        levels = torch.tensor([float(q.high) for q in watching], device=seen.device)
        scale, zero_point = affine(low, high, levels)
        torch._foreach_copy_([q.minimum for q in watching], list(low.split(1)))
        torch._foreach_copy_([q.maximum for q in watching], list(high.split(1)))
        plain = [i for i, q in enumerate(watching) if not q.lsq]
        if plain:
            torch._foreach_copy_([watching[i].scale for i in plain], [scale[i : i + 1] for i in plain])
        torch._foreach_copy_([q.zero_point for q in watching], list(zero_point.split(1)))
        torch._foreach_copy_([q.updates for q in watching], list((counts + valid).to(counts.dtype).unbind()))
        for q in watching:  # the extremes since the last update
            q.batch_minimum.fill_(torch.inf)
            q.batch_maximum.fill_(-torch.inf)


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
        if not self.counts.sum():
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
