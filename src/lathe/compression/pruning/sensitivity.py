"""Sensitivity of a net to sparsity or fewer bits in single layers, and the best choice for all of them.

```python
found = scan(net, layers(net), sparsities=[0.5, 0.9], bits=[8, 4], score=score, batches=inputs)
```

`allocate` chooses one option per layer, of least total loss within a budget: mixed precision and mixed sparsity.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.compression.modes import reestimate_batchnorm
from lathe.compression.pruning.masks import make_masks
from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.errors import UserError, require

KINDS = ("sparsity", "bits")
MOST_STATES = 4000  # partial allocations that `allocate` follows; exact below
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Embedding)

Score = Callable[[], dict[str, float]]
Found = dict[str, dict[str, dict[float, dict[str, float]]]]


def layers(net: nn.Module, patterns: Sequence[str] | None = None, key: str = "layers") -> dict[str, nn.Module]:
    """Return convolutions, linear layers and embeddings by name, or those that match shell `patterns`.

    Of layers that share a weight, the first counts. A pattern without a match raises UserError with `key`.
    """
    candidates: dict[str, nn.Module] = {}
    shared: set[int] = set()
    for name, module in net.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, LAYERS) and isinstance(weight, nn.Parameter) and id(weight) not in shared:
            shared.add(id(weight))
            candidates[name] = module
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in candidates):
            raise UserError(
                f"{key}: {pattern} matches no convolution, linear layer or embedding: layers are "
                f"{', '.join(candidates)}."
            )
    if not patterns:
        return candidates
    return {name: module for name, module in candidates.items() if any(fnmatchcase(name, p) for p in patterns)}


def round_to_nearest(weight: Tensor, bits: int) -> Tensor:
    """Round `weight` [out, ...] to symmetric integers of `bits` bits, with a scale per output channel."""
    rounding = FakeQuantize(bits, symmetric=True, axis=0, channels=len(weight), follows=True, device=weight.device)
    return rounding.quantize(weight.detach())


@contextmanager
def changed(net: nn.Module, values: Mapping[str, tuple[str, float]], batches: Iterable[Tensor] = ()) -> Iterator[None]:
    """Change layers' weights and re-estimate BatchNorm within a `with`, then restore `net` bit for bit.

    `net` is in eval mode; `values` are the kind of change and the value by layer; `batches` are inputs for BatchNorm's
    statistics, none keeps them.
    """
    weights = {name: net.get_submodule(name).get_parameter("weight") for name in values}
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    touched: list[Tensor] = [*weights.values(), *(buffer for norm in norms for buffer in norm.buffers())]
    before = [tensor.detach().clone() for tensor in touched]
    try:
        with torch.no_grad():
            for name, (kind, value) in values.items():
                if kind == "bits":
                    weights[name].copy_(round_to_nearest(weights[name], int(value)))
                else:
                    weights[name].mul_(make_masks({name: weights[name].abs()}, value, scope="layer")[name])
        reestimate_batchnorm(net, batches, limit=None)
        yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(touched, before, strict=True):
                tensor.copy_(old)


@torch.no_grad()
def scan(
    net: nn.Module,
    names: Iterable[str],
    *,
    sparsities: Sequence[float],
    bits: Sequence[int],
    score: Score,
    batches: Sequence[Tensor] = (),
    done: Callable[[], None] = lambda: None,
) -> Found:
    """Return `score()` with one layer changed at a time: layer -> KINDS -> value -> metrics."""
    tried: dict[str, Sequence[float]] = {"sparsity": sparsities, "bits": bits}
    results: Found = {}
    for name in names:
        results[name] = {kind: {} for kind in KINDS}
        for kind in KINDS:
            for value in tried[kind]:
                with changed(net, {name: (kind, value)}, batches):
                    results[name][kind][value] = score()
                done()
    return results


@dataclass(frozen=True)
class Option:
    """An option of a layer: `value` (bits or sparsity), cost (bytes or seconds) and loss of the metric."""

    value: float
    cost: float
    loss: float


States = list[tuple[float, float, tuple[float, ...]]]  # cost, loss and values of partial allocations


@dataclass(frozen=True)
class Allocation:
    """The chosen value of each layer, with total cost and total loss, which is taken to be additive."""

    values: dict[str, float]
    cost: float
    loss: float


def allocate(options: Mapping[str, Sequence[Option]], budget: float, label: str | None = None) -> Allocation:
    """Choose one option per layer: summed cost at most `budget`, least summed loss.

    Exact dynamic programming (a multiple-choice knapsack) over partial allocations that no other one beats in both cost
    and loss. With more than MOST_STATES of those, the best of each narrow range of costs is kept: the loss is then
    nearly the least. `label` names the budget in messages.

    Raises:
        UserError: the cheapest options exceed the budget, or a layer has no options.
    """
    label = label or f"budget={budget:g}"
    require(all(options.values()) and bool(options), f"{label}: no layer has options. Choose more layers or values.")
    least = sum(min(option.cost for option in choices) for choices in options.values())
    require(least <= budget, f"{label} is below {least:g}, the cost of the cheapest options. Raise it.")
    # Least cost of the remaining layers: a partial allocation that leaves less is dropped.
    rest = least
    front: States = [(0.0, 0.0, ())]
    for choices in options.values():
        rest -= min(option.cost for option in choices)
        room = budget - rest + 1e-9 * abs(budget)
        grown = [
            (cost + option.cost, loss + option.loss, (*chosen, option.value))
            for cost, loss, chosen in front
            for option in choices
            if cost + option.cost <= room
        ]
        front = []  # those that no other beats in both cost and loss, by rising cost and falling loss
        for state in sorted(grown, key=lambda state: state[:2]):
            if not front or state[1] < front[-1][1]:
                front.append(state)
        if len(front) > MOST_STATES:  # evenly over the costs: the last of each range has the least loss
            costs = [state[0] for state in front]
            width = (costs[-1] - costs[0]) / MOST_STATES
            ends = (bisect_left(costs, costs[0] + width * (piece + 1)) - 1 for piece in range(MOST_STATES))
            front = [front[i] for i in sorted({0, len(front) - 1, *(max(0, end) for end in ends)})]
    cost, loss, chosen = front[-1]
    return Allocation(dict(zip(options, chosen, strict=True)), cost, loss)


def quantized_bytes(shape: Sequence[int], bits: int) -> int:
    """Return bytes of a packed weight [out, ...] with `bits` per number and `out` float32 scales."""
    count = prod(shape)
    return -(-count * bits // 8) + (4 * shape[0] if bits < 32 else 0)


def sparse_bytes(shape: Sequence[int], sparsity: float) -> int:
    """Return bytes of a sparse float32 weight: the nonzero numbers and a bitmap, or the dense tensor."""
    count = prod(shape)
    nonzero = count - round(sparsity * count)
    return min(4 * count, 4 * nonzero + -(-count // 8))


def monotone(losses: Mapping[float, float]) -> dict[float, float]:
    """Return losses by value, from mild to strong, made monotone and at least 0: gains are noise."""
    corrected: dict[float, float] = {}
    highest = 0.0
    for value, loss in losses.items():
        highest = max(highest, loss if loss == loss else float("inf"))
        corrected[value] = highest
    return corrected
