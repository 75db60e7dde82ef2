"""Each file of configs/data composes, builds, and says on every line what its key means."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lathe.data import Cifar, ImageDataModule
from lathe.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs" / "data"
IMAGES = ["digits", "cifar10", "cifar100", "fashion_mnist", "synthetic", "shards"]
NAMES = [*IMAGES, "dataset", "image_folder", "tokens", "synthetic_tokens", "documents", "document_files"]


def build(name: str, folder: Path, **overrides: object) -> ImageDataModule:
    config = OmegaConf.create(
        {"data": OmegaConf.load(CONFIGS / f"{name}.yaml"), "seed": 0, "paths": {"data_dir": str(folder)}}
    )
    for key, value in overrides.items():
        OmegaConf.update(config, f"data.{key}", value)
    data = instantiate(config.data)
    assert isinstance(data, ImageDataModule)
    return data


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_batches_have_the_declared_facts(name: str, tmp_path: Path) -> None:
    data = build(name, tmp_path)
    data.prepare_data()
    data.setup()
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == (data.batch_size, data.channels, data.image_size, data.image_size)
    assert y.max() < data.num_classes
    whole = torch.cat([images[labels != -100] for images, labels in data.eval_loader("train")])
    assert abs(whole.mean()) < 0.01
    assert abs(whole.std() - 1) < 0.01


def test_digits_follow_the_declared_size(tmp_path: Path) -> None:
    data = build("digits", tmp_path, image_size=16)
    data.setup()
    assert next(iter(data.val_dataloader()))[0].shape[-2:] == (16, 16)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_reads_from_the_data_folder(name: str, tmp_path: Path) -> None:
    data = build(name, tmp_path, **{"source.download": False})
    assert isinstance(data.source, Cifar)
    assert data.source.num_classes == data.num_classes
    with pytest.raises(UserError, match=str(tmp_path)):
        data.prepare_data()
