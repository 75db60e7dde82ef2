"""Calibration of activation ranges."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lathe.compression.modes import evaluated
from lathe.compression.quantization import observers
from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.compression.quantization.layers import some_quantizers
from lathe.compression.trace import uncompiled
from lathe.errors import UserError


def calibrate(net: nn.Module, batches: Iterable[Any], method: str = "minmax", percentile: float = 99.99) -> None:
    """Set the ranges of activations from `batches`, fix them and turn rounding on.

    Batches are inputs, or tuples that begin with them. `minmax` takes the extremes, `percentile` that share of the
    values, `entropy` the clipping of least KL divergence (Migacz 2017); the last two read the batches twice, and keep
    those of an iterator in memory.
    """
    if method not in observers.METHODS:
        raise UserError(f"method={method!r} is unknown: take {', '.join(observers.METHODS)}.")
    if not 50 < percentile <= 100:
        raise UserError(f"percentile={percentile} is not in (50, 100]: take a value such as 99.99.")
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

    with evaluated(net):
        seen = _passes(net, data, watched, widen)
        if not seen:
            raise UserError("Calibration was given no batch: give at least one.")
        if method != "minmax":
            found = {id(q): observers.Histogram(*(float(end) for end in extremes[id(q)])) for q in watched}
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

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, FakeQuantize)
        see(module, args[0].detach())

    handles = [q.register_forward_pre_hook(hook) for q in watched]
    count = 0
    try:
        with torch.no_grad(), uncompiled(net):
            for batch in batches:
                net(batch[0] if isinstance(batch, tuple | list) else batch)
                count += 1
    finally:
        for handle in handles:
            handle.remove()
    return count
