"""A net that is asked in evaluation mode is left as it was."""

import pytest
import torch
from torch import nn

from lathe.compression.modes import evaluated


def test_each_module_has_its_own_mode_again_and_hooks_are_gone() -> None:
    net = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2), nn.Linear(2, 2))
    net[1].eval()
    seen: list[bool] = []
    hook = net[0].register_forward_hook(lambda module, *_: seen.append(module.training))
    with evaluated(net, [hook]):
        net(torch.ones(2, 2))
    assert [module.training for module in net.modules()] == [True, True, False, True]
    net(torch.ones(2, 2))
    assert seen == [False]


def test_an_error_changes_nothing_of_it() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(RuntimeError), evaluated(net):
        net(torch.ones(3))
    assert net.training
