"""Epochs of the samples with the largest losses, through kills and on two processes."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import check as succeeded
from support.commands import run
from support.interruptions import Interruption, interruption, same, train_through
from support.runs import SMALL, column, new_run, runs
from torch import nn
from torch.nn import functional as F

import lathe.training.train
from lathe.contrib import HardSamples, ImageSizes
from lathe.data.loader import ImageLoader
from lathe.data.order import Selection
from lathe.errors import UserError
from lathe.strategies import Pipeline
from lathe.tasks import ClassificationTask

__all__ = ["interruption"]  # a fixture

# 1,300 samples, 512 of 520 in an epoch: 4 batches of 128
HARD = (
    *SMALL,
    "callbacks=[default,hard_samples]",
    "callbacks.throughput=null",
    "callbacks.hard_samples.share=0.4",
    "trainer.max_epochs=5",
    "trainer.log_every_n_steps=1",
    "data.batch_size=128",
    "test=false",
)


def trained(folder: Path, *words: str) -> Path:
    cfg = new_run(folder, *HARD, *words)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


def test_losses_are_noted_under_the_samples_that_had_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels and losses are compared through the epoch's order of samples."""
    noted: list[tuple[torch.Tensor, torch.Tensor]] = []
    shown: list[torch.Tensor] = []
    note, losses_of = Selection.note, ClassificationTask.sample_losses

    def noting(self: Selection, samples: torch.Tensor, losses: torch.Tensor) -> None:
        noted.append((samples, losses))
        note(self, samples, losses)

    def showing(self: Any, outputs: Any, batch: Any) -> torch.Tensor:
        shown.append(batch[1])
        found = losses_of(self, outputs, batch)
        assert torch.equal(found, F.cross_entropy(outputs, batch[1], reduction="none"))
        return found

    labels: list[torch.Tensor] = []
    made = ImageLoader.__init__

    def keeping(self: Any, shape: Any, own: torch.Tensor, **settings: Any) -> None:
        made(self, shape, own, **settings)
        if self.train:
            labels[:] = [own]

    monkeypatch.setattr(Selection, "note", noting)
    monkeypatch.setattr(ClassificationTask, "sample_losses", showing)
    monkeypatch.setattr(ImageLoader, "__init__", keeping)
    run_dir = trained(tmp_path, "task.label_smoothing=0.1")
    assert len(noted) == len(column(run_dir, "train/loss")) == 20
    for (samples, _), targets in zip(noted, shown, strict=True):
        assert torch.equal(labels[0][samples], targets)
    epochs = [torch.cat([samples for samples, _ in noted[at : at + 4]]) for at in range(0, 20, 4)]
    assert all(len(epoch.unique()) == 512 for epoch in epochs)
    latest, turns = torch.full((1300,), torch.inf), torch.zeros(1300)
    for samples, losses in noted[:12]:
        latest[samples], turns[samples] = losses, turns[samples] + 1
    assert int(turns.min()) == 1, "three epochs show each sample"
    hardest = set(latest.argsort(descending=True)[: round(0.7 * 512)].tolist())
    assert hardest <= set(epochs[3].tolist())
    state = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["hard_samples"]
    for samples, losses in noted[12:]:
        latest[samples] = losses
    assert torch.equal(state["losses"], latest)
    with open(run_dir / "hard_samples.csv", newline="") as file:
        listed = list(csv.DictReader(file))
    assert [int(row["sample"]) for row in listed] == latest.topk(1000).indices.tolist()
    for row in (listed[0], listed[-1]):
        number = int(row["sample"])
        assert float(row["loss"]) == pytest.approx(float(latest[number]), rel=1e-5)
        assert (int(row["label"]), row["file"]) == (int(labels[0][number]), "")
        assert int(row["turns"]) == int(state["turns"][number])


@pytest.mark.slow
@pytest.mark.law3
def test_a_death_changes_nothing(tmp_path: Path, interruption: Interruption) -> None:
    """Within an epoch whose order follows from losses; with several steps per call."""
    words = (
        *("model=resnet20", "model.net.depth=8", "model.net.width=4", "trainer.steps_per_call=3"),
        *("callbacks=[default,hard_samples,image_sizes]", "callbacks.image_sizes.scales=[0.5,0.5,1,0.75]"),
        "callbacks.checkpoint.every_n_train_steps=3",
    )
    alone = train_through(new_run(tmp_path / "alone", *HARD, *words), [], interruption)
    deaths = [("on_train_batch_start", 14)]
    again = train_through(new_run(tmp_path / "again", *HARD, *words), deaths, interruption)
    same(alone, again)
    states = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (alone, again)]
    one, other = (state["hard_samples"] for state in states)
    assert all(torch.equal(one[name], other[name]) for name in ("losses", "turns", "order"))


@pytest.mark.slow
def test_two_processes_choose_as_one(tmp_path: Path) -> None:
    one = trained(tmp_path / "one")
    succeeded(run(*HARD, "strategy=ddp", "trainer.devices=2", f"paths.log_dir={tmp_path / 'two'}", cwd=tmp_path))
    losses = [column(run_dir, "train/loss") for run_dir in (one, runs(tmp_path / "two")[-1])]
    assert len(losses[0]) == 20
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("callback", [HardSamples(), ImageSizes(scales=[0.5])])
def test_a_strategy_that_cuts_the_net_is_refused(callback: Any) -> None:
    data = SimpleNamespace(selects=True, channels=1, image_size=8)
    trainer: Any = SimpleNamespace(strategy=object.__new__(Pipeline), datamodule=data)
    with pytest.raises(UserError, match="needs a whole net, and Pipeline cuts it"):
        callback.setup(trainer, nn.Linear(2, 2), "fit")
