"""Sensitivity of single layers, and the best allocation within a budget."""

import copy
import itertools
import random

import pytest
import torch
from support.net_state import assert_same
from torch import nn

import lathe.compression.pruning.sensitivity as module
from lathe.compression.pruning.sensitivity import (
    Option,
    allocate,
    layers,
    round_to_nearest,
    scan,
)
from lathe.errors import UserError


def test_layers_are_found_by_pattern_and_tied_weights_once() -> None:
    made = nn.ModuleDict(
        {"wte": nn.Embedding(5, 4), "fc": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 5, bias=False)}
    )
    made["head"].weight = made["wte"].weight
    assert list(layers(made)) == ["wte", "fc"]
    assert list(layers(made, ["f*"])) == ["fc"]
    with pytest.raises(
        UserError, match="layers: norm matches no convolution, linear layer or embedding: layers are wte, fc"
    ):
        layers(made, ["norm"])


def test_scan_measures_each_change_alone_with_fitting_statistics_and_restores() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    inputs, before = [torch.randn(8, 1, 8, 8) for _ in range(3)], copy.deepcopy(net.eval().state_dict())
    weights, original = {"0": net[0].weight, "4": net[4].weight}, {"0": before["0.weight"], "4": before["4.weight"]}
    changed, statistics = [], []

    def score() -> dict[str, float]:
        changed.append([name for name, weight in weights.items() if not torch.equal(weight, original[name])])
        statistics.append(net[1].running_mean.clone())
        return {"zeros": float(sum(int((weight == 0).sum()) for weight in weights.values()))}

    results = scan(net, layers(net), sparsities=[0.5], bits=[8, 2], score=score, batches=inputs)
    assert changed == [["0"]] * 3 + [["4"]] * 3
    assert results["0"]["sparsity"][0.5] == {"zeros": 18.0}
    assert results["4"]["sparsity"][0.5] == {"zeros": 216.0}
    assert list(results["4"]["bits"]) == [8, 2]
    assert_same(net.state_dict(), before)
    # Statistics are those of the changed convolution; a change after the BatchNorm leaves them at those of the
    # unchanged one.
    with torch.no_grad():
        outputs = torch.cat([nn.functional.conv2d(x, round_to_nearest(original["0"], 2)) for x in inputs])
        plain = torch.cat([nn.functional.conv2d(x, original["0"]) for x in inputs])
    torch.testing.assert_close(statistics[2], outputs.mean((0, 2, 3)))
    torch.testing.assert_close(statistics[5], plain.mean((0, 2, 3)))


def some_options(layers: int, seed: int) -> dict[str, list[Option]]:
    draw = random.Random(seed)
    return {
        f"layer{i}": [Option(bits, draw.randint(1, 50) * bits, draw.random() * 2.0**-bits) for bits in (2, 3, 4, 8)]
        for i in range(layers)
    }


def best(options: dict[str, list[Option]], budget: float) -> float:
    allocations = itertools.product(*options.values())
    return min(sum(o.loss for o in chosen) for chosen in allocations if sum(o.cost for o in chosen) <= budget)


@pytest.mark.parametrize(("seed", "share"), [(0, 0.0), (1, 0.3), (3, 1.0)])
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
