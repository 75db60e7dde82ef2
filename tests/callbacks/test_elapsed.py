"""Wall time of a run, summed over its processes."""

from pathlib import Path

import torch
from support.runs import new_run

from lathe.training.train import train

QUICK = ("model=mlp", "model.net.width=8", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false")
SHORT = (*QUICK, "trainer.limit_train_batches=2", "trainer.max_epochs=1", "trainer.log_every_n_steps=1", "test=false")


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
