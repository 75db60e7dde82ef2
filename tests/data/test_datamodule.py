"""The data module under a Trainer: declared facts, replicas, resume, overfitting."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lathe.data import Augment, ImageDataModule, ResidentLoader, StreamLoader
from lathe.data.splits import Split, Splits
from lathe.errors import UserError


class Tiny:
    """34 images of one colour each: image i is filled with i."""

    num_classes = 2

    def prepare(self) -> None:
        self.prepared = True

    def load(self) -> Splits:
        images = np.broadcast_to(np.arange(34, dtype=np.uint8)[:, None, None, None], (34, 1, 4, 4)).copy()
        labels = np.arange(34) % 2
        return Splits(*(Split(images, labels, rows) for rows in (np.arange(20), np.arange(20, 27), np.arange(27, 34))))


def module(**settings: Any) -> ImageDataModule:
    facts = {"num_classes": 2, "channels": 1, "image_size": 4, "mean": [0.0], "std": [1 / 255], "batch_size": 4}
    return ImageDataModule(Tiny(), **(facts | settings))


class Recorder(LightningModule):
    """Records the images of each training and validation batch; a checkpoint carries the records."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.validated: list[int] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        self.seen.append(batch[0][:, 0, 0, 0].round().int().tolist())
        return self.layer(batch[0][:, 0, 0, :1]).mean() * 0

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.validated += batch[0][batch[1] != -100][:, 0, 0, 0].round().int().tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, **settings: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(default_root_dir=folder, accelerator="cpu", devices=1, num_sanity_val_steps=0, **(quiet | settings))


def test_split_loaders_hold_their_samples_once_unaugmented() -> None:
    data = module(augment=Augment(crop=1, flip="random"))
    data.prepare_data()
    data.setup()
    for name, expected in (("train", range(20)), ("val", range(20, 27)), ("test", range(27, 34))):
        found = [int(x[0, 0, 0].round()) for images, labels in data.eval_loader(name) for x in images[labels != -100]]
        assert found == list(expected)
    assert data.source.prepared
    with pytest.raises(UserError, match="split=valid"):
        data.eval_loader("valid")


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"batch_size": 21}, r"data\.batch_size=21 .*20 training samples"),
        ({"normalize": "folded", "loader": "workers"}, r"data\.normalize=folded"),
    ],
)
def test_wrong_facts_are_named(wrong: dict[str, Any], names: str) -> None:
    with pytest.raises(UserError, match=names):
        module(**wrong).train_dataloader()


@pytest.mark.parametrize("kind", ["resident", "workers"])
def test_a_fit_shows_new_orders_and_validates_each_sample_once(tmp_path: Path, kind: str) -> None:
    net, data = Recorder(), module(loader=kind, eval_batch_size=5)
    run = trainer(tmp_path, max_epochs=3)
    run.fit(net, datamodule=data)
    epochs = [list(chain(*net.seen[i : i + 5])) for i in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert net.validated == list(range(20, 27)) * 3
    assert isinstance(run.train_dataloader, ResidentLoader if kind == "resident" else StreamLoader)


def test_reloading_loaders_continues_the_epochs_and_a_new_fit_starts_again(tmp_path: Path) -> None:
    plain, reloaded, data = Recorder(), Recorder(), module()
    trainer(tmp_path, max_epochs=3).fit(plain, datamodule=data)
    trainer(tmp_path, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(reloaded, datamodule=data)
    assert plain.seen == reloaded.seen


def test_overfitting_repeats_the_same_unaugmented_images(tmp_path: Path) -> None:
    net = Recorder()
    trainer(tmp_path, max_epochs=3, overfit_batches=2).fit(net, datamodule=module(augment=Augment(crop=1)))
    assert net.seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


def replica(rank: int, world: int, **settings: Any) -> ImageDataModule:
    """Return the data module for one of `world` data replicas, among more processes."""
    data = module(**settings)
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"), distributed_sampler_kwargs={"num_replicas": world, "rank": rank}
    )
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=strategy, world_size=8, global_rank=7, overfit_batches=0.0, limit_train_batches=1.0
    )
    return data


def test_batch_sizes_that_do_not_fit_the_devices_name_both_keys() -> None:
    with pytest.raises(UserError, match=r"data\.batch_size=4 .* 3 replicas that trainer\.devices makes"):
        replica(0, 3).train_dataloader()
    with pytest.raises(UserError, match=r"data\.eval_batch_size=2 .* 3 replicas that trainer\.devices makes"):
        replica(0, 3, eval_batch_size=2).val_dataloader()
    assert len(replica(0, 3).val_dataloader()) == 3  # 7 samples, 1 a rank at a time
