"""Habits from plain Lightning: each works, or a message says why not."""

from pathlib import Path
from typing import Any

import pytest
from support.own_lightning import QUICK
from support.ranks import on_ranks
from support.runs import new_run

from lathe.errors import UserError
from lathe.training.train import train

TABLE = "features: 16, classes: 2, width: 4"


def run(folder: Path, module: str, *words: str, data: str = "support.own_parts.Table") -> dict[str, Any]:
    cfg = new_run(folder, *QUICK, f"model.net={{_target_: support.own_habits.{module}, {TABLE}}}", "test=false", *words)
    cfg["data"] = {"_target_": data}
    return cfg


def on_two(rank: int, waiting: dict[str, Any], *refused: dict[str, Any]) -> list[str]:
    train(waiting)
    said = []
    for cfg in refused:
        with pytest.raises(UserError) as told:
            train(cfg)
        said.append(str(told.value))
    return said


def test_two_ranks_agree_or_say_why_not(tmp_path: Path) -> None:
    two = "trainer.devices=2"
    waiting = run(tmp_path / "waiting", "Waiting", two)
    gathering = run(tmp_path / "gathering", "Gathers", two, data="support.own_habits.Odd")
    divided = run(tmp_path / "divided", "LitNet", two, data="support.own_habits.Divided")
    divided["model"]["net"]["_target_"] = "support.own_lightning.LitNet"
    for gathered, halved in on_ranks(on_two, waiting, gathering, divided):
        assert gathered.startswith("Gathers.all_gather: ")
        assert halved == (
            "data: Divided has batch_size=16 and a train_dataloader of 8: the DataLoader's batch_size is "
            "the global batch, which Lathe divides among the 2 replicas itself, so give it all of batch_size."
        )
    home = Path(waiting["paths"]["run_dir"])
    rates = [float((home / f"rate{rank}").read_text()) for rank in range(2)]
    assert rates == [0.1, 0.1]  # the first rank's metric decreases, the other's does not
