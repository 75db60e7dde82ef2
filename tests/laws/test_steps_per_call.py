"""`trainer.steps_per_call` changes neither weights nor lines, nor does another number after a resume."""

import random
from pathlib import Path
from typing import Any

import pytest
from support.interruptions import Interrupted, Interruption, interruption, same, train_through
from support.ranks import on_ranks
from support.runs import SMALL, new_run

import lathe.training.train

__all__ = ["interruption"]  # a fixture

RECIPES = {
    "plain": ("trainer.gradient_clip_val=0.1", "scheduler=one_cycle"),
    "averaged": ("callbacks=[default,ema]", "trainer.accumulate_grad_batches=3", "trainer.val_check_interval=7"),
    "small": (
        "compression=[prune,qat]",
        "compression.receipt=none",
        "compression.prune.end=0.6",
        "compression.qat.start=0.6",
    ),
    "bf16": ("precision=bf16-mixed", "callbacks.checkpoint.every_n_train_steps=3", "trainer.max_steps=31"),
    "metrics": (
        "task.metrics=[accuracy,{_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10}]",
        "trainer.log_every_n_steps=3",
    ),
}


def trained(folder: Path, *words: str) -> Path:
    cfg = new_run(folder, *SMALL, "test=false", "seed=3", "model.net.dropout=0.1", "compression.receipt=none", *words)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_run(recipe: str, tmp_path: Path) -> None:
    expected = trained(tmp_path / "one", *RECIPES[recipe], "trainer.steps_per_call=1")
    same(trained(tmp_path / "auto", *RECIPES[recipe], "trainer.steps_per_call=auto"), expected)


# one value of each key, or none, is drawn: what needs steps, and which
DRAWN = {
    "trainer.log_every_n_steps": (1, 2, 3, 5, 7, 50),
    "callbacks.throughput.skip_steps": (1, 2, 4, 10),
    "callbacks.throughput.window": (1, 2, 4, 6),
    "callbacks.nan_guard.every_n_steps": (1, 3, 50),
    "callbacks.checkpoint.every_n_train_steps": (1, 4, 9),
    "callbacks.checkpoint.monitor": ("null",),
    "callbacks.lr_monitor.logging_interval": ("step", "epoch"),
    "trainer.val_check_interval": (3, 7),
    "trainer.max_steps": (1, 13, 27),
    "trainer.limit_train_batches": (8, 11),
    "trainer.gradient_clip_val": (0.2,),
    "scheduler": ("constant", "one_cycle"),
    "optimizer": ("sgd", "adamw"),
    "data.batch_size": (37,),
}


@pytest.mark.parametrize("number", range(6))
def test_drawn_runs_have_the_same_lines_at_the_same_steps(number: int, tmp_path: Path) -> None:
    draw = random.Random(number)
    words = [f"{key}={draw.choice(values)}" for key, values in DRAWN.items() if draw.random() < 0.5]
    expected = trained(tmp_path / "one", *words, "trainer.steps_per_call=1")
    same(trained(tmp_path / "several", *words, f"trainer.steps_per_call={draw.choice(('auto', '5', '7'))}"), expected)


@pytest.mark.parametrize(("before", "after"), [("auto", "1"), ("1", "7"), ("7", "auto")])
def test_a_death_within_a_call(before: str, after: str, tmp_path: Path, interruption: Interruption) -> None:
    words = (*SMALL, "test=false", "callbacks=[default,ema]", "callbacks.checkpoint.every_n_train_steps=4")
    alone = train_through(new_run(tmp_path / "alone", *words, "trainer.steps_per_call=1"), [], interruption)
    cfg: dict[str, Any] = new_run(tmp_path / "dies", *words, f"trainer.steps_per_call={before}")
    interruption.hook, interruption.step = "on_train_batch_start", 14
    with pytest.raises(Interrupted):
        lathe.training.train.train(cfg)
    interruption.hook = ""
    cfg["trainer"]["steps_per_call"] = "auto" if after == "auto" else int(after)
    lathe.training.train.train(cfg)
    same(Path(cfg["paths"]["run_dir"]), alone)


def _run(rank: int, cfg: dict[str, Any]) -> None:
    lathe.training.train.train(cfg)


def test_two_processes(tmp_path: Path) -> None:
    words = (*SMALL, "strategy=ddp", "trainer.devices=2", "test=false", "trainer.accumulate_grad_batches=2")
    found = []
    for per_call in ("1", "auto"):
        cfg = new_run(tmp_path / per_call, *words, f"trainer.steps_per_call={per_call}")
        on_ranks(_run, cfg)
        found.append(Path(cfg["paths"]["run_dir"]))
    same(*found)
