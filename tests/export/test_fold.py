import torch
from torch import Tensor, nn

from lathe.export.fold import factors, norms_after
from lathe.nets import CifarResNet, ResNet, WideResNet


def test_every_convolution_of_a_resnet_is_followed_by_its_norm() -> None:
    example = torch.zeros(2, 3, 8, 8)
    pairs = norms_after(CifarResNet(depth=8).eval(), example)
    assert pairs["conv"] == "bn"
    assert pairs["blocks.1.conv2"] == "blocks.1.bn2"
    assert pairs["blocks.1.shortcut.conv"] == "blocks.1.shortcut.bn"
    assert len(pairs) == 9
    assert len(norms_after(ResNet(depth=50, width=8).eval(), example)) == 53


def test_norms_before_their_convolution_are_left() -> None:
    pairs = norms_after(WideResNet(depth=10, width=1).eval(), torch.zeros(2, 3, 8, 8))
    assert pairs == {f"blocks.{i}.conv1": f"blocks.{i}.bn2" for i in range(3)}


class Reader(nn.Module):
    """A convolution whose output is read by `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.bn, self.how = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), how

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.conv(x)
        if self.how == "twice":
            return self.bn(y) + y
        if self.how == "returned":
            return self.bn(y), y
        if self.how == "called again":
            return self.bn(self.conv(y))
        if self.how == "shape":
            return self.bn(y).view(y.shape[0], -1)
        return self.bn(y)


def test_an_output_with_another_reader_is_left() -> None:
    example = torch.zeros(2, 3, 4, 4)
    for how in ("twice", "returned", "called again"):
        assert norms_after(Reader(how).eval(), example) == {}, how
    for how in ("plain", "shape"):
        assert norms_after(Reader(how).eval(), example) == {"conv": "bn"}, how


def test_factors_are_the_norm() -> None:
    for affine in (True, False):
        norm = nn.BatchNorm2d(4, affine=affine)
        norm.running_mean = torch.tensor([0.5, -1.0, 2.0, 0.0])
        norm.running_var = torch.tensor([0.1, 2.0, 1.0, 4.0])
        x = torch.randn(2, 4, 3, 3)
        g, b = factors(norm.eval(), 4)
        torch.testing.assert_close(x * g.float().view(-1, 1, 1) + b.float().view(-1, 1, 1), norm(x))
