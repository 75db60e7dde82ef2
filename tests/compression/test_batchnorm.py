import pytest
import torch
from torch import nn

from lathe.compression.modes import evaluated, reestimate_batchnorm


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.ReLU())


def test_statistics_are_the_plain_average_over_the_batches():
    torch.manual_seed(0)
    model, batches = net(), [torch.randn(8, 1, 4, 4) + i for i in range(3)]
    model[1].running_mean.fill_(100)
    assert reestimate_batchnorm(model, batches) == 3
    outputs = [model[0](batch).detach() for batch in batches]
    mean = torch.stack([out.mean((0, 2, 3)) for out in outputs]).mean(0)
    variance = torch.stack([out.var((0, 2, 3), unbiased=True) for out in outputs]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean)
    torch.testing.assert_close(model[1].running_var, variance)


def test_modes_and_momentum_and_weights_stay():
    model = net().train()
    model[0].eval()
    before = {name: value.clone() for name, value in model.named_parameters()}
    reestimate_batchnorm(model, [torch.randn(4, 1, 4, 4)])
    assert [module.training for module in model] == [False, True, True, True]
    assert model[1].momentum == 0.1
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


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
