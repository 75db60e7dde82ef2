"""GPT-2 has its published size and initialisation, a causal mask and a tied head."""

import copy
import math

import pytest
import torch
from torch import nn

from lathe.errors import UserError
from lathe.nets import GPT


def nano(**sizes) -> GPT:
    return GPT(**{"vocab_size": 11, "max_length": 8, "width": 16, "depth": 3, "heads": 4, **sizes})


def size(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_gpt2_small_has_the_published_parameters() -> None:
    with torch.device("meta"):
        net = GPT(vocab_size=50257, max_length=1024, width=768, depth=12, heads=12)
        untied = GPT(vocab_size=50257, max_length=1024, width=768, depth=12, heads=12, tie_weights=False)
    assert size(net) == 124_439_808  # as the released weights
    assert size(untied) - size(net) == 50257 * 768


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
