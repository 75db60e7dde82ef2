"""Ctrl-C, on the real command."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import SMALL, command, environment, runs


@pytest.mark.slow
def test_a_run_that_is_interrupted_says_how_to_go_on(tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith("trainer.max_epochs")]
    process = subprocess.Popen(
        command(*words, "trainer.max_epochs=100000"), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("logs/*/*/checkpoints/last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    (run,) = runs(tmp_path / "logs")
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == f"Error: stopped by SIGINT; continue with: python train.py resume={run}"
    assert not (run / "result.json").exists()
