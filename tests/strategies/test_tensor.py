"""Tensor parallelism equals one process, with and without sequence parallelism and data replicas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from support.ranks import on_ranks
from support.strategy_fit import fit, like_one_process, mean_losses, relative
from torch import nn

from lathe.errors import UserError
from lathe.strategies.tensor import TensorParallel, check_length, check_limits, plan_of

pytestmark = pytest.mark.law2

# name: (net, options of the strategy, options of the run)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deep_mlp": ("deep_mlp", {}, {}),
    "gpt": ("gpt", {}, {}),
    "untied, clipped by value": (
        "untied",
        {"sequence_parallel": False},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "sharded": ("gpt", {"checkpoint": "sharded"}, {}),
}
ROUNDED: dict[str, tuple[dict[str, Any], float]] = {
    "16-mixed": ({}, 2e-3),
    "64-true": ({}, 1e-12),
}


def rounded(name: str) -> dict[str, Any]:
    options = dict(ROUNDED[name][0])
    if name == "16-mixed":
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))]
    if name == "64-true":
        options["plugins"] = [DoublePrecision()]
    return options


def all_cases(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, (name, settings, options) in CASES.items():
        found[case] = fit(name, TensorParallel(**settings), world=2, save=folder / f"{case}.ckpt", **options)
    for case in ROUNDED:
        found[case] = fit("gpt", TensorParallel(), world=2, **rounded(case))
    found["from folder"] = fit("gpt", TensorParallel(), world=2, begin=2, steps=2, resume=folder / "sharded.ckpt")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(all_cases, folder, timeout=200)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_checkpoints_are_those_of_one_process(
    ranks: list[dict[str, Any]], folder: Path, tmp_path: Path, case: str
) -> None:
    name, _, options = CASES[case]
    like_one_process([rank[case] for rank in ranks], folder / f"{case}.ckpt", tmp_path / "one.ckpt", name, **options)
    assert ranks[0][case]["losses"] == ranks[1][case]["losses"]  # one replica: the same batch, the same loss


@pytest.mark.parametrize("case", ROUNDED)
def test_precisions_follow_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    assert (
        relative(mean_losses([rank[case] for rank in ranks]), fit("gpt", **rounded(case))["losses"]) < ROUNDED[case][1]
    )


def test_a_rank_holds_its_share(ranks: list[dict[str, Any]]) -> None:
    one = fit("untied", steps=1)["held"]
    for rank in ranks:
        assert (
            0.5 < rank["untied, clipped by value"]["held"] / one < 0.62
        )  # norms, biases of row layers and positions are on both


def test_it_is_continued_here_and_there(ranks: list[dict[str, Any]], folder: Path) -> None:
    straight = fit("gpt", steps=4)["losses"][4:]
    assert relative(mean_losses([rank["from folder"] for rank in ranks]), straight) < 1e-6
    assert relative(fit("gpt", begin=2, steps=2, resume=folder / "gpt.ckpt")["losses"], straight) < 1e-6


FOUR = {"replicated": {"data": 2, "fsdp": False}, "2d sharded": {"data": 2, "checkpoint": "sharded"}}


def four(rank: int, folder: Path) -> dict[str, Any]:
    options = {"world": 4, "part": (rank // 2, 2)}
    return {
        case: fit("gpt", TensorParallel(**settings), save=folder / f"{case}.ckpt", **options)
        for case, settings in FOUR.items()
    }


@pytest.mark.slow
def test_over_data_replicas_on_four_ranks(tmp_path: Path) -> None:
    """With full checkpoints, laws/test_law2_strategies.py compares them."""
    ranks = on_ranks(four, tmp_path, world=4, timeout=400)
    for case in FOUR:
        like_one_process([rank[case] for rank in ranks], tmp_path / f"{case}.ckpt", tmp_path / "one.ckpt", "gpt")


class Planned(nn.Module):
    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.tensor_plan, self.tensor_limits = plan, {"heads": 3}
        self.stem = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])


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
    with pytest.raises(UserError, match=r"^model\.net\.heads=3 does not divide by strategy\.tensor=2"):
        check_limits(Planned({}), 2)


def test_a_sequence_divides() -> None:
    check_length(2, nn.Identity(), (), torch.ones(1, 4, 3))
    with pytest.raises(UserError, match=r"a sequence of 5 tokens does not divide by strategy\.tensor=2"):
        check_length(2, nn.Identity(), (), torch.ones(1, 5, 3))
