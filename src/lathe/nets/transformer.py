"""Transformers of pre-norm blocks around torch's scaled_dot_product_attention: ViT and GPT-2."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.config.types import Count, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError
from lathe.nets.blocks import Add, Blocks


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, arXiv:1706.03762): `[batch, time, width]` in and out.

    q, k, v and out are separate layers, and the number of heads is read from the tensors, so that a tensor-parallel
    rank computes its share of the heads. With `causal`, a token attends to itself and earlier tokens. Raises
    ArgumentError if `heads` does not divide `width`.
    """

    @validated
    def __init__(self, width: Count, heads: Count, *, causal: bool, dropout: ShareBelowOne) -> None:
        super().__init__()
        if width % heads:
            near = next(count for count in range(min(heads, width), 0, -1) if width % count == 0)
            raise ArgumentError(f"heads={heads} does not divide width={width}: set heads={near}.")
        self.head_dim = width // heads
        self.causal = causal
        self.dropout = dropout
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(projection(x)) for projection in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """Reshape `[batch, time, heads * head_dim]` to `[batch, heads, time, head_dim]`, with all heads of x."""
        return x.view(x.shape[0], x.shape[1], x.shape[2] // self.head_dim, self.head_dim).transpose(1, 2)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + down(gelu(up(norm(x)))), with 4 `width` inside.

    The shape is `[batch, time, width]`. `eps` is that of the norms; `tanh` selects the approximation of GELU that GPT-2
    was trained with. Dropout acts on the attention's weights and at the end of both branches.
    """

    @validated
    def __init__(
        self, width: Count, heads: Count, *, causal: bool, dropout: ShareBelowOne, eps: float, tanh: bool
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.attention = Attention(width, heads, causal=causal, dropout=dropout)
        self.attention_dropout = nn.Dropout(dropout)
        self.attention_add = Add()
        self.mlp_norm = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh" if tanh else "none")
        self.down = nn.Linear(4 * width, width)
        self.mlp_dropout = nn.Dropout(dropout)
        self.mlp_add = Add()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_add(x, self.attention_dropout(self.attention(self.attention_norm(x))))
        return self.mlp_add(x, self.mlp_dropout(self.down(self.gelu(self.up(self.mlp_norm(x))))))


def block_plan(dropout: float) -> dict[str, str]:
    """Return the part of a net's `tensor_plan` for its transformer blocks.

    Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM), with the sequence-parallel norms of Korthikanti et al. 2022,
    arXiv:2205.05198.
    """
    plan = {
        "blocks.*.attention_norm": "sequence",
        "blocks.*.attention.q": "column",
        "blocks.*.attention.k": "column",
        "blocks.*.attention.v": "column",
        "blocks.*.attention.out": "row",
        "blocks.*.mlp_norm": "sequence",
        "blocks.*.up": "column",
        "blocks.*.down": "row",
    }
    if dropout:
        plan |= {"blocks.*.attention_dropout": "sequence", "blocks.*.mlp_dropout": "sequence"}
    return plan


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
        return self.dropout(tokens + self.position)


class ViT(nn.Module):
    """Dosovitskiy et al. 2021, arXiv:2010.11929: `depth` blocks of `width` with `heads` heads over an image's patches.

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
        weights = [module for module in self.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        for module in weights:
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
        return self.embed(x)

    def leave(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(x[:, 0] if self.pool == "token" else x.mean(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))


class TokenEmbedding(nn.Module):
    """A vector per token plus one per position: int64 `[batch, time] -> [batch, time, width]`."""

    def __init__(self, vocab_size: int, max_length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.token(ids) + self.position(positions))


class GPT(nn.Module):
    """GPT-2, Radford et al. 2019: `depth` causal blocks of `width` with `heads` heads on tokens and positions.

    `forward` takes int64 token ids `[batch, time]`, time up to `max_length`, and returns logits `[batch, time,
    vocab_size]`. With `tie_weights`, head and token embedding share their weight. Initial weights are as in the paper:
    normal, standard deviation 0.02, and 0.02 / sqrt(2 depth) where a branch joins the residual stream; biases zero.
    Raises UserError if a sequence is longer than `max_length`.
    """

    @validated
    def __init__(
        self,
        *,
        vocab_size: Count,
        max_length: Count,
        width: Count,
        depth: Count,
        heads: Count,
        dropout: ShareBelowOne = 0.0,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        self.width, self.heads, self.dropout, self.max_length = width, heads, dropout, max_length
        self.embed = TokenEmbedding(vocab_size, max_length, width, dropout)
        self.blocks = Blocks(
            TransformerBlock(width, heads, causal=True, dropout=dropout, eps=1e-5, tanh=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tie_weights:
            self.head.weight = self.embed.token.weight
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                joins = name.endswith((".attention.out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * depth) if joins else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel style of each module; tied weights are both sharded by tokens."""
        ends = {"embed": "split", "embed.token": "vocab", "norm": "sequence", "head": "logits"}
        return ends | block_plan(self.dropout)

    @property
    def tensor_limits(self) -> dict[str, int]:
        """Return the sizes that the number of tensor-parallel ranks must divide, by argument."""
        return {"heads": self.heads, "width": self.width}

    def enter(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.max_length:
            raise UserError(
                f"max_length={self.max_length} is shorter than the {x.shape[1]} tokens of a sequence: build the net "
                f"with max_length={x.shape[1]}, or give it shorter ones."
            )
        return self.embed(x)

    def leave(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))
