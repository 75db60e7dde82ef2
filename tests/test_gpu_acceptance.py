"""The GPU acceptance suite without a GPU: bodies on a CPU, and record."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from support.commands import check, run
from support.gpu import Record
from support.runs import ROOT


@pytest.mark.slow
def test_bodies_on_the_stand_in() -> None:
    words = ("-q", "-p", "no:cacheprovider", "tests/gpu", "-m", "gpu", "--gpu-stand-in=cpu", "-rs")
    done = check(run(*words, cwd=ROOT, script="tests/support/pytest_forked.py", timeout=1800))
    reasons = re.findall(r"no stand-in: (.*)$", done.stdout, flags=re.MULTILINE)
    assert "torch's DataParallel drives GPUs alone" in reasons


def test_the_record_of_a_run(tmp_path: Path) -> None:
    record = Record(tmp_path / "results.json")
    for name, outcome, reason, figures in (
        ("gpu/test_gpu_runs.py::a", "passed", None, [("peak", 2.0)]),
        ("gpu/test_gpu_runs.py::b", "skipped", ("f", 1, "Skipped: why"), []),
        ("gpu/test_gpu_runs.py::c", "failed", "x\nE   assert 1 == 2\n", []),
        ("runs/test_run_status.py::d", "passed", None, []),
    ):
        when = "setup" if outcome == "skipped" else "call"
        report = pytest.TestReport(f"tests/{name}", ("", 1, ""), {}, outcome, reason, when, (), 0.25)  # type: ignore[arg-type]
        report.user_properties = figures
        record.pytest_runtest_logreport(report)
    record.pytest_sessionfinish()
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["torch"] == torch.__version__
    assert found["tests"] == {
        "test_gpu_runs.py::a": {"outcome": "passed", "seconds": 0.25, "figures": {"peak": 2.0}},
        "test_gpu_runs.py::b": {"outcome": "skipped", "seconds": 0.25, "sentence": "why"},
        "test_gpu_runs.py::c": {"outcome": "failed", "seconds": 0.25, "sentence": "E   assert 1 == 2"},
    }


def test_the_pages_say_what_the_record_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    column = runpy.run_path(str(ROOT / "scripts" / "gpu_column.py"))
    monkeypatch.setattr("sys.argv", ["gpu_column.py", "--check"])
    column["main"]()  # exits with code 1 if README or docs/gpu.md is stale
    assert capsys.readouterr().out == ""
    assert set(column["AREAS"]) == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
