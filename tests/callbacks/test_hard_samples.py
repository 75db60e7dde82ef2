"""Epochs of the samples with the largest losses: what is trained on, through deaths and on two processes."""

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import check as succeeded
from support.commands import run
from support.interruptions import NEVER, Interrupted, Interruption, interruption, same
from support.runs import SMALL, column, config, new_run, runs
from torch.nn import functional as F

import lathe.training.train
from lathe.config.composed import check
from lathe.data.loader import ImageLoader
from lathe.data.selection import Selection
from lathe.errors import UserError
from lathe.tasks import ClassificationTask

__all__ = ["interruption"]  # a fixture

# 1,300 samples of which an epoch takes 512 of 520: 4 batches of 128
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


@pytest.mark.parametrize("steps", ["1", "auto"])
def test_losses_are_noted_under_the_samples_that_had_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    """Each batch's losses come with its own rows of the epoch's order: labels and losses are looked up behind it."""
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
    run_dir = trained(tmp_path, f"trainer.steps_per_call={steps}", "task.label_smoothing=0.1")
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


@pytest.mark.law3
def test_a_death_changes_nothing(tmp_path: Path, interruption: Interruption) -> None:
    """Within an epoch, whose order losses have chosen, and at the end of one; with steps made together."""
    words = (
        *("model=resnet20", "model.net.depth=8", "model.net.width=4", "trainer.steps_per_call=3"),
        *("callbacks=[default,hard_samples,image_sizes]", "callbacks.image_sizes.scales=[0.5,0.5,1,0.75]"),
        "callbacks.checkpoint.every_n_train_steps=3",
    )

    def train(hook: str, step: int) -> Path:
        cfg = new_run(tmp_path / f"{hook}{step}", *HARD, *words)
        interruption.hook, interruption.step = hook, step
        if step < NEVER:
            with pytest.raises(Interrupted):
                lathe.training.train.train(cfg)
            interruption.step = NEVER
        lathe.training.train.train(cfg)
        return Path(cfg["paths"]["run_dir"])

    alone = train("on_train_batch_start", NEVER)
    for hook, step in (("on_train_batch_start", 14), ("on_train_epoch_end", 16)):
        again = train(hook, step)
        same(alone, again)
        states = [
            torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["hard_samples"] for run in (alone, again)
        ]
        assert all(torch.equal(states[0][name], states[1][name]) for name in ("losses", "turns", "order"))


def test_two_processes_choose_as_one(tmp_path: Path) -> None:
    one = trained(tmp_path / "one")
    succeeded(run(*HARD, "strategy=ddp", "trainer.devices=2", f"paths.log_dir={tmp_path / 'two'}", cwd=tmp_path))
    losses = [column(run_dir, "train/loss") for run_dir in (one, runs(tmp_path / "two")[-1])]
    assert len(losses[0]) == 20
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("data=synthetic_tokens", "task=language_modelling", "model=gpt_nano"),
            "TokenDataModule can't be chosen by number",
        ),
        (("trainer.overfit_batches=2",), "trains on the same few samples again and again"),
        (
            ("callbacks.hard_samples.share=0.01",),
            "cannot be filled from the 13 of 1300 training samples",
        ),
    ],
)
def test_what_can_not_be_chosen_is_told(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    cfg = new_run(tmp_path, *(word for word in HARD if "=" in word and not word.startswith("model.")), *words)
    with pytest.raises(UserError, match=sentence):
        lathe.training.train.train(cfg)


def test_a_run_that_ends_before_losses_decide_says_so(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="ends after 8 batches of 128, before each of 1300 samples was trained on once"
    ):
        trained(tmp_path / "short", "trainer.max_epochs=2")
    for words in (("trainer.max_steps=10",), ("trainer.limit_train_batches=2",)):
        with pytest.warns(UserWarning, match="ends after 10 batches of 128, before each"):
            trained(tmp_path / "cut", *words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(tmp_path / "tried", "trainer.fast_dev_run=true")


def test_a_checkpoint_without_losses_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = trained(tmp_path / "plain", "~callbacks.hard_samples")
    assert "an epoch takes" not in capsys.readouterr().out
    with pytest.warns(UserWarning, match="has no losses of samples: all count as unseen"):
        trained(tmp_path / "on", f"ckpt_path={plain}", "ckpt_mode=trainer", "trainer.max_epochs=9")
    assert "hard_samples: an epoch takes 512 of 1300 training samples.\n" in capsys.readouterr().out


def test_combinations_are_told_before_the_work() -> None:
    words = ("callbacks=[default,hard_samples,image_sizes]", "model=resnet20")
    assert check(config(*words)) == []
    told = check(config(*words, "compile=default", "compile.scope=step"))
    assert any(
        one.startswith("callbacks.hard_samples reads the logits of each step, which compile.scope") for one in told
    )
    assert any(one.startswith("callbacks.image_sizes: compiled code is made for one size") for one in told)
    told = check(config(*words, "strategy=pipeline"))
    assert any("which strategy Pipeline has on no process" in one for one in told)
    assert any("strategy Pipeline cuts a net for one size of images" in one for one in told)
    (mixed,) = check(config(*words, "data.augment.mixup=0.2"))
    assert mixed.startswith(
        "data.augment.mixup=0.2 mixes samples, and callbacks.hard_samples chooses by the loss of each"
    )
    (whole,) = check(config(*words, "callbacks.image_sizes.scales=[1,1]"))
    assert whole.startswith("callbacks.image_sizes.scales=[1, 1] makes no image smaller")
