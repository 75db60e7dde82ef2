"""The seconds of a run are those of all its processes."""

from pathlib import Path

import pytest
import torch
from support.runs import new_run

from lathe.callbacks import WallTime, wall_time
from lathe.training.train import train

QUICK = ("model=mlp", "model.net.width=8", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false")
SHORT = (*QUICK, "trainer.limit_train_batches=2", "trainer.max_epochs=1", "trainer.log_every_n_steps=1", "test=false")


def test_seconds_of_earlier_processes_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(wall_time, "monotonic", lambda: now[0])
    first = WallTime()
    now[0] += 5
    saved = first.state_dict()
    now[0] += 100  # lost: it is made again
    second = WallTime()
    second.load_state_dict(saved)
    now[0] += 2
    assert (saved, second.state_dict(), first.seconds) == ({"seconds": 5.0}, {"seconds": 7.0}, 107.0)


def test_a_resumed_run_has_them(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SHORT)
    train(cfg)
    run = Path(cfg["paths"]["run_dir"])
    last = run / "checkpoints/last.ckpt"
    state = torch.load(last, weights_only=True)
    assert 0 < state["callbacks"]["WallTime"]["seconds"] < 60
    state["callbacks"]["WallTime"]["seconds"] = 1000.0
    torch.save(state, last)
    (run / "result.json").unlink()
    assert 1000 < train(cfg)["seconds"] < 1060
