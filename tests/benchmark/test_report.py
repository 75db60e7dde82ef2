"""Tables whose figures can be computed by hand."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lathe.benchmark import report
from lathe.benchmark.cases import scaling

REQUEST: dict[str, Any] = {
    "suite": "scaling",
    "processes": [2],
    "strategies": ["ddp"],
    "batch_size": 100,
    "rounds": 3,
    "steps": 10,
    "threads": 1,
}


def timed(*milliseconds: float, batch: int = 100, sync: float | None = None) -> list[dict[str, Any]]:
    return [{"step_ms": ms, "samples_per_s": batch / ms * 1e3, "grad_sync": sync} for ms in milliseconds]


RESULTS = {
    "auto, 1, weak": [{**turn, "peak": 3 * 2**20} for turn in timed(20.0, 40.0, 10.0)],
    "ddp, 1, weak": timed(21.0, 42.0, 10.5),
    "ddp, 2, weak": timed(25.0, 50.0, 10.0, batch=200, sync=0.12),
    "ddp, 2, weak, no sync": timed(20.0, 50.0, 10.0, batch=200),
    "ddp, 2, strong": [{"error": "no result within timeout=300 seconds"}],
}


def cells(text: str, *first: str) -> list[str]:
    (row,) = [line for line in text.splitlines() if line.startswith("| " + " | ".join(first) + " |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_ratios_are_taken_round_by_round_though_the_machine_drifts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = scaling(REQUEST)
    text = report.write(tmp_path, cases, RESULTS, REQUEST, 61.0)
    assert cells(text, "ddp", "1")[4:] == ["21.00 (10.50 to 42.00)", "4,762", "1.050 (1.050 to 1.050)", "", "", ""]
    assert cells(text, "auto", "1")[-1] == "3.0"
    # Of 2 x 21/25, 2 x 42/50 and 2 x 10.5/10, half.
    assert cells(text, "ddp", "2", "weak")[4:] == [
        "25.00 (10.00 to 50.00)",
        "8,000",
        "",
        "0.840 (0.840 to 1.050)",
        "12.0%",
        "",
    ]
    assert cells(text, "ddp", "2", "strong")[4] == "no result within timeout=300 seconds"
    assert "n = 3 rounds" in text
    assert "61 s" in text
    assert text in capsys.readouterr().out
    assert (tmp_path / "results.md").read_text() == text
    written = json.loads((tmp_path / "results.json").read_text())
    assert [case["rounds"] for case in written["cases"]] == list(RESULTS.values())
    assert written["environment"]["packages"]["torch"]
    drawing = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    assert len(drawing.findall(".//{*}polyline")) == 2
