"""The thresholds for one GPU: their cases compose and run."""

import runpy
from typing import Any

import pytest
from support.runs import ROOT


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "bench_gpu.py"))


@pytest.mark.slow
def test_the_whole_of_it_with_tiny_nets(bench: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--accelerator", "cpu", "--tiny", "--rounds", "1", "--steps", "3", "--warmup", "1"]
    results = bench["main"](words)
    assert all(rounds[0]["step_ms"] > 0 for rounds in results.values())
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| resnet20")]
    assert len(rows) == 2
    assert all(row.endswith(("| met |", "| missed |")) for row in rows)
