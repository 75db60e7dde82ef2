"""GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""

import math

import torch
from torch import Tensor, nn

from lathe.config.types import Count, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import UserError
from lathe.nets.attention import TransformerBlock, block_plan
from lathe.nets.blocks import Blocks


class TokenEmbedding(nn.Module):
    """A vector per token plus one per position: int64 `[batch, time] -> [batch, time, width]`."""

    def __init__(self, vocab_size: int, max_length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        out: Tensor = self.dropout(self.token(ids) + self.position(positions))
        return out


class GPT(nn.Module):
    """`depth` causal pre-norm blocks of `width` with `heads` heads on embeddings of tokens and positions.

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
        self._initialise(depth)

    @torch.no_grad()
    def _initialise(self, depth: int) -> None:
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
                "with "
                f"max_length={x.shape[1]}, or give it shorter ones."
            )
        out: Tensor = self.embed(x)
        return out

    def leave(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))
