"""FSDP on two real ranks equals one process: losses, checkpoints, optimizer states, resume, shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from support.ranks import on_ranks
from support.strategy_fit import NETS, adamw, fit, like_one_process, mean_losses, relative
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lathe.nets import recompute
from lathe.optim import Muon
from lathe.runs.checkpoints import read_checkpoint
from lathe.strategies.dtensors import shard_like
from lathe.strategies.fsdp import FSDP, units

pytestmark = pytest.mark.law2


def scaler() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def muon(net: nn.Module) -> torch.optim.Optimizer:
    roles = Muon.roles(net)
    groups = [
        {"params": [p for n, p in net.named_parameters() if roles[n] == role], "role": role}
        for role in ("muon", "adamw")
    ]
    return Muon(groups, lr=0.02)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


# name: (net, options of the strategy, options of the run)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mlp": ("mlp", {}, {}),
    "resnet": ("resnet", {}, {"optimizer": sgd}),
    "gpt": ("gpt", {}, {}),
    "sharded": ("vit", {"checkpoint": "sharded"}, {}),
    "replicas": ("mlp", {"replicas": 2}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "offload": ("linear", {"cpu_offload": True, "min_params": 10}, {"optimizer": lambda net: adamw(net, fused=True)}),
    "muon": (
        "mlp",
        {"reshard_after_forward": False},
        {"optimizer": muon, "before": lambda net: recompute.apply(net, "sqrt")},
    ),
}
ROUNDED: dict[str, tuple[str, dict[str, Any], float]] = {
    "bf16-mixed": ("resnet", {"precision": "bf16-mixed"}, 5e-2),  # its rounding by itself: 0.11 from float32
    "16-mixed": ("mlp", {}, 2e-3),
    "16-true": ("mlp", {"precision": "16-true", "optimizer": sgd}, 5e-3),
    "64-true": ("mlp", {}, 1e-12),
}
PLUGINS = {"16-mixed": scaler, "64-true": DoublePrecision}


def rounded(name: str) -> dict[str, Any]:
    options = dict(ROUNDED[name][1])
    if name in PLUGINS:
        options["plugins"] = [PLUGINS[name]()]
    return options


def all_cases(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    part = {"world": 2, "part": (rank, 2)}
    for case, (name, settings, options) in CASES.items():
        found[case] = fit(name, FSDP(**settings), save=folder / f"{case}.ckpt", **part, **options)
    for case, (name, _, _) in ROUNDED.items():
        found[case] = fit(name, FSDP(), **part, **rounded(case))
    # the sharded run resumes as sharded, from the folder, and the full one from a single process's file
    found["from folder"] = fit("vit", FSDP(), begin=2, steps=2, resume=folder / "sharded.ckpt", **part)
    found["from one"] = fit("gpt", FSDP(checkpoint="sharded"), begin=2, steps=2, resume=folder / "one.ckpt", **part)
    tensor = torch.zeros(5, 3)
    shard: Any = shard_like(tensor, distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)]))
    found["bytes"] = shard.to_local().untyped_storage().nbytes()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp")
    fit("gpt", save=path / "one.ckpt")
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(all_cases, folder, timeout=200)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_checkpoints_are_those_of_one_process(
    ranks: list[dict[str, Any]], folder: Path, tmp_path: Path, case: str
) -> None:
    name, _, options = CASES[case]
    like_one_process([rank[case] for rank in ranks], folder / f"{case}.ckpt", tmp_path / "one.ckpt", name, **options)


@pytest.mark.parametrize("case", ROUNDED)
def test_precisions_follow_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    name, _, tolerance = ROUNDED[case]
    one = fit(name, **rounded(case))
    assert relative(mean_losses([rank[case] for rank in ranks]), one["losses"]) < tolerance


@pytest.mark.parametrize(("case", "share"), [("mlp", 0.6), ("gpt", 0.6), ("resnet", 0.6), ("replicas", 1.0)])
def test_a_rank_holds_its_share(ranks: list[dict[str, Any]], case: str, share: float) -> None:
    one = fit(CASES[case][0], steps=1, **CASES[case][2])["held"]
    for rank in ranks:
        assert share - 0.2 < rank[case]["held"] / one <= share
    assert [rank["bytes"] for rank in ranks] == [3 * 3 * 4, 2 * 3 * 4]  # a view would keep the whole tensor in memory


def test_a_single_process_continues(ranks: list[dict[str, Any]], folder: Path) -> None:
    for case, name in (("gpt", "gpt"), ("sharded", "vit")):
        straight = fit(name, steps=4)["losses"][4:]
        path = folder / f"{case}.ckpt"
        if path.is_dir():  # Lightning's strategies read files
            torch.save(read_checkpoint(path), folder / "plain.ckpt")
            path = folder / "plain.ckpt"
        assert relative(fit(name, begin=2, steps=2, resume=path)["losses"], straight) < 1e-6


def test_ranks_continue_a_folder_and_a_file(ranks: list[dict[str, Any]]) -> None:
    for case, name in (("from folder", "vit"), ("from one", "gpt")):
        straight = fit(name, steps=4)["losses"][4:]
        assert relative(mean_losses([rank[case] for rank in ranks]), straight) < 1e-6


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    before = torch.distributed.is_initialized()
    try:
        one = fit("mlp", FSDP(checkpoint="sharded"), save=tmp_path / "last.ckpt")
        with pytest.warns(UserWarning, match="shares the net out among processes, and there is one: it stays whole"):
            again = fit("mlp", FSDP(), begin=2, steps=2, resume=tmp_path / "last.ckpt")
    finally:
        if not before and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    straight = fit("mlp", steps=4)["losses"]
    assert relative(one["losses"] + again["losses"], straight) < 1e-6


def test_units_are_the_blocks_or_the_smallest_that_are_large_enough() -> None:
    mlp = NETS["mlp"]()
    assert units(mlp, 1) == list(mlp.blocks)
    wide = nn.Linear(10, 10)
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 10), nn.Linear(10, 2)), wide, nn.ModuleList([nn.Linear(9, 5)]))
    assert units(net, 100) == [wide]  # the others are too small, separately and together; a ModuleList has no forward
    assert units(net, 50) == [net[0], wide, net[2][0]]
    tied = nn.Sequential(wide, nn.Linear(10, 10), nn.Linear(10, 10))
    tied[2].weight = wide.weight
    assert units(tied, 50) == [tied[1]]  # a weight in two places stays in the root
    assert units(tied, 10_000) == []
