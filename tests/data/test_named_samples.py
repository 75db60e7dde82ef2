"""A sample that can't be read or is not finite is reported by its index."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import SMALL, new_run

from lathe.data import DatasetDataModule
from lathe.errors import UserError
from lathe.launch.error_reporting import explain_user_code
from lathe.training.train import train

BAD = 37


class Numbered:
    """Samples that equal their index; `odd` determines the one at `BAD`."""

    def __init__(self, n: int = 60, odd: str = "") -> None:
        self.n, self.odd, self.targets = n, odd, [row % 2 for row in range(n)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> Any:
        if row == BAD and self.odd == "raises":
            raise OSError("can't be decoded")
        x = torch.full((1, 4, 4), float(row))
        if row == BAD and self.odd == "infinite":
            x[0, 1, 2] = torch.inf
        return x, row % 2


class Halves:
    def __call__(self, x: Any) -> Any:
        if int(x[0, 0, 0]) == BAD:
            raise ValueError("no half of it")
        return x / 2


class Drawn(Numbered):
    def __getitem__(self, row: int) -> Any:
        torch.rand(())
        return super().__getitem__(row)


def module(dataset: Any, rank: int = 0, replicas: int = 1, **settings: Any) -> DatasetDataModule:
    data = DatasetDataModule(dataset, **{"batch_size": 12, "seed": 3, "val_share": 0.2, **settings})  # type: ignore[arg-type]
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": replicas, "rank": rank})
    strategy.root_device = torch.device("cpu")
    data.trainer = SimpleNamespace(strategy=strategy, limit_train_batches=1.0, overfit_batches=0)  # type: ignore[assignment]
    return data


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", [Numbered, Drawn])
def test_the_numbers_of_each_batch_are_those_of_its_samples(kind: Any, replicas: int) -> None:
    for rank in range(replicas):
        data = module(kind(), rank, replicas)
        data.setup()
        loader = data.train_dataloader()
        loader.load_state_dict({"epoch": 1, "batch": 1})  # inside an epoch
        for split, of, passes in (("train", loader, 2), ("val", data.val_dataloader(), 2)):
            for once in range(passes):
                for at, (x, _) in enumerate(of, start=1 if split == "train" and not once else 0):
                    names = [data.name_of(split, number) for number in of.numbers(at)]
                    assert names == [f"data.train: item {int(one)}" for one in x[:, 0, 0, 0]]


def batches(data: DatasetDataModule, split: str) -> Iterator[Any]:
    return iter(data.train_dataloader() if split == "train" else data.val_dataloader())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("split", "data"),
    [
        ("train", {"dataset": Numbered(odd="raises")}),
        ("train", {"dataset": Drawn(odd="raises")}),
        ("train", {"dataset": Numbered(), "transform": Halves()}),
        ("val", {"dataset": Numbered(), "val": Numbered(odd="raises")}),
    ],
)
def test_an_item_that_can_not_be_read_is_named(split: str, data: dict[str, Any], workers: int) -> None:
    with pytest.raises((OSError, ValueError)) as caught:
        list(batches(module(**data, num_workers=workers, batch_size=1, share=1.0, test_share=0.02), split))
    lines = str(explain_user_code(caught.value)).splitlines()
    assert lines[0].startswith(f"{type(caught.value).__name__}: ")
    assert f"while reading data.{split}: item {BAD}" in lines


@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_is_not_finite_is_named_where_it_stops_the_run(tmp_path: Any, workers: int) -> None:
    kind = f"{__name__}.Numbered"
    words = (f"data.train={{_target_: {kind}, odd: infinite}}", f"data.val={{_target_: {kind}, n: 20}}")
    own = (
        "data=dataset",
        *words,
        f"data.test={{_target_: {kind}, n: 20}}",
        f"data.num_workers={workers}",
        "data.num_classes=2",
    )
    shape = ("data.channels=1", "data.image_size=4", "data.batch_size=60", "trainer.log_every_n_steps=1")
    with pytest.raises(UserError, match=rf"holds inf \(batch\[0\], in row \d+ of 60: data\.train: item {BAD}\)"):
        train(new_run(tmp_path, *own, *SMALL, *shape))
