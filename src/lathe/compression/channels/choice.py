"""Choice of the units to remove: scores, the penalty that prepares them, and the budget.

`prune_channels` does it in one call; the callback spreads it over a training.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from lathe.compression.channels.groups import find_groups
from lathe.compression.channels.slices import Group, Slice, remove
from lathe.compression.modes import evaluated, without_memory
from lathe.config.types import ChannelBudget, ChannelImportance, Count, Name, OpenShare
from lathe.config.validation import validated
from lathe.errors import ArgumentError
from lathe.measure.calls import Call, run

ALPHA = 4.0  # as Torch-Pruning: the weakest unit's penalty is 2**ALPHA times the strongest's


@validated
def scores(
    groups: Sequence[Group],
    tensors: Mapping[str, Tensor],
    importance: ChannelImportance = "group_norm",
    *,
    sensitivity: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return a score `[units]` for each group by name, with mean 1 so that groups can be compared.

    Args:
        tensors: a net's full parameters by name.
        importance: `group_norm`, mean square of a unit's weights (Fang et al. 2023, DepGraph, arXiv:2301.12900); `l1`
            or `l2`, norm of the weights that make its output (Li et al. 2017, arXiv:1608.08710); `bn_scale`, magnitude
            of its BatchNorm weights (Liu et al. 2017, Network Slimming, arXiv:1708.06519); `taylor`, first-order change
            of the loss (Molchanov et al. 2019, arXiv:1906.10771), given as `sensitivity`; `random`.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for group in groups:
        weights = [(part, tensors[part.name].float()) for part in group.slices if part.tensor == "weight"]
        if importance == "random":
            score = torch.rand(group.units, generator=generator)
        elif importance == "taylor":
            score = (sensitivity or {}).get(group.name, torch.zeros(group.units)).detach().float().cpu()
        elif importance == "group_norm":
            score = torch.stack([per_unit(weight.square(), part) for part, weight in weights]).mean(0)
        elif importance == "bn_scale":
            scales = [per_unit(weight.abs(), part) for part, weight in weights if weight.dim() == 1]
            if not scales:
                raise ArgumentError(
                    f"importance=bn_scale: {group.name} has no BatchNorm; use group_norm, or list it under exclude."
                )
            score = torch.stack(scales).mean(0)
        else:
            power = 1 if importance == "l1" else 2
            rows = [(part, weight) for part, weight in weights if part.role == "out" and weight.dim() > 1]
            sums = torch.stack([per_unit(weight.abs() ** power, part) for part, weight in rows]).sum(0)
            score = sums ** (1 / power)
        score = score.detach().cpu()
        found[group.name] = score / score.mean().clamp_min(torch.finfo(torch.float32).tiny)
    return found


def loss_change(
    groups: Sequence[Group], tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return each unit's squared sum of weight x gradient; its mean over batches is `sensitivity`."""
    found = {}
    for group in groups:
        makers = [part for part in group.slices if part.role == "out" and part.name in gradients]
        products = [per_unit((tensors[part.name] * gradients[part.name]).float(), part) for part in makers]
        found[group.name] = torch.stack(products).sum(0).square() if products else torch.zeros(group.units)
    return found


def per_unit(values: Tensor, part: Slice) -> Tensor:
    """Sum `values`, shaped as the slice's tensor, over each unit's positions: `[units]`."""
    sums = values.sum([dim for dim in range(values.dim()) if dim != part.dim]) if values.dim() > 1 else values
    return sums[part.index.to(values.device)].sum(1)


@torch.no_grad()
def add_penalty(net: nn.Module, groups: Sequence[Group], kind: str, strength: float) -> None:
    """Add the gradient of a penalty to the gradients of `net`, in place.

    - `group_norm`: strength x 2^(4 (max - I) / (max - min)) x weight, where I is the norm of a unit's weights (Fang et
      al. 2023, DepGraph, arXiv:2301.12900, as in Torch-Pruning's GroupNormPruner).
    - `group_lasso`: strength x weight / I (Yuan and Lin 2006; Wen et al. 2016, arXiv:1608.03665).
    - `bn_scale`: strength x sign of BatchNorm's weights (Liu et al. 2017, Network Slimming, arXiv:1708.06519).
    """
    tensors = dict(net.named_parameters())
    for group in groups:
        parts = [part for part in group.slices if part.tensor == "weight" and tensors[part.name].grad is not None]
        if kind == "bn_scale":
            for part in parts:
                weight = tensors[part.name]
                if weight.dim() == 1:
                    _push(weight, weight.sign(), part, weight.new_full((group.units,), strength))
            continue
        squares = torch.stack([per_unit(tensors[part.name].square(), part) for part in parts])
        if kind == "group_norm":
            norm = squares.mean(0)
            norm = (norm / norm.mean()).sqrt()
            spread = (norm.max() - norm.min()).clamp_min(1e-12)
            factor = strength * 2 ** (ALPHA * (norm.max() - norm) / spread)
        else:
            factor = strength / squares.sum(0).sqrt().clamp_min(1e-12)
        for part in parts:
            _push(tensors[part.name], tensors[part.name], part, factor)


def _push(weight: Tensor, direction: Tensor, part: Slice, factor: Tensor) -> None:
    """Add factor `[units]` x direction to the gradient at each unit's positions."""
    shape = [1] * weight.dim()
    shape[part.dim] = weight.shape[part.dim]
    index = part.index.to(weight.device)
    spread = factor.new_zeros(weight.shape[part.dim]).index_put_((index,), factor.view(-1, 1).expand_as(index))
    assert weight.grad is not None
    weight.grad.addcmul_(direction, spread.view(shape))


@validated
@dataclass(frozen=True)
class Options:
    """Options of channel removal; the keys of `compression.prune_channels`.

    Attributes:
        budget: `macs`, `parameters` or `latency` (on the example's device).
        share: of the dense net's budget that remains, in (0, 1).
        importance: see `scores`.
        scope: `global` ranks the units of all groups together; `local` removes the same share of each group.
        round_to: remaining channels of a layer are a multiple of it, which kernels prefer; not for heads. None is 8 for
            layers of at least 32 channels, 4 from 16 channels on.
        min_channels: remaining channels of each group at least; of heads, one remains.
        exclude: patterns of layers that stay.
    """

    budget: ChannelBudget = "macs"
    share: OpenShare = 0.5
    importance: ChannelImportance = "group_norm"
    scope: Literal["global", "local"] = "global"
    round_to: Count | None = None
    min_channels: Count = 4
    exclude: tuple[Name, ...] = ()

    def pick(
        self,
        net: nn.Module,
        groups: Sequence[Group],
        example: Tensor | Call,
        tensors: Mapping[str, Tensor],
        sensitivity: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> dict[str, list[int]]:
        """Return the fewest units of lowest score whose removal meets the budget, by group.

        `net` has the dense net's shapes (it is copied, not changed), `tensors` its full weights.

        Raises:
            ArgumentError: the budget can't be met.
        """
        found = scores(groups, tensors, self.importance, sensitivity=sensitivity, seed=seed)
        ranked = sorted((float(score), g) for g, group in enumerate(groups) for score in found[group.name])
        orders = [torch.argsort(found[group.name], stable=True).tolist() for group in groups]
        base, cost = self._cost(net, example)

        def removed(count: int) -> dict[str, list[int]]:
            counts = Counter(g for _, g in ranked[:count])
            units = {}
            for g, (group, order) in enumerate(zip(groups, orders, strict=True)):
                number = counts[g] if self.scope == "global" else int(group.units * count / len(ranked))
                keep = max(group.units - number, 1)
                if group.kind == "channels":
                    multiple = self.round_to or (8 if group.units >= 32 else 4 if group.units >= 16 else 1)
                    keep = min(-(-max(keep, self.min_channels) // multiple) * multiple, group.units)
                if keep < group.units:
                    units[group.name] = sorted(order[: group.units - keep])
            return units

        def spent(count: int) -> float:
            small = copy.deepcopy(base)
            remove(small, groups, removed(count))
            return cost(small)

        low, high = 0, len(ranked)  # the answer is in (low, high]: low costs too much, high does not
        least = spent(high)
        if least > self.share:
            raise ArgumentError(
                f"share={self.share}: the fewest channels that may remain cost {least:.3f} of the dense net: raise "
                "share or lower min_channels."
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if spent(middle) > self.share else (low, middle)
        return removed(high)

    def _cost(self, dense: nn.Module, example: Tensor | Call) -> tuple[nn.Module, Callable[[nn.Module], float]]:
        """Return a net to copy, on the meta device unless time counts, and a function for a copy's share."""
        if self.budget == "latency":
            base = copy.deepcopy(dense).to(example.device).eval()
            return base, lambda small: latency_share(small, base, example)
        bare, shape = skeleton(dense, example)
        if self.budget == "parameters":
            total = parameters(bare)
            return bare, lambda small: parameters(small) / total
        total = macs(bare, shape)
        return bare, lambda small: macs(small, shape) / total


def prune_channels(
    net: nn.Module,
    example: Tensor | Call,
    *,
    sensitivity: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    **options: object,
) -> dict[str, float]:
    """Remove channels, heads and hidden units from `net`, in place, until it meets a budget.

    Returns the remaining shares, {"macs": share, "parameters": share}. Call `reestimate_batchnorm` and fine-tune
    afterwards. `example` is an input `[batch, ...]`, `options` are those of `Options`; `importance="taylor"` needs
    `sensitivity`, means of `loss_change` over batches.

    Raises:
        UserError: an option is out of range, the net can't be traced, or the budget can't be met.
    """
    chosen = Options(**options)  # type: ignore[arg-type]
    groups = find_groups(net, example, chosen.exclude)
    before = sizes(net, example)
    with torch.no_grad():
        units = chosen.pick(net, groups, example, dict(net.named_parameters()), sensitivity, seed)
    remove(net, groups, units)
    return shares(before, sizes(net, example))


def sizes(net: nn.Module, example: Tensor | Call) -> dict[str, int]:
    """Count the MACs of one sample, and the parameters, without computing anything."""
    bare, shape = skeleton(net, example)
    return {"macs": macs(bare, shape), "parameters": parameters(bare)}


def shares(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """Return the remaining share of each size."""
    return {name: after[name] / size for name, size in before.items()}


def parameters(net: nn.Module) -> int:
    """Count the parameters, tied ones once."""
    return sum(parameter.numel() for parameter in net.parameters())


def macs(net: nn.Module, example: Tensor | Call) -> int:
    """Count the multiply-adds of a forward pass on `example`; on the meta device nothing is computed."""
    with evaluated(net), torch.no_grad(), FlopCounterMode(display=False) as counter:
        run(net, example)
    return int(counter.get_total_flops()) // 2


def skeleton(net: nn.Module, example: Tensor | Call) -> tuple[nn.Module, Tensor | Call]:
    """Return a copy of a net and one sample on the meta device, with identities for slow BatchNorms."""
    bare = without_memory(net)
    for module in bare.modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            module.forward = _unchanged  # type: ignore[method-assign,assignment]
    return bare, example[:1].detach().to("meta")


def _unchanged(x: Tensor) -> Tensor:
    return x


def latency_share(
    small: nn.Module, dense: nn.Module, example: Tensor | Call, repeats: int = 15, warmup: int = 3
) -> float:
    """Return the median time of a forward pass of `small` over that of `dense`, in alternating order."""
    times: dict[nn.Module, list[float]] = {small: [], dense: []}
    with torch.inference_mode():
        for turn in range(warmup + repeats):
            for net, taken in times.items():
                if example.device.type == "cuda":
                    torch.cuda.synchronize(example.device)
                began = time.perf_counter()
                run(net, example)
                if example.device.type == "cuda":
                    torch.cuda.synchronize(example.device)
                if turn >= warmup:
                    taken.append(time.perf_counter() - began)
    return median(times[small]) / median(times[dense])
