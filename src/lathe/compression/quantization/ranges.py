"""Ranges of activations during training."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.compression.quantization.observers import affine

MEMORY = 0.01  # of the newest step in a moving average, as in torch's observers


def update(quantizers: Sequence[FakeQuantize], reduce_max: Callable[[Tensor], None] | None = None) -> None:
    """Set ranges from the forwards since the last call, and LSQ's scales; call once per optimizer step.

    A moving average starts as a plain mean: the t-th update weighs max(1/t, 0.01). Quantizers without values and steps
    that are not finite (fp16) keep their range. `reduce_max` replaces a tensor by its maximum over all ranks, in place:
    ranges then equal those of one process with the whole batch.
    """
    with torch.no_grad():
        for q in quantizers:
            if q.lsq and q.is_enabled:
                growth: Any = q.growth  # under fsdp a DTensor
                q.scale.copy_(
                    q.first * (growth.full_tensor() if hasattr(growth, "full_tensor") else growth).float().exp()
                )
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
        forget(watching)


def forget(quantizers: Sequence[FakeQuantize]) -> None:
    """Discard the extremes since the last update."""
    for q in quantizers:
        q.batch_minimum.fill_(torch.inf)
        q.batch_maximum.fill_(-torch.inf)
