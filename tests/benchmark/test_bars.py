"""The project's bars, read from what a suite has written."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT


def verdicts(
    suite: str,
    results: dict[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> dict[str, tuple[str, str]]:
    """What benchmarks/bars.py prints for a folder of results: measured and met, by the bar's sentence."""
    cases = [{"name": name, "rounds": rounds} for name, rounds in results.items()]
    (folder / "results.json").write_text(json.dumps({"request": {"suite": suite}, "cases": cases}))
    monkeypatch.setattr("sys.argv", ["bars.py", str(folder)])
    runpy.run_path(str(ROOT / "benchmarks" / "bars.py"), run_name="__main__")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    return {sentence: (measured, met) for sentence, measured, met in rows}


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("parameters", "gradients", "optimizer", "activations", "peak")
    counted = {
        "auto, 1": (10, 10, 20, 5, 50),
        "fsdp, 2": (5, 5, 10, 5, 30),
        "auto, 1, none": (1, 1, 2, 100, 124),
        "auto, 1, sqrt": (1, 1, 2, 10, 52),
    }
    results = {name: [dict(zip(names, values, strict=True))] for name, values in counted.items()}
    found = verdicts("memory", results, tmp_path, monkeypatch, capsys)
    assert list(found.values()) == [("0.500", "met"), ("not measured", "-"), ("0.100", "met"), ("0.400", "missed")]


def test_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results: dict[str, Any] = {
        "plain": [{"mean_step_ms": 10.0, "forward_ms": 3.0}],
        "prune": [{"mean_step_ms": 11.0}],
        "qat": [{"mean_step_ms": 15.0}],
        "distill": [{"mean_step_ms": 13.0}],
    }
    found = verdicts("overhead", results, tmp_path, monkeypatch, capsys)
    assert found == {
        "prune: step over the plain one's, at most 1.03": ("1.100", "missed"),
        "qat: step over the plain one's, at most 1.60": ("1.500", "met"),
        "distill: step over the plain one's, at most 1.35": ("1.300", "met"),
    }
    with pytest.raises(SystemExit):
        verdicts("gpu", {}, tmp_path, monkeypatch, capsys)
