"""The table at the end of a run."""

from pathlib import Path

import pytest
from rich.console import Console

from lathe.summary import show

TRAINED = {"parameters": 1234567, "seconds": 12.345, "samples_per_s": 43210.9}
RESULT = {"test/accuracy": 0.98765, "test/loss": 0.05, "val/accuracy": 0.5, **TRAINED}


def shown(result: dict[str, float], run_dir: Path) -> list[str]:
    console = Console(record=True, width=120, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show(result, run_dir, console)
        return console.export_text().splitlines()


def cells(lines: list[str]) -> dict[str, str]:
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines if line.startswith("│")]
    return {row[0]: row[1] for row in rows}


def test_it_holds_test_figures_and_where_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = shown(RESULT, tmp_path / "logs" / "train" / "x")
    assert cells(lines) == {
        "test/accuracy": "0.9877", "test/loss": "0.0500", "parameters": "1,234,567", "samples/s": "43,211", "seconds": "12.3",
        "run directory": "logs/train/x",
    }  # fmt: skip
    commands = [line.strip() for line in lines if line.strip().startswith("python ")]
    assert commands[0] == "python scripts/evaluate.py run=logs/train/x split=val"
    assert len(commands) == 3


def test_validation_stands_in_where_nothing_was_tested(tmp_path: Path) -> None:
    table = cells(shown({"val/accuracy": 0.5, "parameters": 1, "seconds": 0.0}, tmp_path))
    assert list(table) == ["val/accuracy", "parameters", "seconds", "run directory"]
    assert table["val/accuracy"] == "0.5000"
