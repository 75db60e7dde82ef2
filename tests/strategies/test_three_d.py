"""Four and eight ranks on three axes equal one process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline_fit import adam, fit, plain, sgd
from support.ranks import on_ranks

from lathe.config.parallel_dims import axes
from lathe.errors import UserError
from lathe.strategies.three_d import ThreeD

pytestmark = pytest.mark.law2

# name: (net, the strategy's settings, the fit's); vit has five tokens, which two tensor ranks can't divide
FOUR: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied 2x1x2": ("tied", {}, {"optimizer": adam}),
    "resnet 2x1x2": ("resnet", {}, {"optimizer": adam}),
    "gpt 2x1x2 interleaved": ("gpt4", {"schedule": "interleaved"}, {"optimizer": adam}),
    "mlp 1x1x4": ("mlp", {"data": 1, "stages": None, "schedule": "1f1b"}, {}),
    "tied 1x1x4": ("tied", {"data": 1, "stages": 4}, {"optimizer": adam}),
    "gpt 1x2x2": ("gpt4", {"tensor": 2}, {"optimizer": adam}),
    "gpt 1x2x2 whole": ("gpt4", {"tensor": 2, "sequence_parallel": False, "schedule": "1f1b"}, {"optimizer": sgd}),
    "vit 1x2x2": ("vit", {"tensor": 2}, {"optimizer": adam}),
}
EIGHT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt 2x2x2": ("gpt4", {"tensor": 2, "schedule": "1f1b"}, {"optimizer": adam})
}


def laws(rank: int, folder: str, cases: dict[str, Any]) -> dict[str, Any]:
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
        a, b = (torch.load(folder / run / "last.ckpt", weights_only=True) for run in (name, f"{name} in one"))
        assert list(a["state_dict"]) == list(b["state_dict"])
        torch.testing.assert_close(a["state_dict"], b["state_dict"], rtol=1e-4, atol=2e-5)
        ours, theirs = a["optimizer_states"][0], b["optimizer_states"][0]
        assert ours["param_groups"] == theirs["param_groups"]
        assert list(ours["state"]) == sorted(theirs["state"])
        torch.testing.assert_close(
            ours["state"], {key: theirs["state"][key] for key in ours["state"]}, rtol=1e-3, atol=1e-5
        )


@pytest.mark.slow
def test_four_ranks_are_one_process(tmp_path: Path) -> None:
    ranks = on_ranks(laws, str(tmp_path), FOUR, world=4, timeout=200)
    check(ranks, tmp_path, FOUR)
    for rank in ranks:
        assert rank["continued"]["losses"] == rank["straight"]["losses"][6:]


@pytest.mark.slow
def test_eight_ranks_are_one_process(tmp_path: Path) -> None:
    check(on_ranks(laws, str(tmp_path), EIGHT, world=8, timeout=200), tmp_path, EIGHT)


def test_the_product_has_to_be_the_number_of_processes() -> None:
    assert axes(ThreeD()._sizes, 8).data == 4
    with pytest.raises(
        UserError, match=re.escape("strategy.tensor=2 x strategy.stages=2 needs a multiple of 4 processes")
    ):
        axes(ThreeD(tensor=2)._sizes, 6)
