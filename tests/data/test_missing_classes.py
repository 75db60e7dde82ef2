"""Warnings about classes that are missing in a split."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pictures import pictures
from torch.utils.data import TensorDataset

from lathe.data import DatasetDataModule, ImageFolder


def module(train: Any, **settings: Any) -> DatasetDataModule:
    return DatasetDataModule(train, **{"batch_size": 16, "seed": 3, **settings})


@pytest.mark.parametrize("names", [None, ["cat", "dog", "newt"]])
def test_of_a_dataset(names: list[str] | None) -> None:
    x, y = torch.randn(60, 1, 4, 4), torch.tensor([0, 1] * 29 + [2, 2])
    newt = "newt" if names else "class 2"
    with pytest.warns(UserWarning, match=rf"^data\.train: val has none of {newt}, and test has none of {newt}, so"):
        module(TensorDataset(x, y), num_classes=3, class_names=names).setup()
    values = module(TensorDataset(x, y))  # integers that need not be classes
    values.setup()
    assert str(values).startswith("DatasetDataModule(train: 48")


def test_of_a_folder(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", {"cat": 18, "dog": 18, "newt": 1})
    source = ImageFolder(str(folder), str(tmp_path / "data"))
    with pytest.warns(UserWarning, match=r"photos: val has none of newt, and test has none of newt, so its metrics"):
        source.prepare()
    for number in range(1, 10):
        shutil.copy(folder / "newt" / "000.png", folder / "newt" / f"{number:03}.png")
    whole = ImageFolder(str(folder), str(tmp_path / "data"))
    whole.prepare()  # without a warning
    held = {split: getattr(whole.load(), split) for split in ("train", "val", "test")}
    assert [set(own.labels[own.rows].tolist()) for own in held.values()] == [{0, 1, 2}] * 3
