"""The GPU acceptance suite without a GPU: its list, skips, bodies on a CPU, and record."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import environment, run
from support.gpu import NO_GPU, Record
from support.gpu_bodies import FEW, GPU_ONLY
from support.runs import ROOT


def acceptance(*words: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)


def listed(*words: str) -> subprocess.CompletedProcess[str]:
    """Return the same without running bodies, in a process that has already imported torch."""
    script = str(ROOT / "tests" / "support" / "pytest_forked.py")
    return run("-q", "-p", "no:cacheprovider", *words, cwd=ROOT, script=script)


def test_the_table_has_every_body_and_without_a_gpu_all_are_skipped_in_one_line() -> None:
    """As listed by `--collect-only`."""
    here = torch.cuda.is_available()
    done = listed("tests/gpu", "-m", "gpu", "-rs", "-vv", *(["--collect-only"] if here else []))
    assert done.returncode == 0, done.stdout
    names = re.findall(r"^tests/gpu/(test_gpu_\w+\.py::\w+)(?:\[([^\]]*)\])?", done.stdout, flags=re.MULTILINE)
    assert set(GPU_ONLY) <= {body for body, _ in names}, done.stdout
    for body, cases in FEW.items():
        assert cases < {case for name, case in names if name == body}
    if not here:
        (line,) = re.findall(r"^SKIPPED.*", done.stdout, flags=re.MULTILINE)
        assert line.endswith(NO_GPU)
        assert "passed" not in done.stdout.lower()
        assert f"{len(names)} tests of a GPU were skipped: {NO_GPU}" in done.stdout.splitlines()


@pytest.mark.slow
def test_bodies_on_the_stand_in() -> None:
    done = acceptance("tests/gpu", "-m", "gpu", "--gpu-stand-in=cpu", "-rs", timeout=1800)
    assert done.returncode == 0, done.stdout
    reasons = set(re.findall(r"no stand-in: (.*)$", done.stdout, flags=re.MULTILINE))
    assert reasons == set(GPU_ONLY.values())


def report(name: str, outcome: str, longrepr: Any = None, figures: tuple[tuple[str, float], ...] = ()) -> Any:
    when = "setup" if outcome == "skipped" else "call"
    place = (name, 1, name)
    return pytest.TestReport(name, place, {}, outcome, longrepr, when, user_properties=list(figures), duration=0.25)  # type: ignore[arg-type]


def test_the_record_of_a_run(tmp_path: Path) -> None:
    record = Record(tmp_path / "results.json")
    record.pytest_runtest_logreport(report("tests/gpu/test_gpu_runs.py::test_mfu", "passed", figures=(("peak", 2.0),)))
    record.pytest_runtest_logreport(report("tests/gpu/test_gpu_runs.py::test_b", "skipped", ("f", 1, "Skipped: why")))
    record.pytest_runtest_logreport(report("tests/gpu/test_gpu_runs.py::test_c", "failed", "x\nE   assert 1 == 2\n"))
    record.pytest_runtest_logreport(report("tests/runs/test_run_status.py::test_d", "passed"))
    record.pytest_sessionfinish()
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["torch"] == torch.__version__
    assert found["tests"] == {
        "test_gpu_runs.py::test_mfu": {"outcome": "passed", "seconds": 0.25, "figures": {"peak": 2.0}},
        "test_gpu_runs.py::test_b": {"outcome": "skipped", "seconds": 0.25, "sentence": "why"},
        "test_gpu_runs.py::test_c": {"outcome": "failed", "seconds": 0.25, "sentence": "E   assert 1 == 2"},
    }


@pytest.fixture(scope="module")
def column() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "gpu_column.py"))


def test_the_pages_say_what_the_record_says(
    column: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_column.py", "--check"])
    column["main"]()  # exits with code 1 if README or docs/gpu.md is stale
    assert capsys.readouterr().out == ""
    assert set(column["AREAS"]) == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
