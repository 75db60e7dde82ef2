"""Sharded tensors are gathered and sharded; clipping and overflows are those of all gradients on all ranks."""

from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lathe.strategies.dtensors import clip_by_norm, clip_by_value, full_tree, install_clipping, shard_like

SHAPES = ((3, 4), (5,), (4, 6), (1,), (7,))  # odd sizes: a rank may hold less than the other, or nothing


def plain() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


def spread(rank: int) -> list[torch.Tensor]:
    """The same parameters: sharded on one mesh, on another, replicated, as partial sums, and plain."""
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    kinds = [
        (line, [Shard(0)]),
        (line, [Shard(0)]),
        (square, [Shard(1), Replicate()]),
        (square["a"], [Shard(0)]),
        (None, None),
    ]
    found = []
    for parameter, (mesh, placements) in zip(plain(), kinds, strict=True):
        if mesh is not None:
            assert parameter.grad is not None
            gradient = distribute_tensor(parameter.grad, mesh, placements)
            parameter = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
            parameter.grad = gradient
        found.append(parameter)
    extra = torch.nn.Parameter(distribute_tensor(torch.zeros(2), line, [Replicate()]))
    extra.grad = DTensor.from_local(
        torch.tensor([1.0 + rank, 2.0]), line, [Partial()], run_check=False
    )  # in total [3, 4]
    return [*found, extra]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Optimizer:
    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


class Plugin:
    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)


def on_two(rank: int) -> dict[str, Any]:
    parameters = spread(rank)
    norm = clip_by_norm(parameters, 1.0)
    clipped = [whole(parameter) for parameter in parameters]
    by_value = spread(rank)
    clip_by_value(by_value, 0.5)
    found = {"norm": norm, "clipped": clipped, "by value": [whole(parameter) for parameter in by_value]}
    tensor = torch.arange(15.0).view(5, 3)
    shard: Any = shard_like(tensor, distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)]))
    found["bytes"] = shard.to_local().untyped_storage().nbytes()
    found["kept"], found["dropped"] = (full_tree([shard, {"a": tensor}], keep=keep) for keep in (True, False))
    plugin: Any = Plugin()
    install_clipping(plugin)
    for overflows in (False, True):
        scaled = spread(rank)
        if overflows and rank == 1:
            scaled[0].grad.to_local().fill_(float("inf"))
        optimizer: Any = Optimizer(scaled)
        plugin.scaler.scale(torch.ones(()))  # makes its tensors
        flags = plugin.scaler._unscale_grads_(optimizer, torch.tensor(0.25), torch.zeros(()), False)
        found[f"flag {overflows}"] = [float(flag) for flag in flags.values()]
        found[f"unscaled {overflows}"] = [whole(parameter) for parameter in scaled]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(on_two)


def reference() -> list[torch.Tensor]:
    extra = torch.nn.Parameter(torch.zeros(2))
    extra.grad = torch.tensor([3.0, 4.0])
    return [*plain(), extra]


def test_a_tensor_is_sharded_and_gathered(ranks: list[dict[str, Any]]) -> None:
    """Strategies gather and load whole states in test_fsdp.py."""
    tensor = torch.arange(15.0).view(5, 3)
    for rank, rows in zip(ranks, (3, 2), strict=True):
        assert rank["bytes"] == rows * 3 * 4  # a view would keep the whole tensor in memory
        assert torch.equal(rank["kept"][0], tensor)
        assert rank["dropped"][0].numel() == 0
        assert torch.equal(rank["dropped"][1]["a"], tensor)


def test_spread_gradients_are_clipped_as_whole_ones(ranks: list[dict[str, Any]]) -> None:
    by_norm, by_value = reference(), reference()
    norm = torch.nn.utils.clip_grad_norm_(by_norm, 1.0)
    torch.nn.utils.clip_grad_value_(by_value, 0.5)
    assert norm > 5
    for rank in ranks:
        torch.testing.assert_close(rank["norm"], norm)
        torch.testing.assert_close(rank["clipped"], [parameter.grad for parameter in by_norm])
        assert all(map(torch.equal, rank["by value"], [parameter.grad for parameter in by_value]))


def test_an_overflow_on_one_rank_is_found_by_both(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["flag False"] == [0.0]
        assert rank["flag True"] == [1.0]
        for ours, parameter in zip(rank["unscaled False"], reference(), strict=True):
            torch.testing.assert_close(ours, parameter.grad * 0.25)
