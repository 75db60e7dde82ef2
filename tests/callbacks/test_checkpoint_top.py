"""`save_top_k`: the best epochs beside best.ckpt."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lathe.callbacks import Checkpoint
from lathe.errors import ArgumentError


class Scores(Callback):
    """Reports given metrics, one per validation."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("val/score", self.values.pop(0))


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("epoch=*"))


def listed(folder: Path) -> list[tuple[int, float]]:
    found = json.loads((folder / "checkpoints" / "top.json").read_text())
    for one in found:
        state = torch.load(folder / "checkpoints" / f"{one['name']}.ckpt", weights_only=True)
        assert state["global_step"] == one["step"]
    assert [f"{one['name']}.ckpt" for one in sorted(found, key=lambda one: str(one["name"]))] == kept(folder)
    return [(one["step"], round(one["score"], 6)) for one in found]


@pytest.mark.parametrize(
    ("mode", "count", "expected"),
    [
        ("max", 2, [(30, 0.9), (12, 0.9)]),
        ("min", 3, [(24, 0.1), (18, 0.1), (6, 0.5)]),
        ("max", -1, [(30, 0.9), (12, 0.9), (6, 0.5), (24, 0.1), (18, 0.1)]),
    ],
)
@pytest.mark.parametrize("thread", [False, True])
def test_the_best_epochs_are_kept_the_best_first(
    tiny: SimpleNamespace, tmp_path: Path, mode: str, count: int, expected: list[Any], thread: bool
) -> None:
    """Of equals the later, as with best.ckpt."""
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
    """Also where the killed one was past the checkpoint that it goes on from."""
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


def test_the_default_keeps_no_others(tiny: SimpleNamespace, tmp_path: Path) -> None:
    checkpoint = Checkpoint(monitor="val/score")
    trainer = tiny.trainer(checkpoint, Scores(0.5), default_root_dir=tmp_path, max_epochs=1)
    trainer.fit(tiny.Task(), tiny.Loader())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    with pytest.raises(ArgumentError, match=r"^save_top_k=2 needs a monitor"):
        Checkpoint(monitor=None, save_top_k=2)
    with pytest.raises(ArgumentError, match=r"^save_top_k=0: the best epoch is always kept"):
        Checkpoint(save_top_k=0)
