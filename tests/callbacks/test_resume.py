"""Generators and the position in the data are restored from the checkpoint."""

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from support.runs import new_run
from support.tiny import TinyLoader, TinyTask
from torch import nn

from lathe.callbacks import ExactResume
from lathe.strategies import DDP
from lathe.trainer import Trainer
from lathe.training.train import train

pytestmark = pytest.mark.law3


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


class Draws(Callback):
    """Draws one number of each generator after each batch; saves after batch `at` of the first epoch."""

    def __init__(self, path: Path | None = None, at: int = -1) -> None:
        self.path, self.at = path, at
        self.drawn: dict[int, tuple[float, float, float]] = {}
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.drawn[trainer.global_step] = draw()
        self.seen.append(float(batch[0].sum()))
        if self.path is not None and trainer.global_step == self.at:
            np.random.standard_normal()  # a generator that caches half a pair of numbers
            random.gauss(0, 1)
            trainer.save_checkpoint(self.path)


@pytest.fixture(autouse=True)
def generators() -> Any:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def fit(tiny: SimpleNamespace, seed: int, draws: Draws, task: Any = None, **options: Any) -> Any:
    trainer = tiny.trainer(ExactResume(seed), draws, max_epochs=2)
    trainer.fit(task or tiny.Task(), tiny.Loader(), **options)
    return trainer


@pytest.mark.parametrize("at", [4, 6])
def test_a_continued_run_draws_the_same_numbers_on_the_same_batches(
    tiny: SimpleNamespace, tmp_path: Path, at: int
) -> None:
    fit(tiny, 3, whole := Draws(tmp_path / "a.ckpt", at))
    torch.manual_seed(99)
    fit(tiny, 3, continued := Draws(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert continued.drawn == {step: drawn for step, drawn in whole.drawn.items() if step > at}
    assert continued.seen == whole.seen[at:]


class Counts(Callback):
    """A user's stateful callback; without state if nothing was counted."""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen} if self.seen else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


@pytest.mark.parametrize("seen", [0, 3])
def test_a_callback_whose_state_is_gone_is_told(seen: int, tiny: SimpleNamespace, tmp_path: Path) -> None:
    fit(tiny, 3, Draws(tmp_path / "a.ckpt", 4))
    trainer = tiny.trainer(ExactResume(3), Counts(seen), max_epochs=2)
    told = pytest.warns(UserWarning, match="^callbacks: the checkpoint has no state of Counts[.] It starts")
    with told if seen else nullcontext():
        trainer.fit(tiny.Task(), tiny.Loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)


def test_a_checkpoint_of_another_number_of_ranks_starts_from_seed_and_step(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    fit(tiny, 3, whole := Draws(tmp_path / "a.ckpt", 4))
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)
    state["random_state"] *= 2
    torch.save(state, tmp_path / "two.ckpt")
    runs = []
    for _ in range(2):
        fit(tiny, 3, draws := Draws(), ckpt_path=tmp_path / "two.ckpt", weights_only=True)
        runs.append(draws.drawn)
    assert runs[0] == runs[1]
    assert sorted(runs[0]) == sorted(step for step in whole.drawn if step > 4)
    assert runs[0][5] not in (whole.drawn[5], whole.drawn[1])


def two_ranks(rank: int, path: str) -> list[dict[int, tuple[float, float, float]]]:
    drawn = []
    for callback, options in ((Draws(Path(path), 3), {}), (Draws(), {"ckpt_path": path, "weights_only": True})):
        trainer = quiet_trainer(ExactResume(5), callback, devices=2, strategy=DDP(), max_epochs=2)
        trainer.fit(TinyTask(nn.Linear(3, 2)), TinyLoader(3), **options)
        drawn.append(callback.drawn)
    return drawn


def test_each_rank_has_numbers_of_its_own_and_gets_them_back(tmp_path: Path) -> None:
    first, second = on_ranks(two_ranks, str(tmp_path / "two.ckpt"))
    for whole, continued in (first, second):
        assert continued == {step: whole[step] for step in (4, 5, 6)}
    assert all(first[0][step] != second[0][step] for step in range(1, 7))


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
