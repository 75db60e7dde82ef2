"""Ranks with a stage of the net each, and on three axes, equal one process; what a pipeline can't do is refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline_fit import adam, build, data, fit, plain, sgd
from support.ranks import on_ranks
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.strategies.partition import Partition
from lathe.strategies.pipeline import Pipeline, ThreeD
from lathe.strategies.precision import precision_plugin

pytestmark = pytest.mark.law2


# name: (net, the strategy's settings, the fit's)
LAWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mlp 1f1b, clipped by value": (
        "mlp",
        {"schedule": "1f1b", "microbatches": 8},
        {"clip": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "resnet": ("resnet", {}, {"optimizer": adam}),
    "tied interleaved": ("tied", {"schedule": "interleaved"}, {"optimizer": adam}),
    "tied 1f1b": ("tied", {"schedule": "1f1b", "microbatches": 2}, {"accumulate": 4}),
    "gpt": ("gpt", {"schedule": "1f1b"}, {"optimizer": adam}),
    "vit": ("vit", {}, {"clip": None}),
}
FORMATS = {"bf16-mixed": 2e-2, "bf16-true": 3e-2, "16-mixed": 2e-3}


def number_format(name: str) -> dict[str, Any]:
    return precision_plugin(name, "cpu", init_scale=2.0**30) if name == "16-mixed" else {"precision": name}


def strict() -> None:
    """Warnings are errors, except that of Lightning's gathering of a task's sums."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*nn.functional.all_gather is deprecated.*")


def refusals() -> dict[str, str]:
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "strategy.microbatches=3": ("mlp", {"microbatches": 3}),
        "strategy.schedule=1f1b": ("resnet", {"schedule": "1f1b"}),
        "strategy.stages=3": ("mlp", {"stages": 3}),
    }
    said = {}
    for key, (net, settings) in cases.items():
        with pytest.raises(UserError) as caught:
            fit(net, Pipeline(**settings))
        said[key] = str(caught.value)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit("resnet", Pipeline(microbatches=2), max_steps=1)
    said["BatchNorm"] = "".join(str(w.message) for w in warned if "BatchNorm" in str(w.message))
    return said


def all_cases(rank: int, folder: str) -> dict[str, Any]:
    seen: dict[str, Any] = {"refused": refusals()}
    strict()
    for name, (net, settings, options) in LAWS.items():
        done = fit(net, Pipeline(**settings), folder=Path(folder) / name, **options)
        seen[name] = plain(done)
    seen["held"] = [name for name, _ in done["task"].net.named_parameters()]
    for name in FORMATS:
        done = fit("tied", Pipeline(), **number_format(name))
        scaler = getattr(done["trainer"].precision_plugin, "scaler", None)
        seen[name] = {**plain(done), "scale": scaler and scaler.get_scale()}
    last = Path(folder) / "tied interleaved" / "last.ckpt"
    continuing = {"epochs": 2, "optimizer": adam}
    seen["two epochs"] = plain(fit("tied", Pipeline(schedule="interleaved"), **continuing))
    seen["continued"] = plain(
        fit("tied", Pipeline(schedule="interleaved"), folder=Path(folder) / "more", resume=last, **continuing)
    )
    single = Path(folder) / "single" / "last.ckpt"
    done = fit("tied", Pipeline(schedule="1f1b"), folder=Path(folder) / "other", resume=single, **continuing)
    seen["from single"] = plain(done)
    with torch.no_grad():
        seen["outputs"] = done["task"].net(data("tied", 7)[0][0])  # a size that no number of micro-batches divides
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    fit("tied", folder=folder / "single", optimizer=adam)
    return on_ranks(all_cases, str(folder), timeout=150)


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: fit(net, folder=folder / f"{name} in one", **options) for name, (net, _, options) in LAWS.items()}


@pytest.mark.parametrize("name", LAWS)
def test_every_loss_is_that_of_one_process(ranks: list[dict[str, Any]], single: dict[str, Any], name: str) -> None:
    one = single[name]
    assert len(one["losses"]) == 6
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert rank[name]["validated"] == pytest.approx(one["validated"], rel=1e-5)
        assert rank[name]["figures"] == pytest.approx(one["figures"], rel=1e-5)


def compare_checkpoints(folder: Path, name: str, rtol: float, atol: float) -> None:
    many, one = (torch.load(folder / run / "last.ckpt", weights_only=True) for run in (name, f"{name} in one"))
    assert many.keys() == one.keys()
    assert list(many["state_dict"]) == list(one["state_dict"])
    torch.testing.assert_close(many["state_dict"], one["state_dict"], rtol=rtol, atol=atol)
    ours, theirs = many["optimizer_states"][0], one["optimizer_states"][0]
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == sorted(theirs["state"])
    expected = {key: theirs["state"][key] for key in ours["state"]}
    torch.testing.assert_close(ours["state"], expected, rtol=10 * rtol, atol=atol)


@pytest.mark.parametrize("name", LAWS)
def test_the_checkpoint_is_that_of_one_process(
    ranks: list[dict[str, Any]], single: dict[str, Any], folder: Path, name: str
) -> None:
    compare_checkpoints(folder, name, rtol=1e-5, atol=1e-5 if "optimizer" in LAWS[name][2] else 1e-6)


def test_a_stage_holds_its_blocks_and_the_ends_what_is_outside(ranks: list[dict[str, Any]]) -> None:
    names = [name for name, _ in build("vit").named_parameters()]
    assert ranks[0]["held"] == [name for name in names if not name.startswith(("blocks.1.", "blocks.2."))]
    assert ranks[1]["held"] == [name for name in names if not name.startswith("blocks.0.")]


@pytest.mark.parametrize("name", FORMATS)
def test_number_formats(ranks: list[dict[str, Any]], name: str) -> None:
    one = fit("tied", **number_format(name))
    assert ranks[0][name]["losses"] == ranks[1][name]["losses"]
    assert ranks[0][name]["losses"] == pytest.approx(one["losses"], rel=FORMATS[name])
    assert ranks[0][name]["scale"] == ranks[1][name]["scale"]
    if name == "16-mixed":  # the first steps overflow on some stage, and are skipped on all
        assert ranks[0][name]["scale"] == one["trainer"].precision_plugin.scaler.get_scale() < 2.0**30


def test_a_continued_run_is_the_same_run(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["continued"]["losses"] == rank["two epochs"]["losses"][6:]
        assert rank["continued"]["validated"] == rank["two epochs"]["validated"][1:]


def test_runs_continue_across_strategies(ranks: list[dict[str, Any]], folder: Path) -> None:
    whole = fit("tied", epochs=2, optimizer=adam)
    assert ranks[0]["from single"]["losses"] == pytest.approx(whole["losses"][6:], rel=1e-5)
    last = folder / "tied interleaved" / "last.ckpt"
    back = fit("tied", epochs=2, optimizer=adam, resume=last, folder=folder / "back")
    assert back["losses"] == pytest.approx(whole["losses"][6:], rel=1e-5)


def test_calling_the_cut_net_gives_outputs_everywhere(ranks: list[dict[str, Any]], folder: Path) -> None:
    net = build("tied")
    net.load_state_dict(torch.load(folder / "other" / "last.ckpt", weights_only=True)["state_dict"])
    net.eval()
    for rank in ranks:
        torch.testing.assert_close(rank["outputs"], net(data("tied", 7)[0][0]), rtol=1e-6, atol=1e-6)


def test_what_cannot_work_is_refused_on_all_ranks_and_batchnorm_warns_once(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["refused"] for rank in ranks)
    assert all(key in said for key, said in first.items())
    assert second == {**first, "BatchNorm": ""}


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
        Partition(SharedBlock(), 2, 0, 1)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_middle_stage_holds_nothing_outside_the_blocks(stage: int) -> None:
    cut = Partition(build("tied"), 3, stage, 1)
    blocks = {0: [0], 1: [1], 2: [2, 3]}[stage]
    outside = [] if stage == 1 else ["shift", "embed.weight", "norm.weight", "norm.bias"]
    own = {f"blocks.{i}.0.{kind}" for i in blocks for kind in ("weight", "bias")}
    assert {name for name, _ in cut.net.named_parameters()} == own.union(outside)
    optimizer = cut.make_optimizer(sgd, cut.net)
    whole = sgd(build("tied"))
    assert [len(group) for group in cut.groups] == [len(group["params"]) for group in whole.param_groups]
    assert [group["name"] for group in optimizer.param_groups] == ["decay", "no_decay"]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in cut.net.parameters()}


# as LAWS
FOUR: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied 1x1x4": ("tied", {"data": 1, "stages": None, "schedule": "1f1b"}, {"optimizer": adam}),
    "gpt 1x2x2": ("gpt4", {"tensor": 2}, {"optimizer": adam}),
}
EIGHT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt 2x2x2": ("gpt4", {"tensor": 2, "schedule": "1f1b"}, {"optimizer": adam})
}


def on_axes(rank: int, folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    seen = {
        name: plain(fit(net, ThreeD(**settings), folder=Path(folder) / name, **options))
        for name, (net, settings, options) in cases.items()
    }
    if "gpt 1x2x2" in cases:
        net, settings, options = cases["gpt 1x2x2"]
        last = Path(folder) / "gpt 1x2x2" / "last.ckpt"
        seen["continued"] = plain(
            fit(net, ThreeD(**settings), folder=Path(folder) / "more", resume=last, epochs=2, **options)
        )
        seen["straight"] = plain(fit(net, ThreeD(**settings), epochs=2, **options))
    return seen


def check(ranks: list[dict[str, Any]], folder: Path, cases: dict[str, Any]) -> None:
    for name, (net, _, options) in cases.items():
        one = fit(net, folder=folder / f"{name} in one", **options)
        # the mean of the replicas' losses is that of the global batch
        means = [sum(values) / len(values) for values in zip(*(rank[name]["losses"] for rank in ranks), strict=True)]
        assert means == pytest.approx(one["losses"], rel=1e-5), name
        for rank in ranks:
            for what in ("validated", "figures"):
                assert rank[name][what] == pytest.approx(one[what], rel=1e-5), name
        compare_checkpoints(folder, name, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_four_ranks_are_one_process(tmp_path: Path) -> None:
    ranks = on_ranks(on_axes, str(tmp_path), FOUR, world=4, timeout=200)
    check(ranks, tmp_path, FOUR)
    for rank in ranks:
        assert rank["continued"]["losses"] == rank["straight"]["losses"][6:]


@pytest.mark.slow
def test_eight_ranks_are_one_process(tmp_path: Path) -> None:
    check(on_ranks(on_axes, str(tmp_path), EIGHT, world=8, timeout=200), tmp_path, EIGHT)
