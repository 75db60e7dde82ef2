"""Ctrl-C and time limits: an interrupted run can be resumed."""

import signal
import time
from pathlib import Path

import pytest
from support.commands import command, start
from support.runs import ROOT, SMALL, new_run, runs

from lathe.training.train import train


@pytest.mark.slow
@pytest.mark.parametrize("again", [None, 0.02])
def test_an_interrupted_run_prints_how_to_resume(tmp_path: Path, again: float | None) -> None:
    """Also after two Ctrl-C."""
    words = [word for word in SMALL if not word.startswith("trainer.max_epochs")]
    process = start(command(*words, "trainer.max_epochs=100000"), tmp_path)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("logs/*/*/checkpoints/last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    if again is not None:
        time.sleep(again)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    (run,) = runs(tmp_path / "logs")
    assert process.returncode == 130, errors
    assert (
        errors.splitlines()[-1] == f"Error: stopped by SIGINT; continue with: python {ROOT / 'train.py'} resume={run}"
    )
    assert "Traceback" not in errors
    assert not (run / "result.json").exists()


@pytest.mark.slow
def test_a_run_that_its_time_limit_ended_continues_with_more(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL, "trainer.max_epochs=100000", "trainer.max_time=00:00:00:01")
    steps = train(cfg)["steps"]
    assert train(cfg)["steps"] == steps  # resumed to its end
    cfg["trainer"]["max_time"] = "00:00:00:04"
    assert train(cfg)["steps"] > steps
