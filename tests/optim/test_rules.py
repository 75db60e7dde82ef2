"""Names that rules find, at the edges that the groups of tests/optim/test_build.py do not reach."""

import pytest
from torch import nn

from lathe.errors import UserError
from lathe.optim.rules import bias_names, matching_names, norm_names


def test_attention_biases_are_biases() -> None:
    net = nn.MultiheadAttention(4, 2)
    assert bias_names(net) == {"in_proj_bias", "out_proj.bias"}


def test_a_net_that_is_itself_a_norm() -> None:
    assert norm_names(nn.LayerNorm(3)) == {"weight", "bias"}


def test_a_container_named_like_a_norm_does_not_claim_its_children() -> None:
    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)
            self.linear = nn.Linear(3, 3)

    assert norm_names(PreNorm()) == {"norm.weight", "norm.bias"}


def test_rules_add_up_and_the_key_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert matching_names(net, ["norm", "0.weight"], key="k") == {"0.weight", "1.weight", "1.bias"}
    with pytest.raises(UserError) as caught:
        matching_names(nn.ReLU(), ["head.*"], key="optimizer.no_decay")
    assert str(caught.value) == "optimizer.no_decay: the pattern 'head.*' matches no parameter of ReLU; it has none."
