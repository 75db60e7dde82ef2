"""A net on several devices in one process equals the whole net; unplaceable layers are refused."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.pipeline_fit import adam, build, fit
from torch import nn

from lathe.strategies.model_split import ModelSplit, balance

TWICE = ["cpu:0", "cpu:0"]


@pytest.mark.parametrize("name", ["mlp", "resnet", "tied"])
def test_losses_are_those_of_the_whole_net(name: str) -> None:
    assert fit(name, ModelSplit(TWICE))["losses"] == fit(name)["losses"]


def test_checkpoints_are_those_of_the_whole_net_and_continue(tmp_path: Path) -> None:
    whole = fit("tied", folder=tmp_path / "whole", optimizer=adam, epochs=2)
    fit("tied", ModelSplit(TWICE), folder=tmp_path / "first", optimizer=adam, max_steps=3)
    split = torch.load(tmp_path / "first" / "last.ckpt", weights_only=True)
    assert list(split["state_dict"]) == list(build("tied").state_dict())
    continued = fit(
        "tied",
        ModelSplit(TWICE),
        folder=tmp_path / "more",
        resume=tmp_path / "first" / "last.ckpt",
        optimizer=adam,
        epochs=2,
    )
    assert continued["losses"] == whole["losses"][6:]


def test_activations_move_between_the_devices() -> None:
    """meta is a second device on every machine: all that ends up there was moved by the strategy."""
    net = build("mlp")
    strategy = ModelSplit(["cpu:0", "cpu:0", "cpu:0"], split=[2, 2, 1])
    strategy.devices[1] = torch.device("meta")
    seen: dict[str, str] = {}
    for index, block in enumerate(net.blocks):
        block.register_forward_hook(lambda module, args, out, index=index: seen.update({str(index): out.device.type}))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

    strategy._lightning_module = strategy._model = Holder()  # type: ignore[assignment]
    strategy.model_to_device()
    assert {name: p.device.type for name, p in net.named_parameters() if p.device.type != "cpu"} == {
        f"blocks.{i}.linear.{kind}": "meta" for i in (2, 3) for kind in ("weight", "bias")
    }
    with pytest.raises((RuntimeError, NotImplementedError)):  # meta tensors can't be copied back
        net(torch.zeros(2, 1, 4, 4))
    assert seen == {"0": "cpu", "1": "cpu", "2": "meta", "3": "meta"}


@pytest.mark.parametrize(
    ("sizes", "parts", "extra", "largest"),
    [
        ([1, 1, 1, 9], 2, 0, 9),
        ([1, 1, 1, 1], 2, 2, 3),
        ([5, 1, 1, 5, 2], 3, 0, 6),
    ],
)
def test_the_fullest_device_is_as_empty_as_can_be(sizes: list[int], parts: int, extra: int, largest: int) -> None:
    edges = balance(sizes, parts, extra)
    assert (edges[0], edges[-1], len(edges)) == (0, len(sizes), parts + 1)
    assert edges == sorted(set(edges))
    assert max(sum(sizes[a:b]) + (0 if a else extra) for a, b in pairwise(edges)) == largest
