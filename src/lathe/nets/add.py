"""The sum at the end of a residual branch, as a module: quantizers have to find it, and a plain `+` can't be found."""

from torch import Tensor, nn


class Add(nn.Module):
    """x + y, of equal shapes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y
