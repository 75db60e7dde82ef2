"""best.ckpt follows the monitored figure, last.ckpt is the newest state, and a file under its own name is always whole."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lathe.callbacks import AtomicCheckpointIO, Checkpoint
from lathe.errors import UserError


class Scores(Callback):
    """Reports given figures, one per validation, before the checkpoint callback looks."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        value = self.values.pop(0)
        pl_module.log("val/score", value)
        pl_module.log("val/other", -value)


class Times(Callback):
    """The optimizer steps at which a file was written."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.seen: dict[str, list[int]] = {path.stem: [] for path in paths}
        self.stamps: dict[Path, int] = {}

    def look(self, trainer: Any) -> None:
        for path in self.paths:
            if path.exists() and (stamp := path.stat().st_ino) != self.stamps.get(path):
                self.stamps[path] = stamp
                self.seen[path.stem].append(step_of(path))

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.look(trainer)

    def on_fit_end(self, trainer: Any, *args: Any) -> None:
        self.look(trainer)


def step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def fit(tiny: SimpleNamespace, folder: Path, checkpoint: Checkpoint, *callbacks: Any, **options: Any) -> tuple[Any, Times]:
    times = Times(folder / "checkpoints" / "best.ckpt", folder / "checkpoints" / "last.ckpt")
    trainer = tiny.trainer(checkpoint, *callbacks, times, default_root_dir=folder, **options)
    trainer.fit(tiny.Task(), tiny.Loader())  # six batches in an epoch
    return trainer, times


@pytest.mark.parametrize(("mode", "best", "writes"), [("max", 0.9, [6, 12, 30]), ("min", 0.1, [6, 18, 24])], ids=["max", "min"])
def test_best_follows_the_monitored_figure(
    tiny: SimpleNamespace, tmp_path: Path, mode: str, best: float, writes: list[int]
) -> None:
    checkpoint = Checkpoint(monitor="val/score", mode=mode)
    _, times = fit(tiny, tmp_path, checkpoint, Scores(0.5, 0.9, 0.1, 0.1, 0.9), max_epochs=5)
    assert times.seen["best"] == writes  # of equal scores the later one is kept
    assert checkpoint.best_score == pytest.approx(best)
    assert checkpoint.best_step == writes[-1] == step_of(checkpoint.path("best"))
    assert checkpoint.best_metrics["val/other"] == pytest.approx(-best)
    assert step_of(checkpoint.path("last")) == 30


def test_last_is_written_after_each_epoch(tiny: SimpleNamespace, tmp_path: Path) -> None:
    _, times = fit(tiny, tmp_path, Checkpoint(), max_epochs=3)
    assert times.seen["last"] == [6, 12, 18]


def test_last_every_other_epoch_and_at_the_end(tiny: SimpleNamespace, tmp_path: Path) -> None:
    _, times = fit(tiny, tmp_path, Checkpoint(every_n_epochs=2), max_epochs=5)
    assert times.seen["last"] == [12, 24, 30]


def test_last_in_the_middle_of_an_epoch(tiny: SimpleNamespace, tmp_path: Path) -> None:
    _, times = fit(tiny, tmp_path, Checkpoint(every_n_train_steps=4), max_epochs=2)
    assert times.seen["last"] == [4, 6, 8, 12]


def test_steps_are_those_of_the_optimizer(tiny: SimpleNamespace, tmp_path: Path) -> None:
    _, times = fit(tiny, tmp_path, Checkpoint(every_n_train_steps=1), max_epochs=1, accumulate_grad_batches=2)
    assert times.seen["last"] == [1, 2, 3]


def test_a_validation_that_is_due_comes_first(tiny: SimpleNamespace, tmp_path: Path) -> None:
    class Order(Callback):
        def __init__(self) -> None:
            self.last_at_validation: list[int] = []

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            path = tmp_path / "checkpoints" / "last.ckpt"
            self.last_at_validation.append(step_of(path) if path.exists() else 0)

    order = Order()
    checkpoint = Checkpoint(monitor="val/score", every_n_train_steps=2)
    fit(tiny, tmp_path, checkpoint, Scores(0.1, 0.2, 0.3), order, max_epochs=1, val_check_interval=2)
    assert order.last_at_validation == [0, 2, 4]
    state = torch.load(checkpoint.path("last"), weights_only=True)
    assert state["callbacks"]["Checkpoint"]["best_score"] == pytest.approx(0.3)


def test_unmonitored_best_is_the_newest(tiny: SimpleNamespace, tmp_path: Path) -> None:
    _, times = fit(tiny, tmp_path, Checkpoint(monitor=None), max_epochs=2)
    assert times.seen == {"best": [6, 12], "last": [6, 12]}


def test_a_figure_that_never_came_is_warned_about(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"val/absent was never reported .*so best\.ckpt is the newest state"):
        _, times = fit(tiny, tmp_path, Checkpoint(monitor="val/absent"), max_epochs=2)
    assert times.seen["best"] == [12]


def test_the_record_survives_a_resume(tiny: SimpleNamespace, tmp_path: Path) -> None:
    first = Checkpoint(monitor="val/score")
    fit(tiny, tmp_path, first, Scores(0.5, 0.8), max_epochs=2)
    second = Checkpoint(monitor="val/score")
    trainer = tiny.trainer(second, Scores(0.7, 0.6), default_root_dir=tmp_path, max_epochs=4)
    trainer.fit(tiny.Task(), tiny.Loader(), ckpt_path=first.path("last"), weights_only=True)
    assert (second.best_score, second.best_step) == (pytest.approx(0.8), 12)
    assert second.best_metrics == first.best_metrics
    assert step_of(second.path("best")) == 12
    assert step_of(second.path("last")) == 24


def test_a_folder_of_its_own(tiny: SimpleNamespace, tmp_path: Path) -> None:
    checkpoint = Checkpoint(dirpath=str(tmp_path / "mine"), monitor=None)
    tiny.trainer(checkpoint, default_root_dir=tmp_path, max_epochs=1).fit(tiny.Task(), tiny.Loader())
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "maximum"}, "callbacks.checkpoint.mode='maximum': choose max or min."),
        ({"every_n_train_steps": 0}, "callbacks.checkpoint.every_n_train_steps=0: give a whole number from 1, or null."),
        ({"every_n_epochs": -1}, "callbacks.checkpoint.every_n_epochs=-1: give a whole number from 1, or null."),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        Checkpoint(**options)
    assert str(caught.value) == sentence


def test_epochs_without_an_interval(tiny: SimpleNamespace, tmp_path: Path) -> None:
    _, times = fit(tiny, tmp_path, Checkpoint(every_n_epochs=None), max_epochs=2)  # type: ignore[arg-type]
    assert times.seen["last"][-1] == 12


# atomic files

BIG = {"state_dict": {"weight": torch.arange(300_000.0)}, "global_step": 2}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 1}, path)
    return path


def untouched(path: Path) -> bool:
    return step_of(path) == 1 and [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_a_new_file_takes_the_old_ones_place(old: Path) -> None:
    AtomicCheckpointIO().save_checkpoint(BIG, old)
    assert step_of(old) == 2
    assert [file.name for file in old.parent.iterdir()] == ["last.ckpt"]


class Full:
    """A file on a disk with little room left."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device", "last.ckpt")
        return int(self.file.write(data))

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 100, 100_000, 1_200_000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(old: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr("lathe.callbacks.checkpoint.open", lambda path, mode: Full(open(path, mode), room), raising=False)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device") as caught:
        AtomicCheckpointIO().save_checkpoint(BIG, old)
    assert caught.value.errno == errno.ENOSPC
    assert untouched(old)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device")
def test_a_disk_that_is_really_full(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.callbacks.checkpoint.open", lambda path, mode: open("/dev/full", mode), raising=False)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device"):
        AtomicCheckpointIO().save_checkpoint(BIG, old)
    assert untouched(old)


def test_a_disk_that_fails_at_the_last_moment(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        AtomicCheckpointIO().save_checkpoint(BIG, old)
    assert untouched(old)


def test_another_error_of_torch_stays_what_it_is(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        AtomicCheckpointIO().save_checkpoint(BIG, old)
    assert untouched(old)
