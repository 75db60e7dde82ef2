"""Choice of units to remove for a budget, by bisection."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from lathe.compression.channels.slices import Group, remove
from lathe.compression.modes import evaluated
from lathe.config.types import ChannelBudget
from lathe.config.validation import validated
from lathe.errors import ArgumentError


def choose(
    groups: Sequence[Group],
    scores: Mapping[str, Tensor],
    net: nn.Module,
    cost: Callable[[nn.Module], float],
    share: float,
    *,
    scope: str = "global",
    round_to: int | None = 1,
    min_units: int = 1,
) -> dict[str, list[int]]:
    """Return the fewest units of lowest score to remove so that `net` costs at most `share`, by group.

    Args:
        net: is copied, not changed; on the meta device if `cost` reads only shapes.
        cost: returns a copy's cost as a share of the dense net's.
        scope: `global` ranks the units of all groups together; `local` removes the same share of each group.
        round_to: remaining channels of a layer are a multiple of it, which kernels prefer; not for heads. None is 8 for
            layers of at least 32 channels, 4 from 16 channels on.
        min_units: remaining channels of each group at least; of heads, one remains.

    Raises:
        ArgumentError: the budget can't be met.
    """
    ranked = sorted(
        (float(score), g, unit) for g, group in enumerate(groups) for unit, score in enumerate(scores[group.name])
    )
    orders = [torch.argsort(scores[group.name], stable=True).tolist() for group in groups]

    def removed(count: int) -> dict[str, list[int]]:
        counts = [0] * len(groups)
        for _, g, _ in ranked[:count]:
            counts[g] += 1
        if scope == "local":
            counts = [int(group.units * count / len(ranked)) for group in groups]
        found = {}
        for group, order, number in zip(groups, orders, counts, strict=True):
            keep = max(group.units - number, 1)
            if group.kind == "channels":
                multiple = round_to or (8 if group.units >= 32 else 4 if group.units >= 16 else 1)
                keep = min(-(-max(keep, min_units) // multiple) * multiple, group.units)
            if keep < group.units:
                found[group.name] = sorted(order[: group.units - keep])
        return found

    def spent(count: int) -> float:
        small = copy.deepcopy(net)
        remove(small, groups, removed(count))
        return cost(small)

    low, high = 0, len(ranked)  # the answer is in (low, high]: low costs too much, high does not
    least = spent(high)
    if least > share:
        raise ArgumentError(
            f"share={share}: with the fewest channels that may remain, {least:.3f} of the dense net's cost does; raise "
            "share or lower min_channels."
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spent(middle) > share else (low, middle)
    return removed(high)


def parameters(net: nn.Module) -> int:
    """Count the parameters, tied ones once."""
    return sum(parameter.numel() for parameter in net.parameters())


def macs(net: nn.Module, example: Tensor) -> int:
    """Count the multiply-adds of a forward pass on `example`; on the meta device nothing is computed."""
    with evaluated(net), torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(example)
    return int(counter.get_total_flops()) // 2


@validated
def cost_function(
    budget: ChannelBudget, dense: nn.Module, example: Tensor
) -> tuple[nn.Module, Callable[[nn.Module], float]]:
    """Return a net to copy, and a function for a copy's cost as a share of `dense`, for `choose`.

    `example` is an input `[batch, ...]`. `latency` is measured on its device; `macs` and `parameters` are counted on
    the meta device.
    """
    if budget == "latency":
        base = copy.deepcopy(dense).to(example.device).eval()
        return base, lambda small: latency_share(small, base, example)
    bare, shape = skeleton(dense, example)
    if budget == "parameters":
        total = parameters(bare)
        return bare, lambda small: parameters(small) / total
    total = macs(bare, shape)
    return bare, lambda small: macs(small, shape) / total


def skeleton(net: nn.Module, example: Tensor) -> tuple[nn.Module, Tensor]:
    """Return a copy of a net and one sample on the meta device, with identities for slow BatchNorms."""
    shapes: dict[int, Tensor] = {id(tensor): tensor.detach().to("meta") for tensor in net.buffers()}
    shapes |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in net.parameters()}
    bare = copy.deepcopy(net, shapes)  # `to("meta")` would untie weights
    for module in bare.modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            module.forward = _unchanged  # type: ignore[method-assign,assignment]
    return bare, example[:1].detach().to("meta")


def _unchanged(x: Tensor) -> Tensor:
    return x


def latency_share(small: nn.Module, dense: nn.Module, example: Tensor, repeats: int = 15, warmup: int = 3) -> float:
    """Return the median time of a forward pass of `small` over that of `dense`, in alternating order."""
    times: dict[nn.Module, list[float]] = {small: [], dense: []}
    with torch.inference_mode():
        for turn in range(warmup + repeats):
            for net, taken in times.items():
                if example.is_cuda:
                    torch.cuda.synchronize(example.device)
                began = time.perf_counter()
                net(example)
                if example.is_cuda:
                    torch.cuda.synchronize(example.device)
                if turn >= warmup:
                    taken.append(time.perf_counter() - began)
    return median(times[small]) / median(times[dense])
