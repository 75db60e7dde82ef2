"""The thresholds for one GPU: their cases compose and run."""

import runpy
from typing import Any

import pytest
from support.runs import ROOT


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "bench_gpu.py"))


def test_every_case_is_a_configuration(bench: dict[str, Any]) -> None:
    request = {"warmup": 2, "steps": 3, "accelerator": "gpu", "overrides": []}
    found = {case.name: bench["compose_case"](case, request) for case in bench["cases"](False)}
    assert found["resnet50, fast"]["data"]["image_size"] == 224
    assert found["resnet50, fast"]["precision"] == {**found["gpt2_small, fast"]["precision"], "name": "auto"}
    assert {found[f"{net}, TF32"]["precision"]["matmul"] for net in ("resnet50", "gpt2_small")} == {"high"}
    assert (found["resnet20, graphs"]["compile"]["mode"], found["resnet20, graphs"]["compile"]["scope"]) == (
        "reduce-overhead",
        "step",
    )
    assert found["resnet20, eager"]["data"]["batch_size"] == 64
    names = {name for bar in bench["BARS"] for name in (bar.case, bar.base)}
    assert names == {*found, bench["HAND"]}


@pytest.mark.slow
def test_the_whole_of_it_with_tiny_nets(bench: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--accelerator", "cpu", "--tiny", "--rounds", "1", "--steps", "3", "--warmup", "1"]
    results = bench["main"](words)
    assert all(rounds[0]["step_ms"] > 0 for rounds in results.values())
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| resnet20")]
    assert len(rows) == 2
    assert all(row.endswith(("| met |", "| missed |")) for row in rows)
