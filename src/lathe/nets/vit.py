"""Vision transformers: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", arXiv:2010.11929."""

from typing import Literal

import torch
from torch import Tensor, nn

from lathe.config.types import Count, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import ArgumentError
from lathe.nets.attention import TransformerBlock, block_plan
from lathe.nets.blocks import Blocks

Pool = Literal["mean", "token"]


class PatchEmbedding(nn.Module):
    """A vector per patch plus one per position: `[batch, channels, side, side] -> [batch, tokens, width]`.

    There are (side / patch_size)^2 tokens, row by row; `class_token` adds a learned one before them.
    """

    def __init__(
        self, channels: int, image_size: int, patch_size: int, width: int, *, class_token: bool, dropout: float
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)
        tokens = (image_size // patch_size) ** 2 + class_token
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if class_token else None
        self.position = nn.Parameter(torch.zeros(1, tokens, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            tokens = torch.cat([self.token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        out: Tensor = self.dropout(tokens + self.position)
        return out


class ViT(nn.Module):
    """`depth` pre-norm blocks of `width` with `heads` heads over the patches of an image.

    `forward` takes `[batch, channels, image_size, image_size]` and returns logits `[batch, num_classes]`. `pool` is the
    head's input: `mean`, the average of all tokens, whose number stays even; or the paper's `token`, a learned one
    before the patches. Initial weights are normal with standard deviation 0.02, truncated at two of these; biases zero.
    Raises ArgumentError if `patch_size` does not divide `image_size`, or `heads` does not divide `width`.
    """

    @validated
    def __init__(
        self,
        *,
        channels: Count,
        image_size: Count,
        num_classes: Count,
        patch_size: Count,
        width: Count,
        depth: Count,
        heads: Count,
        dropout: ShareBelowOne = 0.0,
        pool: Literal["mean", "token"] = "mean",
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            divisors = [side for side in range(1, image_size + 1) if image_size % side == 0]
            near = min(divisors, key=lambda side: abs(side - patch_size))
            raise ArgumentError(
                f"patch_size={patch_size} does not divide the {image_size} pixels of an image's side: set "
                f"patch_size={near}."
            )
        self.width, self.heads, self.dropout, self.pool = width, heads, dropout, pool
        self.embed = PatchEmbedding(
            channels, image_size, patch_size, width, class_token=pool == "token", dropout=dropout
        )
        self.blocks = Blocks(
            TransformerBlock(width, heads, causal=False, dropout=dropout, eps=1e-6, tanh=False) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.embed.position, std=0.02, a=-0.04, b=0.04)
        if self.embed.token is not None:
            nn.init.trunc_normal_(self.embed.token, std=0.02, a=-0.04, b=0.04)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel styles; modules after the blocks need all tokens, and are replicated."""
        return {"embed": "split", "norm": "join"} | block_plan(self.dropout)

    @property
    def tensor_limits(self) -> dict[str, int]:
        """Return the sizes that the number of tensor-parallel ranks must divide, by argument."""
        return {"heads": self.heads, "width": self.width}

    def enter(self, x: Tensor) -> Tensor:
        out: Tensor = self.embed(x)
        return out

    def leave(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        logits: Tensor = self.head(x[:, 0] if self.pool == "token" else x.mean(1))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))
