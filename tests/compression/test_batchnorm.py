import torch
from torch import nn

from lathe.compression.modes import reestimate_batchnorm


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
