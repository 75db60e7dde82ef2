"""best.ckpt follows the monitored metric, last.ckpt is the newest state."""

import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback

from lathe.callbacks import Checkpoint
from lathe.callbacks.checkpoint_io import AtomicCheckpointIO
from lathe.errors import UserError


class Scores(Callback):
    """Reports given metrics, one per validation, before the checkpoint callback reads them."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        value = self.values.pop(0)
        pl_module.log("val/score", value)
        pl_module.log("val/other", -value)


class Times(Callback):
    """Records the optimizer steps at which a file was written."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.seen: dict[str, list[int]] = {path.stem: [] for path in paths}
        self.stamps: dict[Path, int] = {}

    def on_train_batch_start(self, *args: Any) -> None:
        for path in self.paths:
            if path.exists() and (stamp := path.stat().st_ino) != self.stamps.get(path):
                self.stamps[path] = stamp
                self.seen[path.stem].append(step_of(path))

    on_fit_end = on_train_batch_start


def step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def fit(
    tiny: SimpleNamespace, folder: Path, checkpoint: Checkpoint, *callbacks: Any, **options: Any
) -> tuple[Any, Times]:
    times = Times(folder / "checkpoints" / "best.ckpt", folder / "checkpoints" / "last.ckpt")
    trainer = tiny.trainer(checkpoint, *callbacks, times, default_root_dir=folder, **options)
    trainer.fit(tiny.Task(), tiny.Loader())  # six batches in an epoch
    return trainer, times


@pytest.mark.parametrize(
    ("mode", "best", "writes"), [("max", 0.9, [6, 12, 30]), ("min", 0.1, [6, 18, 24])], ids=["max", "min"]
)
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


@pytest.mark.parametrize(
    ("interval", "options", "written"),
    [
        ({}, {"max_epochs": 3}, [6, 12, 18]),
        ({"every_n_epochs": 2}, {"max_epochs": 5}, [12, 24, 30]),
        ({"every_n_train_steps": 4}, {"max_epochs": 2}, [4, 6, 8, 12]),
        ({"every_n_train_steps": 3, "every_n_epochs": 2}, {"max_epochs": 3}, [3, 6, 9, 12, 15, 18]),
        ({"every_n_train_steps": 1}, {"max_epochs": 1, "accumulate_grad_batches": 2}, [1, 2, 3]),
    ],
)
def test_last_is_written_at_its_interval_and_at_the_end(
    tiny: SimpleNamespace, tmp_path: Path, interval: dict[str, int], options: dict[str, int], written: list[int]
) -> None:
    _, times = fit(tiny, tmp_path, Checkpoint(**interval), **options)
    assert times.seen["last"] == written


def test_a_validation_that_is_due_comes_first(tiny: SimpleNamespace, tmp_path: Path) -> None:
    path, steps = tmp_path / "checkpoints" / "last.ckpt", list[int]()
    order = LambdaCallback(on_validation_start=lambda *_: steps.append(step_of(path) if path.exists() else 0))
    checkpoint = Checkpoint(monitor="val/score", every_n_train_steps=2)
    fit(tiny, tmp_path, checkpoint, Scores(0.1, 0.2, 0.3), order, max_epochs=1, val_check_interval=2)
    assert steps == [0, 2, 4]  # of last.ckpt at each validation
    state = torch.load(checkpoint.path("last"), weights_only=True)
    assert state["callbacks"]["Checkpoint"]["best_score"] == pytest.approx(0.3)


@pytest.mark.parametrize("links", [True, False], ids=["a second name", "a copy"])
def test_an_unmonitored_last_is_the_best_by_another_name(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """One file is written; later checkpoints leave the other as it is. A file system may lack hard links."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links")))
    best, last = tmp_path / "checkpoints" / "best.ckpt", tmp_path / "checkpoints" / "last.ckpt"

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 12:
                assert best.samefile(last) is links
                self.kept = best.read_bytes()
                assert last.read_bytes() == self.kept
            if trainer.global_step == 17:
                raise ZeroDivisionError

    looks = Looks()
    trainer = tiny.trainer(
        Checkpoint(monitor=None, every_n_train_steps=4), looks, default_root_dir=tmp_path, max_epochs=3
    )
    trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(tiny.Task(), tiny.Loader())
    assert (step_of(best), step_of(last)) == (12, 16)
    assert best.read_bytes() == looks.kept
    assert list((tmp_path / "checkpoints").glob(".*")) == []


def test_a_figure_that_never_came_ends_the_run_after_an_epoch(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^callbacks\.checkpoint\.monitor=val/acc: .*val/accuracy"):
        fit(tiny, tmp_path, Checkpoint(monitor="val/acc"), max_epochs=2)


def test_without_a_validation_best_is_the_newest(tiny: SimpleNamespace, tmp_path: Path) -> None:
    checkpoint = Checkpoint(monitor="val/absent")
    _, times = fit(tiny, tmp_path, checkpoint, max_epochs=2, limit_val_batches=0)
    assert times.seen["best"] == [12]
    assert checkpoint.unjudged == "no validation ran"


def test_what_is_no_number_is_never_the_best(tiny: SimpleNamespace, tmp_path: Path) -> None:
    checkpoint = Checkpoint(monitor="val/score")
    _, times = fit(tiny, tmp_path, checkpoint, Scores(math.nan, 0.1, math.nan), max_epochs=3)
    assert times.seen["best"] == [6, 12]
    assert checkpoint.best_score == pytest.approx(0.1)


def listed(folder: Path) -> list[tuple[int, float]]:
    """Return steps and scores in top.json, which lists the files that exist."""
    rows = json.loads((folder / "checkpoints" / "top.json").read_text())
    files = {path.stem: step_of(path) for path in (folder / "checkpoints").glob("epoch=*")}
    assert {row["name"]: row["step"] for row in rows} == files
    return [(row["step"], round(row["score"], 6)) for row in rows]


@pytest.mark.parametrize(
    ("mode", "count", "expected", "thread"),
    [
        ("min", 3, [(24, 0.1), (18, 0.1), (6, 0.5)], True),
        ("max", -1, [(30, 0.9), (12, 0.9), (6, 0.5), (24, 0.1), (18, 0.1)], False),
    ],
)
def test_the_best_epochs_are_kept_the_best_first(
    tiny: SimpleNamespace, tmp_path: Path, mode: str, count: int, expected: list[Any], thread: bool
) -> None:
    """The later of equals wins, as with best.ckpt."""
    checkpoint = Checkpoint(monitor="val/score", mode=mode, save_top_k=count, **{"async": thread})
    scores = Scores(0.5, 0.9, 0.1, 0.1, 0.9, math.nan)
    trainer = tiny.trainer(checkpoint, scores, default_root_dir=tmp_path, max_epochs=6)
    trainer.fit(tiny.Task(), tiny.Loader())
    assert listed(tmp_path) == expected
    assert checkpoint.best_step == expected[0][0]


def test_an_older_one_goes_when_the_new_one_is_whole(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(monitor="val/score", save_top_k=2)
    save = checkpoint.save

    def fail(trainer: Any, name: str) -> None:
        if name == "epoch=2-step=18":
            raise OSError("a full disk")
        save(trainer, name)

    monkeypatch.setattr(checkpoint, "save", fail)
    trainer = tiny.trainer(checkpoint, Scores(0.5, 0.7, 0.9), default_root_dir=tmp_path, max_epochs=3)
    with pytest.raises(OSError, match="a full disk"):
        trainer.fit(tiny.Task(), tiny.Loader())
    assert listed(tmp_path) == [(12, 0.7), (6, 0.5)]


def test_a_continued_run_keeps_what_one_that_was_left_alone_keeps(tiny: SimpleNamespace, tmp_path: Path) -> None:
    """Also if the killed run was past the checkpoint from which it resumes."""
    scores = (0.5, 0.9, 0.6, 0.7)
    for folder, parts in (("alone", [(0, 4)]), ("parts", [(0, 2), (2, 3), (2, 4)])):
        last: Path | None = None
        for start, end in parts:
            checkpoint = Checkpoint(monitor="val/score", save_top_k=2)
            home = tmp_path / folder
            trainer = tiny.trainer(checkpoint, Scores(*scores[start:end]), default_root_dir=home, max_epochs=end)
            trainer.fit(tiny.Task(), tiny.Loader(), ckpt_path=last, weights_only=True)
            if end == 2:
                last = home / "kept.ckpt"
                last.write_bytes(checkpoint.path("last").read_bytes())
    assert listed(tmp_path / "alone") == listed(tmp_path / "parts") == [(12, 0.9), (24, 0.7)]
