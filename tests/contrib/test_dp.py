"""DataParallel: refused without a GPU, and replaces the net only during a step."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lathe.contrib.dp import DP
from lathe.errors import UserError


class Doubled(nn.Module):
    """A stand-in for nn.DataParallel, which needs GPUs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.module = net

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.module(x)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def step(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.fixture
def strategy() -> tuple[Any, Net]:
    strategy, task = object.__new__(DP), Net()
    strategy._lightning_module = strategy._model = task
    strategy._parallel = Doubled(task.net)
    return strategy, task


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UserError, match="strategy=dp drives several GPUs from one process and none is visible here: use strategy=ddp"
    ):
        DP()


@pytest.mark.parametrize("kind", ["training_step", "validation_step", "test_step"])
def test_the_wrapper_replaces_the_net_during_each_kind_of_step(
    strategy: tuple[Any, Net], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    dp, task = strategy
    net, names, x = task.net, list(task.state_dict()), torch.randn(4, 2)
    monkeypatch.setattr(SingleDeviceStrategy, kind, lambda self, *args: task.step(*args))
    assert torch.equal(getattr(dp, kind)(x), 2 * net(x))
    assert task.net is net
    assert list(task.state_dict()) == names == ["net.weight", "net.bias"]
