"""Attention and its blocks compute the published formulas, whole and cut over ranks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.nets.attention import Attention, TransformerBlock, block_plan


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


def share(layer: nn.Linear, rank: int, of: int, word: str) -> None:
    """Leave a layer the share that a rank of tensor parallelism has; the bias of a row stays with one rank."""
    weight, bias = layer.weight.data, layer.bias.data
    layer.weight.data = weight.chunk(of, dim=0 if word == "column" else 1)[rank]
    layer.bias.data = bias.chunk(of)[rank] if word == "column" else bias * (rank == 0)


@pytest.mark.parametrize("of", [2, 4])
def test_the_plan_s_shares_of_a_block_sum_to_the_whole(of: int) -> None:
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


def test_dropout_acts_in_training_only_and_is_in_the_plan_where_there_is_any() -> None:
    block = TransformerBlock(16, 4, causal=False, dropout=0.5, eps=1e-5, tanh=True)
    x = torch.randn(2, 5, 16)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))
    assert {name.split(".")[-1] for name in set(block_plan(0.5)) - set(block_plan(0.0))} == {
        "attention_dropout",
        "mlp_dropout",
    }
    assert all(isinstance(block.get_submodule(name.removeprefix("blocks.*.")), nn.Module) for name in block_plan(0.5))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"width": 48, "heads": 5},
            "heads=5 does not divide width=48: set heads=4.",
        ),
        (
            {"width": 64, "heads": 12},
            "heads=12 does not divide width=64: set heads=8.",
        ),
        ({"width": 8, "heads": 0}, "heads=0: expected a whole number from 1, got one out of this range."),
    ],
)
def test_heads_that_do_not_divide_are_refused(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        Attention(**sizes, causal=True, dropout=0.0)
    assert str(caught.value) == sentence
