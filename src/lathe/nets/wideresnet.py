"""Wide residual nets: Zagoruyko and Komodakis 2016, "Wide Residual Networks", arXiv:1605.07146."""

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from lathe.config.types import Count, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import ArgumentError
from lathe.nets.blocks import Add, Blocks


class PreActivationBlock(nn.Module):
    """Norm, ReLU, 3x3 convolution, twice, and a shortcut.

    `[batch, in, H, W] -> [batch, out, H/stride, W/stride]`. Dropout is between the convolutions (the paper's section
    2.4). If the channels change, the first norm and ReLU also feed the 1x1 shortcut; otherwise the shortcut is the
    input.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu2 = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.add = Add()
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.relu1(self.bn1(x))
        residual = x if self.shortcut is None else self.shortcut(active)
        branch = self.relu2(self.bn2(self.conv1(active)))
        out: Tensor = self.add(self.conv2(self.dropout(branch)), residual)
        return out


class WideResNet(nn.Module):
    """WRN-`depth`-`width`: three stages of n pre-activation blocks; depth is 6n + 4.

    The stages have 16, 32 and 64 times `width` channels; `width` is the paper's widening factor k. `forward` takes
    `[batch, in_channels, H, W]`, at least 8x8 pixels, and returns logits `[batch, num_classes]`. Raises ArgumentError
    if `depth` is not 6n + 4.
    """

    @validated
    def __init__(
        self,
        *,
        depth: Annotated[int, Field(ge=10)],
        width: Count,
        in_channels: Count = 3,
        num_classes: Count = 10,
        dropout: ShareBelowOne = 0.0,
    ) -> None:
        super().__init__()
        if (depth - 4) % 6:
            near = depth - (depth - 4) % 6
            raise ArgumentError(f"depth={depth} is not 6n + 4, which a WideResNet needs: take {near} or {near + 6}.")
        self.conv = nn.Conv2d(in_channels, 16, kernel_size=3, padding=1, bias=False)
        self.blocks = Blocks()
        channels = 16
        for stage in range(3):
            for index in range((depth - 4) // 6):
                stride = 2 if stage > 0 and index == 0 else 1
                out_channels = 16 * width * 2**stage
                self.blocks.append(PreActivationBlock(channels, out_channels, stride, dropout))
                channels = out_channels
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)

    def enter(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out

    def leave(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.relu(self.bn(x))).flatten(1))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))
