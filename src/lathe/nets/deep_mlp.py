"""A plain stack of equal layers on flattened images: what strategies and activation checkpointing are measured on."""

from torch import Tensor, nn

from lathe.config.types import Count, ShareBelowOne
from lathe.config.validation import validated
from lathe.nets.mlp import Stack


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
    """A stem, `depth` blocks of `width` units, all equal, and a linear classifier; no shortcuts.

    `forward` takes `[batch, channels, image_size, image_size]` and returns logits `[batch, num_classes]`.

    Raises ArgumentError if `width` or `depth` is not a whole number of at least 1, or `dropout` is outside [0, 1).
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
        """How tensor parallelism cuts each module: each norm needs all features of a layer, so each layer's output is
        gathered.
        """
        return {"stem.linear": "gather", "blocks.*.linear": "gather"}
