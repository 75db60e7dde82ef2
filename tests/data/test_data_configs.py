"""Files of configs/data build loaders whose batches match the declared facts."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lathe.data import ImageDataModule

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


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
