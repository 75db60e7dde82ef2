"""Attention and its blocks compute the published formulas."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.nets.transformer import Attention, TransformerBlock, block_plan


def share(layer: nn.Linear, rank: int, of: int, word: str) -> None:
    """Leave a layer the share that a rank of tensor parallelism has; the bias of a row stays with one rank."""
    weight, bias = layer.weight.data, layer.bias.data
    layer.weight.data = weight.chunk(of, dim=0 if word == "column" else 1)[rank]
    layer.bias.data = bias.chunk(of)[rank] if word == "column" else bias * (rank == 0)


def formula(attention: Attention, x: Tensor, heads: int, causal: bool) -> Tensor:
    """Vaswani et al. 2017, equation 1, head by head."""
    outs = []
    for q, k, v in zip(
        *(layer(x).chunk(heads, dim=-1) for layer in (attention.q, attention.k, attention.v)), strict=True
    ):
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        outs.append(scores.softmax(-1) @ v)
    return attention.out(torch.cat(outs, dim=-1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_is_the_formula(heads: int, causal: bool) -> None:
    attention = Attention(12, heads, causal=causal, dropout=0.0)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(attention(x), formula(attention, x, heads, causal))


@pytest.mark.parametrize("tanh", [False, True])
def test_block_is_pre_norm(tanh: bool) -> None:
    block = TransformerBlock(8, 2, causal=True, dropout=0.0, eps=1e-5, tanh=tanh)
    x = torch.randn(2, 3, 8)
    middle = x + block.attention(F.layer_norm(x, (8,)))
    hidden = block.up(F.layer_norm(middle, (8,)))
    hidden = F.gelu(hidden, approximate="tanh" if tanh else "none")
    torch.testing.assert_close(block(x), middle + block.down(hidden))
    assert block.up.out_features == 32


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="heads=5 does not divide width=48: set heads=4"):
        Attention(width=48, heads=5, causal=True, dropout=0.0)


def test_the_plan_s_shares_of_a_block_sum_to_the_whole() -> None:
    of = 2
    block = TransformerBlock(16, 4, causal=True, dropout=0.0, eps=1e-5, tanh=True)
    x = torch.randn(2, 5, 16)
    attended, fed = torch.zeros(()), torch.zeros(())
    for rank in range(of):
        part = copy.deepcopy(block)
        for name, word in block_plan(0.0).items():
            if word != "sequence":
                share(part.get_submodule(name.removeprefix("blocks.*.")), rank, of, word)
        attended = attended + part.attention(x)  # with a share of the heads
        fed = fed + part.down(part.gelu(part.up(x)))
    torch.testing.assert_close(attended, block.attention(x))
    torch.testing.assert_close(fed, block.down(block.gelu(block.up(x))))
