import torch
from torch import nn

from lathe.export.fold import factors


def test_factors_are_the_norm() -> None:
    for affine in (True, False):
        norm = nn.BatchNorm2d(4, affine=affine)
        norm.running_mean = torch.tensor([0.5, -1.0, 2.0, 0.0])
        norm.running_var = torch.tensor([0.1, 2.0, 1.0, 4.0])
        x = torch.randn(2, 4, 3, 3)
        g, b = factors(norm.eval(), 4)
        torch.testing.assert_close(x * g.float().view(-1, 1, 1) + b.float().view(-1, 1, 1), norm(x))
