"""What is logged amid several steps is logged as if each had been made by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from support.quick_steps import STEPS, OwnThroughput, SeesEach, quick, train
from support.runs import rows
from torch import Tensor

import lathe.verbs.train
from lathe.callbacks import Throughput
from lathe.tasks import ClassificationTask
from lathe.tasks.base import Task
from lathe.tasks.loops.notes import can_note

__all__ = ["quick"]  # a fixture


class Rows(DummyLogger):
    """Keeps what it is given, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def logged(folder: Path, monkeypatch: pytest.MonkeyPatch, *own: Callback, words: tuple[str, ...] = ()) -> Rows:
    """What a logger of the user's own is given by a run that logs every third step."""
    kept, make = Rows(), lathe.verbs.train.make_loggers
    monkeypatch.setattr(lathe.verbs.train, "make_loggers", lambda *args, **kw: [*make(*args, **kw), kept])
    train(folder, monkeypatch, *own, words=("trainer.log_every_n_steps=3", "callbacks.throughput.skip_steps=6", *words))
    return kept


class Windows(Callback):
    """What each window of throughput counted: batches and samples."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (throughput,) = (callback for callback in trainer.callbacks if isinstance(callback, Throughput))
        self.found = [window[:2] for window in throughput._windows]


def test_logged_steps_are_made_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int]
) -> None:
    """Two draws of the bar apart, not a logged step: each line all the same, in order, with its step's rate."""
    windows = Windows()
    made = logged(tmp_path / "made", monkeypatch, windows, words=("scheduler=one_cycle",)).rows
    counted = windows.found
    assert sum(quick) > STEPS * 0.6
    assert max(quick) > 6
    quick.clear()
    plain = logged(tmp_path / "plain", monkeypatch, words=("scheduler=one_cycle", "trainer.steps_per_call=1")).rows
    assert not quick

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
    def quiet_steps(self, trainer: Any) -> float:
        return 100

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == 14:
            raise ZeroDivisionError


def test_lines_of_steps_before_a_death_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int]
) -> None:
    """Those of whole steps; of the step under way nothing was noted yet but its rate, if it is logged."""
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, monkeypatch, Dies(), words=("trainer.log_every_n_steps=3",))
    (file,) = tmp_path.rglob("metrics.csv")
    assert [row["step"] for row in rows(file.parent) if row.get("train/loss")] == ["3", "6", "9", "12"]


def test_a_task_that_writes_its_lines_itself_is_asked_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int]
) -> None:
    seen = []

    def write(self: ClassificationTask, metrics: dict[str, float]) -> None:
        seen.append(self.trainer.global_step)
        Task.write(self, metrics)

    monkeypatch.setattr(ClassificationTask, "write", write)
    train(tmp_path, monkeypatch, words=("trainer.log_every_n_steps=3",))
    assert [step for step in seen if step % 3 == 0] == sorted({*range(3, STEPS + 1, 3)})
    assert quick
    assert max(quick) <= 2


class SaysAnew(Throughput):
    """Has a word of its own on what it looks at, and none on notes."""

    def quiet_steps(self, trainer: Any) -> float:
        return super().quiet_steps(trainer)


@pytest.mark.parametrize(("part", "notes"), [(Throughput(), True), (OwnThroughput(), True), (SaysAnew(), False)])
def test_whose_word_on_notes_holds(part: Any, notes: bool) -> None:
    assert can_note(part) is notes


def test_windows_that_end_amid_waiting_batches_have_the_same_digits() -> None:
    """Of batches of two sizes, so that some wait and some do not."""

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
                found += task.ended()
        return [*found, *task.ended(), task._take("train"), task._epoch_sums["train"]]

    expected, got = sums(several=False), sums(several=True)
    assert len(expected) == 9
    assert all(torch.equal(left, right) for left, right in zip(expected, got, strict=True))
