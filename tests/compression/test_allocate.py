"""The allocation is the best within the budget."""

import itertools
import math
import random

import pytest

import lathe.compression.pruning.sensitivity as module
from lathe.compression.pruning.sensitivity import Option, allocate, quantized_bytes, sparse_bytes


def some_options(layers: int, seed: int) -> dict[str, list[Option]]:
    draw = random.Random(seed)
    return {
        f"layer{i}": [Option(bits, draw.randint(1, 50) * bits, draw.random() * 2.0**-bits) for bits in (2, 3, 4, 8)]
        for i in range(layers)
    }


def best(options: dict[str, list[Option]], budget: float) -> float:
    found = math.inf
    for chosen in itertools.product(*options.values()):
        if sum(option.cost for option in chosen) <= budget:
            found = min(found, sum(option.loss for option in chosen))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_equals_the_best_of_all(seed: int, share: float) -> None:
    options = some_options(5, seed)
    least = sum(min(option.cost for option in some) for some in options.values())
    most = sum(max(option.cost for option in some) for some in options.values())
    budget = least + share * (most - least)
    found = allocate(options, budget)
    assert found.loss == pytest.approx(best(options, budget))
    assert found.cost <= budget
    chosen = [next(option for option in options[name] if option.value == value) for name, value in found.values.items()]
    assert sum(option.cost for option in chosen) == found.cost
    assert list(found.values) == list(options)


def test_many_layers_keep_the_budget_and_come_near_the_exact_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    options = {f"{i}": [Option(b, draw.random() * b, draw.random() / b**2) for b in (2, 3, 4, 6, 8)] for i in range(40)}
    least = sum(min(option.cost for option in some) for some in options.values())
    exact = allocate(options, 2 * least)
    monkeypatch.setattr(module, "MOST_STATES", 500)
    coarse = allocate(options, 2 * least)
    assert max(exact.cost, coarse.cost) <= 2 * least
    assert exact.loss <= coarse.loss <= 1.02 * exact.loss


def test_bytes() -> None:
    assert quantized_bytes((8, 4, 3, 3), 8) == 288 + 32
    assert quantized_bytes((8, 4, 3, 3), 3) == 108 + 32
    assert quantized_bytes((8, 4), 32) == 128
    assert sparse_bytes((8, 4), 0.0) == 128  # dense is smaller than a mask plus all weights
    assert sparse_bytes((8, 4), 0.75) == 8 * 4 + 4
