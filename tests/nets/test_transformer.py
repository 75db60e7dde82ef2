"""Attention, ViT and GPT-2 compute the published formulas, and have the published sizes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.nets import GPT, ViT
from lathe.nets.transformer import Attention, TransformerBlock


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


def tiny(**sizes) -> ViT:
    images = {"channels": 3, "image_size": 8, "num_classes": 5, "patch_size": 2}
    return ViT(**{**images, "width": 12, "depth": 2, "heads": 3, **sizes})


# Touvron et al. 2021, table 1, has 5 M and 22 M; these are the released nets'
@pytest.mark.parametrize(("width", "heads", "published"), [(192, 3, 5_717_416), (384, 6, 22_050_664)])
def test_parameters_are_the_published_ones(width: int, heads: int, published: int) -> None:
    sizes = {"image_size": 224, "num_classes": 1000, "patch_size": 16, "width": width, "depth": 12, "heads": heads}
    with torch.device("meta"):
        with_token, mean = tiny(**sizes, pool="token"), tiny(**sizes)
    assert sum(parameter.numel() for parameter in with_token.parameters()) == published
    # mean pooling has neither the class token nor its position
    assert sum(parameter.numel() for parameter in mean.parameters()) == published - 2 * width


def test_a_patch_is_a_token_row_by_row() -> None:
    net = tiny()
    image = torch.rand(1, 3, 8, 8)
    tokens = net.enter(image)
    assert tokens.shape == (1, 16, 12)
    patch = image[0, :, 2:4, 4:6]  # second row, third column: token 1 * 4 + 2
    expected = (net.embed.patch.weight * patch).sum((1, 2, 3)) + net.embed.patch.bias + net.embed.position[0, 6]
    torch.testing.assert_close(tokens[0, 6], expected)


@pytest.mark.parametrize("pool", ["mean", "token"])
def test_the_head_reads_the_mean_or_the_class_token(pool: str) -> None:
    net = tiny(pool=pool)
    x = net.blocks(net.enter(torch.rand(3, 3, 8, 8)))
    assert x.shape[1] == (16 if pool == "mean" else 17)
    normed = F.layer_norm(x, (12,), eps=1e-6)
    read = normed.mean(1) if pool == "mean" else normed[:, 0]
    torch.testing.assert_close(net.leave(x), F.linear(read, net.head.weight, net.head.bias))


def test_patches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"patch_size=3 does not divide .*: set patch_size=2"):
        tiny(patch_size=3)


def nano(**sizes) -> GPT:
    return GPT(**{"vocab_size": 11, "max_length": 8, "width": 16, "depth": 3, "heads": 4, **sizes})


def test_a_later_token_changes_no_earlier_logits() -> None:
    net = nano(dropout=0.1).eval()
    ids = torch.randint(11, (2, 8))
    before = net(ids)
    for place in range(8):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        after = net(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).flatten(2).any(-1).all()


def test_a_shorter_sequence_has_the_same_logits() -> None:
    net = nano()
    ids = torch.randint(11, (3, 8))
    torch.testing.assert_close(net(ids[:, :5]), net(ids)[:, :5])
    assert net(ids[:1, :1]).shape == (1, 1, 11)


def test_head_and_token_embedding_share_their_storage() -> None:
    for net in (nano(), copy.deepcopy(nano())):
        assert net.head.weight is net.embed.token.weight
        assert [name for name, _ in net.named_parameters()][:2] == ["embed.token.weight", "embed.position.weight"]
        assert "head.weight" not in dict(net.named_parameters())
    net = nano()
    net.load_state_dict(nano().state_dict())
    assert net.head.weight is net.embed.token.weight
    net(torch.randint(11, (2, 8))).logsumexp(-1).sum().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []
    untied = nano(tie_weights=False)
    assert untied.head.weight is not untied.embed.token.weight


def test_initialisation_is_the_paper_s() -> None:
    torch.manual_seed(0)
    net = nano(vocab_size=500, width=256, depth=2)
    assert net.embed.token.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert net.embed.position.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for block in net.blocks:
        for layer in (block.attention.q, block.attention.k, block.attention.v, block.up):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)
        for layer in (block.attention.out, block.down):
            assert layer.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.02)
            assert layer.bias.abs().sum() == 0
    # so small that all tokens are about equally likely at first
    loss = nn.functional.cross_entropy(net(torch.randint(500, (4, 8))).flatten(0, 1), torch.randint(500, (32,)))
    assert loss.item() == pytest.approx(math.log(500), rel=0.04)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(UserError, match="max_length=8 is shorter than the 9 tokens"):
        nano()(torch.zeros(1, 9, dtype=torch.int64))
