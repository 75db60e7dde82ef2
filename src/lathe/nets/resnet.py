"""Residual nets for small images and for ImageNet: He et al. 2016, arXiv:1512.03385.

The stem is one 3x3 convolution of stride 1 without max-pooling (`stem="imagenet"`: 7x7 of stride 2, and 3x3
max-pooling), and the end a global average, so that images of any size from 8x8 pixels work. Convolutions have no bias
(a BatchNorm follows each). In training mode a BatchNorm needs more than one value per channel: four-stage nets at 8x8
pixels need a batch of at least two.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from lathe.config.types import Count, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import ArgumentError
from lathe.nets.blocks import Add, Blocks

Shortcut = Literal["projection", "zero_pad"]


class ZeroPadShortcut(nn.Module):
    """The paper's option A, without parameters: take every `stride`-th pixel and pad channels with zeros."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2)
        )


def make_shortcut(in_channels: int, out_channels: int, stride: int, kind: Shortcut) -> nn.Module:
    """Return the identity if the shapes agree, otherwise a shortcut of `kind`."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    if kind == "zero_pad":
        return ZeroPadShortcut(in_channels, out_channels, stride)
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
            bn=nn.BatchNorm2d(out_channels),
        )
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: `[batch, in, H, W] -> [batch, width, H/stride, W/stride]`."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = make_shortcut(in_channels, width, stride, shortcut)
        self.add = Add()
        self.relu2 = nn.ReLU()

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the last norm of the residual branch, for the init `zero_gamma`."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        branch = self.relu1(self.bn1(self.conv1(x)))
        branch = self.bn2(self.conv2(branch))
        return self.relu2(self.add(branch, self.shortcut(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut.

    `[batch, in_channels, H, W] -> [batch, 4 * width, H/stride, W/stride]`. The stride is in the 3x3 convolution (the
    usual "v1.5"); the paper has it in the first 1x1.
    """

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        out_channels = self.expansion * width
        self.conv1 = nn.Conv2d(in_channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, out_channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = make_shortcut(in_channels, out_channels, stride, shortcut)
        self.add = Add()
        self.relu3 = nn.ReLU()

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the last norm of the residual branch, for the init `zero_gamma`."""
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        branch = self.relu1(self.bn1(self.conv1(x)))
        branch = self.relu2(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        return self.relu3(self.add(branch, self.shortcut(x)))


class _StagedResNet(nn.Module):
    """Stem of `channels`, stages, head. Stage i has `counts[i]` blocks of `width * 2**i`; i > 0 halves the image."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        counts: Sequence[int],
        width: int,
        in_channels: int,
        num_classes: int,
        shortcut: Shortcut,
        channels: int,
        large: bool = False,
    ) -> None:
        super().__init__()
        window = {"kernel_size": 7, "stride": 2, "padding": 3} if large else {"kernel_size": 3, "padding": 1}
        self.conv = nn.Conv2d(in_channels, channels, **window, bias=False)  # type: ignore[arg-type]
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shrink = nn.MaxPool2d(kernel_size=3, stride=2, padding=1) if large else None
        self.blocks = Blocks()
        for stage, count in enumerate(counts):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(block(channels, width * 2**stage, stride, shortcut))
                channels = width * 2**stage * block.expansion
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)

    def enter(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn(self.conv(x)))
        return out if self.shrink is None else self.shrink(out)

    def leave(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))


class CifarResNet(_StagedResNet):
    """The paper's section 4.2: three stages of n basic blocks, with `width`, 2x and 4x `width` channels.

    `depth` is 6n + 2 (20, 32, ...). `forward` takes `[batch, in_channels, H, W]` and returns logits `[batch,
    num_classes]`. `stem` is the number of channels of the first convolution, by default `width`: resnet8x4 of the
    distillation papers has depth 8, width 64, stem 32 (Tian et al. 2020, arXiv:1910.10699).

    `shortcut` selects the shortcut between stages, and between such a stem and the first stage. `zero_pad` is the
    paper's on CIFAR (option A, no parameters). `projection` (option B: 1x1 convolution and BatchNorm, 2,752 more
    parameters at width 16) is the default, because channel pruning and quantizers follow convolutions, not padding.
    Raises ArgumentError if `depth` is not 6n + 2.
    """

    @validated
    def __init__(
        self,
        *,
        depth: Annotated[int, Field(ge=8)],
        width: Count = 16,
        in_channels: Count = 3,
        num_classes: Count = 10,
        shortcut: Literal["projection", "zero_pad"] = "projection",
        stem: Count | None = None,
    ) -> None:
        if (depth - 2) % 6:
            near = depth - (depth - 2) % 6
            raise ArgumentError(
                f"depth={depth} is not 6n + 2, which a three-stage ResNet needs: take {near} or {near + 6}."
            )
        counts = [(depth - 2) // 6] * 3
        super().__init__(BasicBlock, counts, width, in_channels, num_classes, shortcut, stem or width)


class ResNet(_StagedResNet):
    """The paper's four-stage nets (table 1), with `width`, 2x, 4x and 8x `width` channels.

    `stem` "cifar" is one 3x3 convolution of stride 1, for small images; "imagenet" is the paper's, which divides an
    image's sides by four before the first stage, for about 224 x 224 pixels. `depth` 18 and 34 use basic blocks; 50,
    101 and 152 use bottlenecks, whose outputs have four times the channels. Shortcuts are projections. `forward` takes
    `[batch, in_channels, H, W]` and returns logits `[batch, num_classes]`. Raises ArgumentError for another `depth`.
    """

    COUNTS: ClassVar[dict[int, tuple[int, ...]]] = {
        18: (2, 2, 2, 2),
        34: (3, 4, 6, 3),
        50: (3, 4, 6, 3),
        101: (3, 4, 23, 3),
        152: (3, 8, 36, 3),
    }

    @validated
    def __init__(
        self,
        *,
        depth: Count,
        width: Count = 64,
        in_channels: Count = 3,
        num_classes: Count = 10,
        stem: Literal["cifar", "imagenet"] = "cifar",
    ) -> None:
        if depth not in self.COUNTS:
            raise ArgumentError(
                f"depth={depth!r} fits no four-stage ResNet: take 18, 34, 50, 101 or 152, or a CifarResNet for 6n + 2."
            )
        block: type[BasicBlock | Bottleneck] = BasicBlock if depth < 50 else Bottleneck
        large = stem == "imagenet"
        super().__init__(block, self.COUNTS[depth], width, in_channels, num_classes, "projection", width, large)


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
        return self.add(self.conv2(self.dropout(branch)), residual)


class WideResNet(nn.Module):
    """WRN-`depth`-`width` (Zagoruyko and Komodakis 2016, arXiv:1605.07146): three stages of n pre-activation blocks.

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
        return self.conv(x)

    def leave(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.relu(self.bn(x))).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))
