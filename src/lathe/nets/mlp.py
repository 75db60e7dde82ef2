"""Multilayer perceptrons on flattened images: a small one, and a deep one of equal layers."""

from collections.abc import Callable

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
        out: Tensor = self.dropout(self.relu(self.linear(x)))
        return out


class Stack(nn.Module):
    """A stem and `repeats` equal blocks, made by `layer`, and a linear classifier on flattened inputs."""

    def __init__(
        self, layer: Callable[..., nn.Module], inputs: int, num_classes: int, width: int, repeats: int, dropout: float
    ) -> None:
        super().__init__()
        self.stem = layer(inputs, width, dropout=dropout)
        self.blocks = Blocks(layer(width, width, dropout=dropout) for _ in range(repeats))
        self.head = nn.Linear(width, num_classes)

    @property
    def tensor_limits(self) -> dict[str, int]:
        """Return the sizes that the number of tensor-parallel ranks must divide, by argument."""
        return {"width": self.head.in_features}

    def enter(self, x: Tensor) -> Tensor:
        out: Tensor = self.stem(x.flatten(1))
        return out

    def leave(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))


class MLP(Stack):
    """`depth` hidden layers of `width` units, then a linear classifier.

    `forward` takes `[batch, channels, image_size, image_size]` and returns logits `[batch, num_classes]`. The first
    hidden layer is the `stem`, the other `depth - 1` are the `blocks`.
    """

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
        super().__init__(HiddenLayer, channels * image_size**2, num_classes, width, depth - 1, dropout)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel style of each module.

        Column and row alternate, with one reduction per two layers. With an even number of hidden layers the head's
        input is full; the head is small and stays unsharded.
        """
        names = ["stem.linear", *(f"blocks.{index}.linear" for index in range(len(self.blocks))), "head"]
        pairs = len(names) // 2 * 2
        return {name: "row" if index % 2 else "column" for index, name in enumerate(names[:pairs])}


class NormedLayer(nn.Module):
    """Linear, LayerNorm, GELU, dropout: `[batch, in_features] -> [batch, out_features]`."""

    def __init__(self, in_features: int, out_features: int, *, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.LayerNorm(out_features)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.gelu(self.norm(self.linear(x))))
        return out


class DeepMLP(Stack):
    """A stem, `depth` equal blocks of `width` units, and a linear classifier; no shortcuts.

    `forward` takes `[batch, channels, image_size, image_size]` and returns logits `[batch, num_classes]`.
    """

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
        super().__init__(NormedLayer, channels * image_size**2, num_classes, width, depth, dropout)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel style of each module: gathered outputs, because norms need all features."""
        return {"stem.linear": "gather", "blocks.*.linear": "gather"}
