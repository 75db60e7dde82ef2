"""data=dataset: what no net or loss takes is told by the first samples, before a step is made."""

from typing import Any

import numpy as np
import pytest
import torch
from data.test_dataset import module
from support.own_datasets import Odd

from lathe.errors import UserError


@pytest.mark.parametrize(
    ("y", "got"),
    [
        (1.0, "float64 [2]"),
        ("cat", "a list of str"),
        (torch.tensor([1]), "int64 [2, 1]"),
        (torch.zeros(3), "float32 [2, 3]"),
        ((1, 2), "a list of int64 [2]"),
    ],
)
def test_targets_that_are_no_classes(y: Any, got: str) -> None:
    data = module(Odd(y=y), num_classes=2)
    with pytest.raises(UserError) as told:
        data.setup()
    assert str(told.value).startswith(
        f"data.train: targets of a batch are {got}, expected a whole number from 0 to 1, "
    )


@pytest.mark.parametrize(
    ("y", "classes"), [(torch.tensor([0.0, 1.0]), 2), (torch.zeros(3).long(), 3), (torch.zeros(4, 4).long(), 2)]
)
def test_targets_that_are_scores_or_pictures_of_classes(y: torch.Tensor, classes: int) -> None:
    data = module(Odd(y=y), num_classes=classes, batch_size=4)
    data.setup()
    _, targets = next(iter(data.train_dataloader()))[:2]
    assert (targets.shape, targets.dtype) == ((4, *y.shape), y.dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float64])
@pytest.mark.parametrize("split", ["train", "val"])
def test_images_that_are_no_floats(dtype: torch.dtype, split: str) -> None:
    data = module(channels=1, **{"train": Odd(), split: Odd(torch.zeros(1, 4, 4, dtype=dtype))})
    with pytest.raises(UserError) as told:
        data.setup()
    sentence, way = str(told.value), f"by data.{'eval_' * (split == 'val')}transform, pixels / 255 less data.mean over"
    assert sentence.startswith(f"data.{split}: item ")
    assert f"is an image of {str(dtype).removeprefix('torch.')}, expected float32: convert it in the" in sentence
    assert way in sentence


def test_double_images_are_for_a_run_in_double_precision() -> None:
    data = module(Odd(np.zeros((1, 4, 4))), channels=1, batch_size=4)
    data.trainer.precision = "64-true"  # type: ignore[union-attr,misc]
    data.setup()
    assert next(iter(data.train_dataloader()))[0].dtype == torch.float64
