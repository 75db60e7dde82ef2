"""Multilayer perceptrons on flattened images: a small one, and a deep one of equal layers."""

from typing import ClassVar

from torch import Tensor, nn

from lathe.config.types import Count, ShareBelowOne
from lathe.config.validation import validated
from lathe.nets.blocks import Blocks


class HiddenLayer(nn.Module):
    """Linear, ReLU, dropout: `[batch, in_features] -> [batch, out_features]`."""

    def __init__(self, in_features: int, out_features: int, *, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.relu(self.linear(x)))


class NormedLayer(nn.Module):
    """Linear, LayerNorm, GELU, dropout: `[batch, in_features] -> [batch, out_features]`."""

    def __init__(self, in_features: int, out_features: int, *, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.LayerNorm(out_features)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.gelu(self.norm(self.linear(x))))


class MLP(nn.Module):
    """`depth` hidden layers of `width` units, then a linear classifier.

    `forward` takes `[batch, channels, image_size, image_size]` and returns logits `[batch, num_classes]`. The first
    hidden layer is the `stem`, the other `depth - 1` are the `blocks`.
    """

    layer: ClassVar[type[HiddenLayer | NormedLayer]] = HiddenLayer
    depth_has_stem: ClassVar[bool] = True

    @validated
    def __init__(
        self,
        *,
        channels: Count,
        image_size: Count,
        num_classes: Count,
        width: Count,
        depth: Count,
        dropout: ShareBelowOne = 0.0,
    ) -> None:
        super().__init__()
        self.stem = self.layer(channels * image_size**2, width, dropout=dropout)
        repeats = depth - 1 if self.depth_has_stem else depth
        self.blocks = Blocks(self.layer(width, width, dropout=dropout) for _ in range(repeats))
        self.head = nn.Linear(width, num_classes)

    @property
    def tensor_limits(self) -> dict[str, int]:
        """Return the sizes that the number of tensor-parallel ranks must divide, by argument."""
        return {"width": self.head.in_features}

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel style of each module.

        Column and row alternate, with one reduction per two layers. With an even number of hidden layers the head's
        input is full; the head is small and stays unsharded.
        """
        names = ["stem.linear", *(f"blocks.{index}.linear" for index in range(len(self.blocks))), "head"]
        pairs = len(names) // 2 * 2
        return {name: "row" if index % 2 else "column" for index, name in enumerate(names[:pairs])}

    def enter(self, x: Tensor) -> Tensor:
        return self.stem(x.flatten(1))

    def leave(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))


class DeepMLP(MLP):
    """A stem, `depth` equal blocks of `width` units, and a linear classifier; no shortcuts.

    `forward` takes `[batch, channels, image_size, image_size]` and returns logits `[batch, num_classes]`.
    """

    layer = NormedLayer
    depth_has_stem = False

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel style of each module: gathered outputs, because norms need all features."""
        return {"stem.linear": "gather", "blocks.*.linear": "gather"}
