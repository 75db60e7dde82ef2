"""hard_samples over a user's Dataset: what is read, with and without workers, through deaths, and what is refused."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interruptions import NEVER, Interrupted, Interruption, interruption, same
from support.own_datasets import Pictures
from support.runs import SMALL, new_run

import lathe.training.train
from lathe.data.selection import Selection
from lathe.errors import UserError

__all__ = ["interruption"]  # a fixture

# 160 samples to train on, of which an epoch takes 64: 4 batches of 16
OWN = (
    *(word for word in SMALL if not word.startswith("data.")),
    "callbacks=[default,hard_samples]",
    "callbacks.throughput=null",
    "callbacks.hard_samples.share=0.4",
    "trainer.max_epochs=5",
    "trainer.log_every_n_steps=1",
    "data=dataset",
    "data.num_classes=2",
    "data.channels=1",
    "data.image_size=4",
    "data.batch_size=16",
    "test=false",
)


def words_of(kind: str, **options: Any) -> tuple[str, ...]:
    given = "".join(f", {key}: {value}" for key, value in options.items())
    return (*OWN, f"data.train={{_target_: {kind}{given}}}")


@pytest.mark.parametrize("more", [(), ("data.num_workers=1", "data.persistent_workers=true")])
def test_an_epoch_reads_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    noted: list[torch.Tensor] = []
    note = Selection.note

    def noting(self: Selection, samples: torch.Tensor, losses: torch.Tensor) -> None:
        noted.append(samples)
        note(self, samples, losses)

    monkeypatch.setattr(Selection, "note", noting)
    words = words_of("callbacks.test_hard_samples_of_ones_own.Seen", n=200, folder=tmp_path)
    cfg = new_run(tmp_path, *words, *more)
    lathe.training.train.train(cfg)
    run_dir = Path(cfg["paths"]["run_dir"])
    assert len(noted) == 20
    trained = torch.cat(noted)
    assert all(len(trained[at : at + 64].unique()) == 64 for at in range(0, 320, 64))
    turns = trained.bincount(minlength=160)
    assert int(turns.min()) >= 1, "three epochs show each sample"
    with open(run_dir / "hard_samples.csv", newline="") as file:
        listed = list(csv.DictReader(file))
    assert len(listed) == 160
    read = torch.tensor([int(line) for line in (tmp_path / "read").read_text().split()]).bincount(minlength=200)
    for row in listed:
        item = int(row["file"].removeprefix("data.train: item "))
        assert int(row["label"]) == item % 2
        assert int(row["turns"]) == int(turns[int(row["sample"])])
        assert int(read[item]) >= int(row["turns"])  # and once more where a split is looked at


class Seen(Pictures):
    """Writes down what is read of it, in whatever process."""

    def __init__(self, n: int, folder: str) -> None:
        super().__init__(n)
        self.file = Path(folder) / "read"

    def __getitem__(self, row: int) -> Any:
        with open(self.file, "a") as file:
            file.write(f"{row}\n")
        return super().__getitem__(row)


@pytest.mark.law3
@pytest.mark.filterwarnings("ignore:data.train. Drawing has no labels at hand:UserWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_death_changes_nothing(tmp_path: Path, interruption: Interruption, workers: int) -> None:
    words = (*words_of("support.own_datasets.Drawing", n=200, labels_at_hand="false"), f"data.num_workers={workers}")

    def train(name: str, step: int) -> Path:
        cfg = new_run(tmp_path / name, *words, "callbacks.checkpoint.every_n_train_steps=3")
        interruption.hook, interruption.step = "on_train_batch_start", step
        if step < NEVER:
            with pytest.raises(Interrupted):
                lathe.training.train.train(cfg)
            interruption.step = NEVER
        lathe.training.train.train(cfg)
        return Path(cfg["paths"]["run_dir"])

    alone, again = train("alone", NEVER), train("again", 14)
    same(alone, again)
    tables = [(run / "hard_samples.csv").read_text() for run in (alone, again)]
    assert tables[0] == tables[1]
    assert ",," in tables[0]  # no labels are at hand


def halved(samples: list[Any]) -> Any:
    """Every other sample of a batch."""
    return torch.utils.data.default_collate(samples[::2])


def blended(samples: list[Any]) -> Any:
    """Each sample half with its neighbour."""
    x, y = torch.utils.data.default_collate(samples)
    shares = torch.nn.functional.one_hot(y, 2).float()
    return (x + x.flip(0)) / 2, (shares + shares.flip(0)) / 2


@pytest.mark.parametrize(
    ("collate", "told"),
    [("halved", r"a batch of 16 samples has targets of \(8,\)"), ("blended", r"has targets of \(16, 2\) \(float32\)")],
)
def test_samples_that_a_batch_mixes_or_leaves_out_are_refused(tmp_path: Path, collate: str, told: str) -> None:
    own = f"data.collate_fn={{_target_: callbacks.test_hard_samples_of_ones_own.{collate}, _partial_: true}}"
    cfg = new_run(tmp_path, *words_of("support.own_datasets.Pictures", n=200), own)
    with pytest.raises(UserError, match=told):
        lathe.training.train.train(cfg)


def test_a_stream_is_refused(tmp_path: Path) -> None:
    splits = [f"data.{name}={{_target_: support.own_datasets.Pictures, n: 20}}" for name in ("val", "test")]
    cfg = new_run(tmp_path, *words_of("support.own_datasets.Flow", n=200), "data.samples=160", *splits)
    with pytest.raises(UserError, match=r"DatasetDataModule can't be chosen by number: .* data=dataset with a __len__"):
        lathe.training.train.train(cfg)
