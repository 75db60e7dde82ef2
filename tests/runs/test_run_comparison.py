"""Differences between two complete runs."""

from pathlib import Path

from support.runs import SMALL, new_run

import lathe.training.train
from lathe.runs.run_discovery import compare_runs


def test_each_difference_is_named(tmp_path: Path) -> None:
    options = (*SMALL, "trainer.limit_train_batches=4", "test=false", "trainer.log_every_n_steps=2")
    one, again, other = (
        new_run(tmp_path / name, *options, f"seed={seed}") for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for cfg in (one, again, other):
        lathe.training.train.train(cfg)
    alone, same, else_ = (Path(cfg["paths"]["run_dir"]) for cfg in (one, again, other))
    assert compare_runs(same, alone) == []
    told = " ".join(compare_runs(else_, alone))
    for word in (
        "weights of last.ckpt",
        "weights of best.ckpt",
        "result.json: seed 2 instead of 1",
        "metrics.csv: {'step'",
    ):
        assert word in told
    (alone / "receipt.md").write_text("")
    (same / ".tmp-x-1.result.json").write_text("")
    assert compare_runs(same, alone) == ["no receipt.md", "left: .tmp-x-1.result.json"]
