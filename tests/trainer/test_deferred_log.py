"""Rows logged inside a group of steps are those of single steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from support.multi_step import STEPS, SeesEach, groups, train
from support.runs import rows
from torch import Tensor

import lathe.training.train
from lathe.callbacks import Throughput
from lathe.tasks import ClassificationTask

__all__ = ["groups"]  # a fixture


class Rows(DummyLogger):
    """Records its rows in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def logged(folder: Path, monkeypatch: pytest.MonkeyPatch, *own: Callback, words: tuple[str, ...] = ()) -> Rows:
    """Return the rows of a logger in a run that logs every third step."""
    kept, make = Rows(), lathe.training.train.make_loggers
    monkeypatch.setattr(lathe.training.train, "make_loggers", lambda *args, **kw: [*make(*args, **kw), kept])
    train(folder, monkeypatch, *own, words=("trainer.log_every_n_steps=3", "callbacks.throughput.skip_steps=6", *words))
    return kept


class Windows(Callback):
    """Records the batches and samples of each window of throughput."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (throughput,) = (callback for callback in trainer.callbacks if isinstance(callback, Throughput))
        self.found = [window[:2] for window in throughput._windows]


def test_logged_steps_run_inside_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int]) -> None:
    """Every row is written, in order, with its step's learning rate."""
    windows = Windows()
    made = logged(tmp_path / "made", monkeypatch, windows, words=("scheduler=one_cycle",)).rows
    counted = windows.found
    assert sum(groups) > STEPS * 0.6
    assert max(groups) > 6
    groups.clear()
    plain = logged(tmp_path / "plain", monkeypatch, words=("scheduler=one_cycle", "trainer.steps_per_call=1")).rows
    assert not groups

    def lines(rows: list[tuple[int | None, dict[str, Any]]]) -> dict[int | None, dict[str, Any]]:
        found: dict[int | None, dict[str, Any]] = {}
        for step, row in rows:
            found.setdefault(step, {}).update(row)
        return found

    ours, theirs = lines(made), lines(plain)
    assert list(ours) == list(theirs)
    assert {step: row.keys() for step, row in ours.items()} == {step: row.keys() for step, row in theirs.items()}
    for step, row in theirs.items():
        for name, value in row.items():
            assert name.startswith("throughput/") or ours[step][name] == value
    rates = [row["throughput/samples_per_s"] for row in ours.values() if "throughput/samples_per_s" in row]
    assert all(rate > 0 for rate in rates)
    assert len(rates) == len(counted) - 1 == 11
    assert counted == [(3, 192)] * 11 + [(1, 64)]  # what is left at the end of training is one as well


class Dies(SeesEach):
    def skippable_steps(self, trainer: Any) -> float:
        return 100

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == 14:
            raise ZeroDivisionError


def test_rows_before_an_exception_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    """Rows of complete steps are written when a hook raises inside a group."""
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, monkeypatch, Dies(), words=("trainer.log_every_n_steps=3",))
    (file,) = tmp_path.rglob("metrics.csv")
    assert [row["step"] for row in rows(file.parent) if row.get("train/loss")] == ["3", "6", "9", "12"]


def test_logged_windows_inside_a_group_have_the_same_digits() -> None:
    """Batches of two sizes: some are summed together, some one by one."""

    def sums(several: bool) -> list[Tensor]:
        torch.manual_seed(0)
        task, found = ClassificationTask(torch.nn.Linear(4, 3)), list[Tensor]()
        for number in range(30):
            x, y = torch.randn(6 if number % 11 else 5, 4), torch.randint(0, 3, (6 if number % 11 else 5,))
            task.training_loss(task.net(x), (x, y))
            if number % 4 == 3:
                if several:
                    task.end_window()
                else:
                    found.append(task._take("train"))
            if number % 13 == 0:
                found += task.take_windows()
        return [*found, *task.take_windows(), task._take("train"), task._epoch_sums["train"]]

    expected, got = sums(several=False), sums(several=True)
    assert len(expected) == 9
    assert all(torch.equal(left, right) for left, right in zip(expected, got, strict=True))
