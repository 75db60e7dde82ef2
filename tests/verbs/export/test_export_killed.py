"""Exports killed at any moment: existing files are whole, and the next export removes the leftovers."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.commands import check, command, run, start
from support.runs import SMALL, new_run

import lathe.training.train


@pytest.mark.slow
def test_kill_9_at_random_moments_of_an_export(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL, "trainer.max_epochs=1", "test=false")
    lathe.training.train.train(cfg)
    directory = Path(cfg["paths"]["run_dir"])
    exports, words = directory / "exports", (f"run={directory}", "target=onnx")
    chance = random.Random(os.environ.get("LATHE_KILL_SEED", time.time_ns()))
    killed = 0
    for _ in range(3):
        process = start(command(*words, script="scripts/export.py"), tmp_path, session=True)
        while process.poll() is None and not list(exports.glob(f".tmp-*-{process.pid}.onnx")):
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 2.0))
        killed += process.poll() is None
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.communicate(timeout=60)
        assert not (exports / "onnx").exists() or (exports / "onnx" / "manifest.json").is_file()
        assert len(list(exports.glob(".tmp-*"))) <= 1  # the earlier ones were removed at the start of this one
    assert killed
    check(run(*words, cwd=tmp_path, script="scripts/export.py"))
    assert os.listdir(exports) == ["onnx"]
    assert not [path for path in directory.rglob(".*") if path.name != ".lock"]
