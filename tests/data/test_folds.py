"""data.folds and data.fold: each sample validates once, classes are divided equally, test is unchanged."""

from typing import Any

import numpy as np
import pytest
import torch
from support.own_datasets import Pictures
from support.runs import config
from torch.utils.data import TensorDataset

from lathe.data import DatasetDataModule, Split, Splits
from lathe.data.folds import fold_rows, refold, share_rows
from lathe.errors import UserError
from lathe.runs.build import make_data


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_each_sample_validates_once_and_classes_are_equal(folds: int) -> None:
    labels = np.array([0] * 40 + [1] * 11 + [2] * 5)[np.random.default_rng(0).permutation(56)]
    parts = [fold_rows(labels, folds, fold, seed=0) for fold in range(folds)]
    assert np.array_equal(np.sort(np.concatenate([val for _, val in parts])), np.arange(56))
    for train, val in parts:
        assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(56))
        assert abs(len(val) - 56 / folds) < 1
        assert np.all(np.abs(np.bincount(labels[val], minlength=3) - np.array([40, 11, 5]) / folds) < 1)
    assert not np.array_equal(parts[0][1], fold_rows(labels, folds, 0, seed=1)[1])


def test_digits_in_five_folds() -> None:
    cfg = config("data.folds=5", "data.fold=0")
    seen, tests = [], []
    for fold in range(5):
        data = make_data({**cfg, "data": {**cfg["data"], "fold": fold}})
        data.setup()
        assert str(data) == "ImageDataModule(train: 1200, val: 300, test: 297)"
        seen.append(torch.cat([x for x, y in data.eval_loader("val")])[:300])
        tests.append(torch.cat([x for x, y in data.eval_loader("test")]))
    plain = make_data(config())
    assert len(torch.cat(seen)) == 1500
    both = torch.cat([x[y != -100] for name in ("train", "val") for x, y in plain.eval_loader(name)])
    assert torch.allclose(torch.cat(seen).double().sum(0), both.double().sum(0))
    first = torch.cat([x for x, y in plain.eval_loader("test")])
    assert all(torch.equal(images, first) for images in tests)


def test_a_dataset_in_folds() -> None:
    y = torch.tensor([0] * 80 + [1] * 20)
    given = TensorDataset(torch.arange(100.0)[:, None], y)
    seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": []}
    for fold in range(3):
        data = DatasetDataModule(given, num_classes=2, folds=3, fold=fold, batch_size=10)
        for name, rows in seen.items():
            rows.append(torch.cat([x for x, _ in data.eval_loader(name)]).flatten().long().tolist())
    assert seen["test"][0] == seen["test"][1] == seen["test"][2]
    assert sorted(sum(seen["val"], seen["test"][0])) == list(range(100))
    assert [int(y[rows].sum()) for rows in seen["val"]] == [6, 6, 6]
    assert all(not set(train) & set(val) for train, val in zip(seen["train"], seen["val"], strict=True))
    whole = DatasetDataModule(given, test=Pictures(10), folds=2, fold=1)
    whole.setup()
    assert str(whole) == "DatasetDataModule(train: 50, val: 50, test: 10)"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"folds": 5}, r"data\.folds=5 needs data\.fold"),
        ({"folds": 5, "fold": 5}, r"data\.fold=5 is none of data\.folds=5"),
        ({"folds": 200, "fold": 0}, r"data\.folds=200: class "),
    ],
)
def test_folds_that_cannot_be_cut_are_refused(settings: dict[str, Any], words: str) -> None:
    cfg = config()
    with pytest.raises(UserError, match=words):
        make_data({**cfg, "data": {**cfg["data"], **settings}}).setup()


def test_shards_cannot_be_cut_into_folds() -> None:
    images: Any = [np.zeros((1, 2, 2), np.uint8)] * 4
    split = Split(images, np.arange(4), np.arange(4))
    with pytest.raises(UserError, match=r"^data\.folds=2 cannot divide images that are streamed from shards"):
        refold(Splits(split, split, split), 2, 0, 0)


def test_a_share_has_all_classes_and_a_smaller_is_part_of_a_larger() -> None:
    labels = np.array([0] * 40 + [1] * 20 + [2] * 10)[np.random.default_rng(0).permutation(70)]
    shares = [share_rows(labels, share, seed=0) for share in (0.1, 0.5, 1.0)]
    assert [len(rows) for rows in shares] == [7, 35, 70]
    assert np.bincount(labels[shares[0]]).tolist() == [4, 2, 1]
    assert np.bincount(labels[shares[1]]).tolist() == [20, 10, 5]
    assert set(shares[0]) < set(shares[1])
    assert not np.array_equal(shares[0], share_rows(labels, 0.1, seed=1))


def test_a_share_of_a_dataset() -> None:
    def train(share: float) -> Any:
        dataset = TensorDataset(torch.arange(100.0).reshape(100, 1, 1, 1), torch.arange(100) % 2)
        data = DatasetDataModule(dataset, num_classes=2, share=share, batch_size=4)
        data.setup()
        assert str(data).endswith("val: 10, test: 10)")
        return {int(x) for batch in data.train_dataloader() for x in batch[0].flatten()}

    assert len(train(1.0)) == 80
    assert len(train(0.5)) == 40
    assert train(0.25) < train(1.0)
