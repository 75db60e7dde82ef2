"""Sensitivity of single layers, and the best allocation within a budget."""

import itertools
import math
import random

import pytest
import torch
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


def net() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    return made.eval()


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
    made, inputs = net(), [torch.randn(8, 1, 8, 8) for _ in range(3)]
    before = {name: value.clone() for name, value in made.state_dict().items()}
    original = {name: made.get_submodule(name).weight.detach().clone() for name in ("0", "4")}
    seen: list[tuple[str, ...]] = []
    statistics: list[torch.Tensor] = []

    def score() -> dict[str, float]:
        seen.append(
            tuple(name for name in original if not torch.equal(made.get_submodule(name).weight, original[name]))
        )
        statistics.append(made[1].running_mean.clone())
        return {"zeros": float(sum(int((made.get_submodule(name).weight == 0).sum()) for name in original))}

    found = scan(made, layers(made), sparsities=[0.5], bits=[8, 2], score=score, batches=inputs)
    assert seen == [("0",)] * 3 + [("4",)] * 3
    assert found["0"]["sparsity"][0.5] == {"zeros": 18.0}
    assert found["4"]["sparsity"][0.5] == {"zeros": 216.0}
    assert list(found["4"]["bits"]) == [8, 2]
    for name, value in made.state_dict().items():
        assert torch.equal(value, before[name]), name
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
    found = math.inf
    for chosen in itertools.product(*options.values()):
        if sum(option.cost for option in chosen) <= budget:
            found = min(found, sum(option.loss for option in chosen))
    return found


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
