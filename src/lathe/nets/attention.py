"""Pre-norm transformer blocks around torch's scaled_dot_product_attention, for ViT and GPT."""

import torch.nn.functional as F
from torch import Tensor, nn

from lathe.config.types import Count, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import ArgumentError
from lathe.nets.blocks import Add


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
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

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
        out: Tensor = self.mlp_add(x, self.mlp_dropout(self.down(self.gelu(self.up(self.mlp_norm(x))))))
        return out


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
