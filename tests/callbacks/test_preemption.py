"""A signal ends a run at a step boundary, with a checkpoint of that step; ranks stop together."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from support.tiny import TinyLoader, TinyTask
from torch import nn

from lathe.callbacks import Checkpoint, Preemption
from lathe.callbacks.checkpoint import SIGNALS
from lathe.strategies import DDP
from lathe.trainer import Trainer


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore handlers, which a failing test would leave to the next."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # the tests themselves run under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Signals(Callback):
    """Sends this process a real signal before batch `batch` is trained."""

    def __init__(self, batch: int, number: int = signal.SIGTERM) -> None:
        self.batch, self.number = batch, number

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            os.kill(os.getpid(), self.number)


def saved_step(folder: Path) -> int:
    return int(torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"])


@pytest.mark.parametrize(("number", "batch"), [(SIGNALS[0], 0), (SIGNALS[1], 3), (SIGNALS[2], 3), (SIGNALS[0], 5)])
def test_the_step_is_finished_and_saved(tiny: SimpleNamespace, tmp_path: Path, number: int, batch: int) -> None:
    preemption = Preemption()
    before = signal.getsignal(number)
    trainer = tiny.trainer(Checkpoint(monitor=None), preemption, Signals(batch, number), default_root_dir=tmp_path)
    with pytest.raises(SIGTERMException):
        trainer.fit(tiny.Task(), tiny.Loader())
    step = batch + 1 if batch < 5 else 7  # the end of an epoch is completed first
    assert (trainer.global_step, saved_step(tmp_path)) == (step, step)
    assert preemption.received == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_what_the_process_ignores_stays_ignored(tiny: SimpleNamespace, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        trainer = tiny.trainer(
            Checkpoint(monitor=None), Preemption(), Signals(2, signal.SIGHUP), default_root_dir=tmp_path
        )
        trainer.fit(tiny.Task(), tiny.Loader())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert saved_step(tmp_path) == 12


def test_a_step_of_accumulated_batches_is_not_cut(tiny: SimpleNamespace, tmp_path: Path) -> None:
    trainer = tiny.trainer(
        Checkpoint(monitor=None), Preemption(), Signals(2), default_root_dir=tmp_path, accumulate_grad_batches=2
    )
    with pytest.raises(SIGTERMException):
        trainer.fit(tiny.Task(), tiny.Loader())
    state = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    batches = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"]
    assert batches == 2 * state["global_step"]  # no checkpoint holds gradients of half a step


def one_rank_gets_a_signal(rank: int, folder: str, batches: int, every: int) -> tuple[int, int, bool]:
    signals = [Signals(1)] if rank == 1 else []
    preemption = Preemption(every_n_steps=every)
    options: dict[str, Any] = {"devices": 2, "strategy": DDP(), "max_epochs": 2, "default_root_dir": folder}
    trainer = quiet_trainer(Checkpoint(monitor=None), preemption, *signals, enable_checkpointing=True, **options)
    stopped = False
    try:
        trainer.fit(TinyTask(nn.Linear(3, 2)), TinyLoader(batches))
    except SIGTERMException:
        stopped = True
    return trainer.global_step, saved_step(Path(folder)), stopped


@pytest.mark.parametrize(("batches", "every", "step"), [(10, 3, 3), (4, 6, 6)])
def test_ranks_stop_at_the_same_step_though_one_gets_a_signal(
    tmp_path: Path, batches: int, every: int, step: int
) -> None:
    assert on_ranks(one_rank_gets_a_signal, str(tmp_path), batches, every, timeout=30) == [
        (step, step, True),
        (step, step, True),
    ]
