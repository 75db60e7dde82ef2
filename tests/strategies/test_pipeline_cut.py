"""What a stage of a pipeline gets of a net, and nets that can't be cut."""

import pytest
from support.pipeline_fit import build, sgd
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.strategies.pipeline.cut import Cut


class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.blocks[1].weight = self.blocks[0].weight

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x


def test_a_weight_on_both_sides_of_a_cut_is_refused() -> None:
    with pytest.raises(UserError, match=r"blocks\.0\.weight, which a pipeline can't share"):
        Cut(SharedBlock(), 2, 0, 1)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_middle_stage_holds_nothing_outside_the_blocks(stage: int) -> None:
    cut = Cut(build("tied"), 3, stage, 1)
    blocks = {0: [0], 1: [1], 2: [2, 3]}[stage]
    outside = [] if stage == 1 else ["shift", "embed.weight", "norm.weight", "norm.bias"]
    own = {f"blocks.{i}.0.{kind}" for i in blocks for kind in ("weight", "bias")}
    assert {name for name, _ in cut.net.named_parameters()} == own.union(outside)
    optimizer = cut.make_optimizer(sgd, cut.net)
    whole = sgd(build("tied"))
    assert [len(group) for group in cut.groups] == [len(group["params"]) for group in whole.param_groups]
    assert [group["name"] for group in optimizer.param_groups] == ["decay", "no_decay"]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in cut.net.parameters()}
