"""Quantization-aware training on several processes resumes bit for bit and trains as one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.net_state import assert_same
from support.qat_fit import STEPS, fit
from support.ranks import on_ranks

from lathe.strategies import DDP
from lathe.strategies.fsdp import FSDP

Case = tuple[str, dict[str, Any], dict[str, Any]]
DDP_CASES: dict[str, Case] = {"resnet": ("resnet", {}, {}), "lsq": ("mlp", {"lsq": True}, {})}
FSDP_CASES: dict[str, Case] = {"vit": ("vit", {}, {}), "lsq": ("mlp", {"lsq": True}, {})}
MORE_DDP: dict[str, Case] = {
    "vit": ("vit", {}, {"accumulate": 2}),
    "bf16": ("gpt", {"lsq": True}, {"precision": "bf16-mixed"}),
}
MORE_FSDP: dict[str, Case] = {
    "resnet": ("resnet", {}, {}),
    "bf16": ("gpt", {"lsq": True}, {"precision": "bf16-mixed"}),
    "recomputed": ("vit", {}, {"recomputed": "blocks"}),
}


def cases_on(rank: int, strategy: str, cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    found = {}
    for case, (name, options, others) in cases.items():
        for suffix, where in (
            ("", {"save": folder / f"{case}.ckpt"}),
            (" resumed", {"resume": folder / f"{case}.ckpt"}),
        ):
            make = DDP() if strategy == "ddp" else FSDP()
            found[case + suffix] = fit(name, make, part=(rank, 2), options=options, **where, **others)
    return found


def compare(first: dict[str, Any], second: dict[str, Any], cases: dict[str, Case]) -> dict[str, Any]:
    """Ranks hold the same, a resumed run is the uninterrupted one, and both train as one process does. Returns by case
    whether weights were rounded and ranges observed after the last step."""
    for case, done in first.items():
        for name, value in done["state"].items():
            if "running" not in name:
                assert torch.equal(value, second[case]["state"][name]), (case, name)
        if case.endswith("resumed"):
            assert_same(done["state"], first[case.removesuffix(" resumed")]["state"])
    for case, (name, options, others) in cases.items():
        alone = fit(name, options=options, **others)
        assert first[case]["seen"] == alone["seen"]
        losses = [sum(pair) / 2 for pair in zip(first[case]["losses"], second[case]["losses"], strict=True)]
        assert losses == pytest.approx(alone["losses"], rel=0.05), case
        for key, value in alone["state"].items():
            if key.endswith(("maximum", "minimum")):
                torch.testing.assert_close(first[case]["state"][key], value, rtol=0.05, atol=0.05, msg=f"{case} {key}")
    return {case: done["seen"][STEPS][:2] for case, done in first.items()}


def test_ranks_hold_the_ranges_of_one_process(tmp_path: Path) -> None:
    ended = compare(*on_ranks(cases_on, "ddp", DDP_CASES, tmp_path, timeout=120), DDP_CASES)
    assert ended == dict.fromkeys(ended, (True, False))
    assert len(ended) == 2 * len(DDP_CASES)


@pytest.mark.slow
def test_sharded_weights(tmp_path: Path) -> None:
    ended = compare(*on_ranks(cases_on, "fsdp", FSDP_CASES, tmp_path, timeout=120), FSDP_CASES)
    assert ended == dict.fromkeys(ended, (True, False))
    assert len(ended) == 2 * len(FSDP_CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "cases"), [("ddp", MORE_DDP), ("fsdp", MORE_FSDP)])
def test_more_nets_on_ranks(strategy: str, cases: dict[str, Case], tmp_path: Path) -> None:
    ended = compare(*on_ranks(cases_on, strategy, cases, tmp_path, timeout=240), cases)
    assert ended == dict.fromkeys(ended, (True, False))
    assert len(ended) == 2 * len(cases)
