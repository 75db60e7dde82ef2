"""Mixed precision and mixed sparsity: one option for each layer, of least total loss within a budget."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lathe.errors import UserError

MOST_STATES = 4000  # partial allocations that are followed at a time; fewer than these are followed exactly


@dataclass(frozen=True)
class Option:
    """What a layer may be given: `value` (bits, a sparsity), what it costs (bytes, seconds), and what the metric loses
    by it.
    """

    value: float
    cost: float
    loss: float


@dataclass(frozen=True)
class Allocation:
    """The chosen value of each layer, with the total cost and the total loss, in which layers are taken to add up."""

    values: dict[str, float]
    cost: float
    loss: float


def allocate(options: Mapping[str, Sequence[Option]], budget: float, said: str | None = None) -> Allocation:
    """One option for each layer, so that the summed cost is at most `budget` and the summed loss as small as can be.

    Layers are added one after the other to all partial allocations that no other one beats in both cost and loss (exact
    dynamic programming, a multiple-choice knapsack). Where there are more than MOST_STATES of those, the best of each
    narrow range of costs go on: the budget holds all the same, the loss is then very near the least.

    Raises:
        UserError: even the cheapest options cost more than the budget, or there is nothing to choose from; `said` is
            the budget as the user wrote it.
    """
    said = said or f"budget={budget:g}"
    if not options or not all(options.values()):
        raise UserError(f"{said}: no layer has anything to choose from; widen the layers or the values that are tried.")
    least = sum(min(option.cost for option in some) for some in options.values())
    if least > budget:
        raise UserError(
            f"{said} can't be met: the cheapest options together cost {least:g}; raise it or offer cheaper ones."
        )
    # What the layers still to come cost at least: a partial allocation that leaves less than that is a dead end.
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
    """Those that no other beats in both cost and loss, by rising cost and falling loss."""
    best: list[tuple[float, float, tuple[float, ...]]] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not best or state[1] < best[-1][1]:
            best.append(state)
    return best


def _thinned(front: list[tuple[float, float, tuple[float, ...]]]) -> list[tuple[float, float, tuple[float, ...]]]:
    """At most about MOST_STATES of them, evenly over the range of costs: of each piece the last, which has the least
    loss.
    """
    if len(front) <= MOST_STATES:
        return front
    costs = [state[0] for state in front]
    width = (costs[-1] - costs[0]) / MOST_STATES
    last = {max(0, bisect_left(costs, costs[0] + width * (piece + 1)) - 1) for piece in range(MOST_STATES)}
    return [front[i] for i in sorted(last | {0, len(front) - 1})]


def quantized_bytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of a weight [out, ...] of `bits` per number, packed, with a float32 scale for each of its `out`
    channels.
    """
    count = 1
    for size in shape:
        count *= size
    return -(-count * bits // 8) + (4 * shape[0] if bits < 32 else 0)


def sparse_bytes(shape: Sequence[int], sparsity: float) -> int:
    """Bytes of a float32 weight of which `round(sparsity * n)` numbers are zero: what remains and one bit for each
    place, or the whole tensor where that is less."""
    count = 1
    for size in shape:
        count *= size
    kept = count - round(sparsity * count)
    return min(4 * count, 4 * kept + -(-count // 8))


def monotone(losses: Mapping[float, float]) -> dict[float, float]:
    """Losses by value, from the mildest value on, that never fall and are never below 0: what a stronger change seems
    to win is noise of the measurement. The mapping's order is from mild to strong."""
    found: dict[float, float] = {}
    highest = 0.0
    for value, loss in losses.items():
        highest = max(highest, loss if loss == loss else float("inf"))
        found[value] = highest
    return found
