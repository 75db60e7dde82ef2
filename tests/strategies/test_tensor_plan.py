"""A plan's patterns and words are checked before anything is cut."""

from typing import Any

import pytest
import torch
from support.strategy_fit import NETS
from torch import nn

from lathe.errors import UserError
from lathe.strategies.tensor_plan import WORDS, _DividesBy, check_limits, plan_of


class Planned(nn.Module):
    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.tensor_plan, self.tensor_limits = plan, {"heads": 3}
        self.stem = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])


@pytest.mark.parametrize("name", ["mlp", "deep_mlp", "vit", "gpt"])
def test_the_nets_own_plans_fit(name: str) -> None:
    words = plan_of(NETS[name]())
    assert set(words.values()) <= set(WORDS)
    assert any(key.startswith("blocks.") for key in words)


@pytest.mark.parametrize(
    ("plan", "said"),
    [(None, "Planned declares none"), ({"blocks.*.1": "row"}, "fits no module"), ({"stem": "colum"}, "mean column?")],
)
def test_a_wrong_plan_is_refused(plan: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(Planned(plan))
    assert said in str(caught.value)


def test_limits_divide() -> None:
    check_limits(Planned({}), 3)
    with pytest.raises(
        UserError, match=r"^model\.net\.heads=3 does not divide by strategy\.tensor=2: choose a multiple of 2, or"
    ):
        check_limits(Planned({}), 2)


def test_a_sequence_divides() -> None:
    hook = _DividesBy(2)
    hook(nn.Identity(), (), torch.ones(1, 4, 3))
    with pytest.raises(
        UserError,
        match=r"^strategy\.sequence_parallel=true: a sequence of 5 tokens does not divide by strategy\.tensor=2",
    ):
        hook(nn.Identity(), (), torch.ones(1, 5, 3))
