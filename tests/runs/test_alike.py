"""Two runs are held to be the same only where they are."""

from pathlib import Path

from support.runs import SMALL, new_run

import lathe.verbs.train
from lathe.runs.alike import differences


def test_what_differs_is_named(tmp_path: Path) -> None:
    options = (*SMALL, "trainer.limit_train_batches=4", "test=false", "trainer.log_every_n_steps=2")
    one, again, other = (
        new_run(tmp_path / name, *options, f"seed={seed}") for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for cfg in (one, again, other):
        lathe.verbs.train.train(cfg)
    alone, same, else_ = (Path(cfg["paths"]["run_dir"]) for cfg in (one, again, other))
    assert differences(same, alone) == []
    told = " ".join(differences(else_, alone))
    for word in (
        "weights of last.ckpt",
        "weights of best.ckpt",
        "result.json: seed 2 in place of 1",
        "metrics.csv: {'step'",
    ):
        assert word in told
    (alone / "receipt.md").write_text("")
    (same / ".tmp-x-1.result.json").write_text("")
    assert differences(same, alone) == ["no receipt.md", "left: .tmp-x-1.result.json"]
