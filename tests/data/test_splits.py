"""Splits are disjoint, of the exact sizes, stratified, and fixed by their own seed."""

from typing import Any

import numpy as np
import pytest
import torch
from support.own_datasets import Pictures
from support.runs import config
from torch.utils.data import TensorDataset

from lathe.data import DatasetDataModule, ImageDataModule
from lathe.data.splits import Split, Splits, load_splits, share_rows, stratified_split
from lathe.data.tokens import TokenDataModule
from lathe.errors import UserError
from lathe.runs.build import make_data


def test_split_is_a_partition_of_the_exact_sizes() -> None:
    labels = np.random.default_rng(0).integers(0, 7, 1003)
    rows = stratified_split(labels, {"val": 101, "test": 203}, seed=0)
    assert {name: len(r) for name, r in rows.items()} == {"val": 101, "test": 203, "train": 699}
    assert np.array_equal(np.sort(np.concatenate(list(rows.values()))), np.arange(1003))


# data.folds and data.fold: each sample validates once, classes are divided equally, test is unchanged.


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


# The arrays of a user's source are checked once.


IMAGES, LABELS = np.zeros((30, 1, 8, 8), np.uint8), np.arange(30) % 3
FACTS = {"num_classes": 3, "channels": 1, "image_size": 8}
ROWS = {"train": np.arange(20), "val": np.arange(20, 25), "test": np.arange(25, 30)}


def splits(name: str = "train", **changed: Any) -> Splits:
    """Three splits of 30 grey images, one of them changed."""
    parts = {key: {"images": IMAGES, "labels": LABELS, "rows": rows} for key, rows in ROWS.items()}
    parts[name] |= changed
    return Splits(**{key: Split(**part) for key, part in parts.items()})


class Given:
    """A source that returns given splits."""

    num_classes: Any = 3

    def __init__(self, given: Any = None) -> None:
        self.given = given

    def prepare(self) -> None:
        pass

    def load(self) -> Any:
        return self.given() if callable(self.given) else self.given


def refused(given: Any, **facts: int) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_splits(Given(given), FACTS | facts)
    return list(caught.value.args)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"images": IMAGES / 255}, "the train split's images are float64 [30, 1, 8, 8], expected uint8 [m, channels, "),
        ({"labels": LABELS + 1}, "the train split's labels go from 1 to 3, expected 0 to 2."),
        ({"rows": np.arange(0)}, "the train split has no rows, expected some to train on."),
        ({"rows": np.arange(22)}, "the train and val splits share 2 images, expected none: divide them by rows."),
    ],
)
def test_wrong_content_is_named(changed: dict[str, Any], sentence: str) -> None:
    (said,) = refused(splits(**changed))
    assert said.startswith(f"data.source: {sentence}")


def test_several_wrong_facts_are_reported_together() -> None:
    assert refused(splits(), channels=3, image_size=32) == [
        "data.channels=3 is not what the source Given has: set data.channels=1.",
        "data.image_size=32 is not what the source Given has: set data.image_size=8.",
    ]


@pytest.mark.parametrize("name", ["val", "test"])
def test_an_empty_split_warns(name: str) -> None:
    with pytest.warns(UserWarning, match=f"^data.source: the {name} split has no samples, so nothing can be measured"):
        load_splits(Given(splits(name, rows=np.arange(0))), FACTS)


def test_a_class_that_is_not_a_source_is_refused_before_it_is_used() -> None:
    with pytest.raises(UserError, match=r"^data\.source: object has no num_classes and no prepare and no load"):
        ImageDataModule(object(), **FACTS, mean=[0.0], std=[1.0], batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^data\.source: Given has no vocab_size"):
        TokenDataModule(Given(), 3, 4, 2)  # type: ignore[arg-type]


def broken() -> Splits:
    np.load("no such file.npy")
    raise AssertionError


def test_what_load_raises_is_one_sentence_with_its_line() -> None:
    line = broken.__code__.co_firstlineno + 1
    (sentence,) = refused(broken)
    assert sentence.startswith("data.source can't be loaded: FileNotFoundError: ")
    assert sentence.endswith(f"no such file.npy' ({__file__}:{line})")
