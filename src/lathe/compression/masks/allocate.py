"""Mixed precision and mixed sparsity: one option per layer, of least total loss within a budget."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lathe.errors import UserError

MOST_STATES = 4000  # followed partial allocations; exact below


@dataclass(frozen=True)
class Option:
    """An option of a layer: `value` (bits or sparsity), cost (bytes or seconds) and loss of the metric."""

    value: float
    cost: float
    loss: float


@dataclass(frozen=True)
class Allocation:
    """The chosen value of each layer, with total cost and total loss, which is taken to be additive."""

    values: dict[str, float]
    cost: float
    loss: float


def allocate(options: Mapping[str, Sequence[Option]], budget: float, said: str | None = None) -> Allocation:
    """Choose one option per layer: summed cost at most `budget`, least summed loss.

    Exact dynamic programming (a multiple-choice knapsack) over partial allocations that no other one beats in both cost
    and loss. With more than MOST_STATES of those, the best of each narrow range of costs is kept: the loss is then
    nearly the least. `said` is the budget as the user wrote it.

    Raises:
        UserError: the cheapest options exceed the budget, or a layer has no options.
    """
    said = said or f"budget={budget:g}"
    if not options or not all(options.values()):
        raise UserError(f"{said}: no layer has anything to choose from; widen the layers or the values that are tried.")
    least = sum(min(option.cost for option in some) for some in options.values())
    if least > budget:
        raise UserError(
            f"{said} can't be met: the cheapest options together cost {least:g}; raise it or offer cheaper ones."
        )
    # Least cost of the remaining layers: a partial allocation that leaves less is dropped.
    rest = least
    front: list[tuple[float, float, tuple[float, ...]]] = [(0.0, 0.0, ())]
    for some in options.values():
        rest -= min(option.cost for option in some)
        room = budget - rest + 1e-9 * abs(budget)
        grown = [
            (cost + option.cost, loss + option.loss, (*chosen, option.value))
            for cost, loss, chosen in front
            for option in some
            if cost + option.cost <= room
        ]
        front = _thinned(_undominated(grown))
    cost, loss, chosen = front[-1]
    return Allocation(dict(zip(options, chosen, strict=True)), cost, loss)


def _undominated(states: list[tuple[float, float, tuple[float, ...]]]) -> list[tuple[float, float, tuple[float, ...]]]:
    """Return the states that no other beats in both cost and loss, by rising cost and falling loss."""
    best: list[tuple[float, float, tuple[float, ...]]] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not best or state[1] < best[-1][1]:
            best.append(state)
    return best


def _thinned(front: list[tuple[float, float, tuple[float, ...]]]) -> list[tuple[float, float, tuple[float, ...]]]:
    """Return about MOST_STATES states, evenly over the costs: the last of each range has the least loss."""
    if len(front) <= MOST_STATES:
        return front
    costs = [state[0] for state in front]
    width = (costs[-1] - costs[0]) / MOST_STATES
    last = {max(0, bisect_left(costs, costs[0] + width * (piece + 1)) - 1) for piece in range(MOST_STATES)}
    return [front[i] for i in sorted(last | {0, len(front) - 1})]


def quantized_bytes(shape: Sequence[int], bits: int) -> int:
    """Return bytes of a packed weight [out, ...] with `bits` per number and `out` float32 scales."""
    count = 1
    for size in shape:
        count *= size
    return -(-count * bits // 8) + (4 * shape[0] if bits < 32 else 0)


def sparse_bytes(shape: Sequence[int], sparsity: float) -> int:
    """Return bytes of a sparse float32 weight: the nonzero numbers and a bitmap, or the dense tensor."""
    count = 1
    for size in shape:
        count *= size
    kept = count - round(sparsity * count)
    return min(4 * count, 4 * kept + -(-count // 8))


def monotone(losses: Mapping[float, float]) -> dict[float, float]:
    """Return losses by value, from mild to strong, made monotone and at least 0: gains are noise."""
    found: dict[float, float] = {}
    highest = 0.0
    for value, loss in losses.items():
        highest = max(highest, loss if loss == loss else float("inf"))
        found[value] = highest
    return found
