"""Splits are disjoint, of the exact sizes, stratified, and fixed by their own seed."""

from typing import Any

import numpy as np
import pytest

from lathe.data import Split
from lathe.data.splits import stratified_split
from lathe.errors import UserError


def test_split_is_a_partition_of_the_exact_sizes() -> None:
    labels = np.random.default_rng(0).integers(0, 7, 1003)
    rows = stratified_split(labels, {"val": 101, "test": 203}, seed=0)
    assert {name: len(r) for name, r in rows.items()} == {"val": 101, "test": 203, "train": 699}
    assert np.array_equal(np.sort(np.concatenate(list(rows.values()))), np.arange(1003))


def test_each_set_has_the_class_shares_of_the_whole() -> None:
    labels = np.repeat(np.arange(4), [400, 300, 200, 100])
    rows = stratified_split(labels, {"val": 100, "test": 200}, seed=3)
    for size, name in ((100, "val"), (200, "test"), (700, "train")):
        expected = size * np.array([0.4, 0.3, 0.2, 0.1])
        assert np.abs(np.bincount(labels[rows[name]], minlength=4) - expected).max() <= 1


@pytest.mark.parametrize("sizes", [{"val": 0}, {"val": 10}, {"val": 6, "test": 5}])
def test_sizes_that_leave_nothing_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"^val_size={sizes['val']}"):
        stratified_split(np.zeros(10, dtype=np.int64), sizes, seed=0)


def test_a_split_reads_its_own_rows() -> None:
    images = np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2)
    found, labels = Split(images, np.array([5, 6, 7]), np.array([2, 0])).read()
    assert np.array_equal(found, images[[2, 0]])
    assert labels.tolist() == [7, 5]


def test_only_the_split_seed_decides() -> None:
    labels = np.arange(300) % 10
    first, again, other = (stratified_split(labels, {"val": 50}, seed)["val"] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_lists_and_arrays_of_labels_are_split_equally() -> None:
    listed: Any = [0, 1] * 10
    rows = stratified_split(listed, {"val": 4}, 0)
    assert np.array_equal(rows["val"], stratified_split(np.array(listed), {"val": 4}, 0)["val"])
