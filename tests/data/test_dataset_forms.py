"""data=dataset: samples that no net or loss accepts are refused before the first step."""

from typing import Any

import pytest
import torch
from data.test_dataset import module
from support.own_datasets import Odd
from torch.utils.data import Dataset

from lathe.data import DatasetDataModule
from lathe.data.order import IGNORE
from lathe.errors import UserError


@pytest.mark.parametrize(
    ("y", "got"),
    [(1.0, "float64 [2]"), ("cat", "a list of str"), (torch.zeros(3), "float32 [2, 3]")],
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


@pytest.mark.parametrize(
    "y", [True, *(torch.tensor(1, dtype=getattr(torch, kind)) for kind in ("bool", "uint8", "int16"))]
)
def test_whole_numbers_of_every_type_are_classes(y: Any) -> None:
    data = module(Odd(y=y), num_classes=2, batch_size=4)
    data.setup()
    for batch in (next(iter(data.train_dataloader())), next(iter(data.eval_loader("val")))):
        assert batch[1].dtype == torch.int64
        assert set(batch[1].tolist()) <= {1, IGNORE}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.float16])
@pytest.mark.parametrize("split", ["train", "val"])
def test_images_of_another_dtype_are_refused(dtype: torch.dtype, split: str) -> None:
    data = module(channels=1, **{"train": Odd(), split: Odd(torch.zeros(1, 4, 4, dtype=dtype))})
    with pytest.raises(UserError, match=rf"^data\.{split}: item .* expected float32: convert it"):
        data.setup()


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float64, "64-true"),
        (torch.float16, "16-mixed"),
        (torch.bfloat16, "bf16-true"),
        (torch.float16, "bf16-mixed"),
    ],
)
def test_images_of_another_width_are_for_a_run_of_that_precision(dtype: torch.dtype, precision: str) -> None:
    data = module(Odd(torch.zeros(1, 4, 4, dtype=dtype)), channels=1, batch_size=4)
    data.trainer.precision = precision  # type: ignore[union-attr,misc,assignment]
    data.setup()
    assert next(iter(data.train_dataloader()))[0].dtype == dtype


class Mixed(Dataset[Any]):
    """Float32 pixels except for one uint8 item; `wrap` makes the sample."""

    def __init__(self, odd: int, wrap: Any) -> None:
        self.odd, self.wrap, self.pixels = odd, wrap, torch.rand(20, 1, 4, 4)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        image = self.pixels[row]  # in the dataset's own memory
        return self.wrap((image * 255).byte() if row == self.odd else image, row % 2)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("odd", [0, 7, 19])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: (x, y),
        lambda x, y: (x.clone(), y),
        lambda x, y: (x.numpy(), y),
        lambda x, y: {"a": [x], "b": y},
    ],
)
def test_an_item_of_another_dtype_is_refused_wherever_it_comes(wrap: Any, odd: int, workers: int) -> None:
    whole, torn = Mixed(-1, wrap), Mixed(odd, wrap)
    told = r"item \d+ is .*, but item \d+ is .*, so they make no batch: "
    with pytest.raises(UserError, match=rf"^data\.train: {told}"):
        list(DatasetDataModule(torn, val=whole, test=whole, batch_size=10, num_workers=workers).train_dataloader())
    data = DatasetDataModule(whole, val=torn, test=whole, batch_size=10, num_workers=workers)
    with pytest.raises(UserError, match=rf"^data\.val: {told}"):
        list(data.val_dataloader())
    data = DatasetDataModule(whole, val=whole, test=whole, batch_size=10, num_workers=workers)
    assert [len(list(loader)) for loader in (data.train_dataloader(), data.val_dataloader())] == [2, 2]
