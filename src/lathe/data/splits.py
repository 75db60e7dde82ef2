"""Image sources: three splits of uint8 arrays, their checks, stratified splitting, folds and shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Protocol

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from lathe.config.class_names import SPLITS as SPLITS
from lathe.data.checks import class_name, form, using
from lathe.errors import ArgumentError, UserError, refuse

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
KEY = "data.source"


@dataclass(frozen=True)
class Split:
    """Some rows of an array of images.

    `images` [m, channels, height, width] may be memory-mapped and shared by splits; `labels` [m]; `rows` [n] are the
    split's rows, and a sample's number is its place in `rows`. `names` [m] are display names, such as files, or None.
    """

    images: Images
    labels: Labels
    rows: Labels
    names: Sequence[str] | None = None

    @classmethod
    def whole(cls, images: Images, labels: Labels) -> "Split":
        """Return a split of every row, in order."""
        return cls(images, labels, np.arange(len(labels)))

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, number: int) -> str | None:
        """Return a sample's name, with undecodable bytes replaced, or None."""
        if self.names is None:
            return None
        return self.names[int(self.rows[number])].encode(errors="surrogateescape").decode(errors="replace")

    def read(self) -> tuple[Images, Labels]:
        """Return this split in memory: images [n, channels, height, width] and labels [n]."""
        return np.ascontiguousarray(self.images[self.rows]), self.labels[self.rows]


@dataclass(frozen=True)
class Splits:
    """Training data, validation data that choose an epoch, and test data that are used once."""

    train: Split
    val: Split
    test: Split


class Source(Protocol):
    """Protocol of a source of images; no base class is needed."""

    @property
    def num_classes(self) -> int: ...

    def prepare(self) -> None:
        """Create the data on disk if missing. Runs in one process per machine, before `load`."""
        ...

    def load(self) -> Splits:
        """Open the data. Runs in every process; must return equal arrays in each."""
        ...


class Statistics:
    """Mean and standard deviation of each channel, pixels on a scale from 0 to 1."""

    def __init__(self) -> None:
        self._n, self._total, self._squares = 0, np.zeros(1), np.zeros(1)

    def add(self, images: Images) -> None:
        """Add the pixels of images [n, channels, height, width]."""
        pixels = images.astype(np.float64) / 255
        self._n += pixels.size // pixels.shape[1]
        self._total = self._total + pixels.sum((0, 2, 3))
        self._squares = self._squares + (pixels**2).sum((0, 2, 3))

    def facts(self) -> dict[str, list[float]]:
        """Return {"mean", "std"} of each channel, rounded to four digits."""
        mean = self._total / self._n
        std = np.sqrt(np.maximum(self._squares / self._n - mean**2, 0))
        return {"mean": mean.round(4).tolist(), "std": std.round(4).tolist()}


def stratified_order(labels: Labels, seed: int) -> Labels:
    """Return an order in which every contiguous piece has nearly the class shares of the whole; int64 [n].

    Samples are shuffled within their class and sorted by their relative place in it, so that pieces of any exact size
    can be cut.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    shuffled = rng.permutation(len(labels))
    position = np.empty(len(labels))
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        position[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return np.argsort(position, kind="stable").astype(np.int64)


def stratified_split(labels: Labels, sizes: dict[str, int], seed: int) -> dict[str, Labels]:
    """Return rows of sets of the given sizes, and of the rest as "train", in ascending order."""
    labels = np.asarray(labels)
    if min(sizes.values(), default=1) < 1 or sum(sizes.values()) >= len(labels):
        requested = ", ".join(f"{name}_size={size}" for name, size in sizes.items())
        raise ArgumentError(f"{requested} cannot be cut out of {len(labels)} samples: leave some to train on.")
    order = stratified_order(labels, seed)
    cuts = {}
    for name, size in sizes.items():
        cuts[name], order = np.sort(order[:size]), order[size:]
    return cuts | {"train": np.sort(order)}


def check_folds(folds: int | None, fold: int | None) -> None:
    """Raise ArgumentError if only one is given, or the fold does not exist."""
    if (folds is None) != (fold is None):
        key, missing = ("folds", "fold") if fold is None else ("fold", "folds")
        raise ArgumentError(f"{key}={folds if fold is None else fold} needs data.{missing}: give both, or neither.")
    if folds is not None and fold is not None and fold >= folds:
        raise ArgumentError(f"fold={fold} is none of data.folds={folds}: choose 0 to {folds - 1}.")


def fold_rows(
    labels: Labels, folds: int, fold: int, seed: int, names: Sequence[str] | None = None
) -> tuple[Labels, Labels]:
    """Return the places in `labels` [n] for training and for validation, in ascending order.

    Samples are shuffled within their class and dealt out class by class, so fold sizes differ by at most one, in each
    class and in total. Each sample validates in one fold. `names` are the class names.
    """
    shuffled = np.random.Generator(np.random.Philox(seed)).permutation(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    if counts.min(initial=folds) < folds:
        few = f"{class_name(int(classes[counts.argmin()]), names)} has {counts.min()}"
        raise UserError(f"data.folds={folds}: {few} samples outside the test, expected one for each fold: choose less.")
    dealt = shuffled[np.argsort(labels[shuffled], kind="stable")]
    in_fold = np.zeros(len(labels), bool)
    in_fold[dealt[fold::folds]] = True
    return np.flatnonzero(~in_fold), np.flatnonzero(in_fold)


def refold(splits: Splits, folds: int, fold: int, seed: int, names: Sequence[str] | None = None) -> Splits:
    """Combine the training and validation images and divide them by fold; the test is unchanged."""
    train, val = splits.train, splits.val
    if not isinstance(train.images, np.ndarray) or not isinstance(val.images, np.ndarray):
        raise UserError(f"data.folds={folds} cannot divide images that are streamed from shards: use another source.")
    if train.images is val.images and np.array_equal(train.labels, val.labels):
        images, labels, rows = train.images, train.labels, np.sort(np.concatenate([train.rows, val.rows]))
        names = train.names
    else:
        parts = train.read(), val.read()
        images, labels = (np.concatenate([part[i] for part in parts]) for i in range(2))
        rows, names = np.arange(len(labels)), None
    train_rows, val_rows = fold_rows(labels[rows], folds, fold, seed, names)
    train_split, val_split = (Split(images, labels, rows[index], names) for index in (train_rows, val_rows))
    return Splits(train_split, val_split, splits.test)


def share_rows(labels: Labels, share: float, seed: int) -> Labels:
    """Return the places of a share of `labels` [n], stratified, ascending; a smaller share is a subset."""
    count = max(1, round(share * len(labels)))
    return np.sort(stratified_order(labels, seed)[:count])


def load_splits(source: Source, facts: Mapping[str, int] | None = None) -> Splits:
    """Return the splits of a source of images, with int64 labels, after checking them.

    `facts` are `num_classes`, `channels` and `image_size` as declared under data; None checks the splits only.
    """
    with using(source, "loaded"):
        loaded, classes = source.load(), source.num_classes
        splits: dict[str, Split] = {name: getattr(loaded, name) for name in SPLITS}
    wrong = list[str]()
    for name, split in splits.items():
        start, images, labels, rows = f"{KEY}: the {name} split's", split.images, split.labels, split.rows
        if getattr(images, "dtype", None) != np.uint8 or len(images.shape) != 4:
            wrong.append(f"{start} images are {form(images)}, expected uint8 [m, channels, height, width].")
        elif labels.shape != (len(images),):
            wrong.append(f"{start} labels are {list(labels.shape)} for {len(images)} images, expected as many.")
        elif len(rows):
            used = labels[rows[(rows >= 0) & (rows < len(labels))]]
            for what, values, end in (("rows", rows, len(images)), ("labels", used, classes)):
                if values.min(initial=0) < 0 or values.max(initial=0) >= end:
                    spread = f"{what} go from {values.min()} to {values.max()}"
                    wrong.append(f"{start} {spread}, expected 0 to {end - 1}.")
    refuse(wrong)
    shape = splits["train"].images.shape[1:]
    actual = {"num_classes": classes, "channels": shape[0], "image_size": max(shape[1:])}
    for key, value in (facts or {}).items():
        if value != actual[key]:
            has = f"what the source {type(source).__name__} has"
            wrong.append(f"data.{key}={value} is not {has}: set data.{key}={actual[key]}.")
    for name in ("val", "test"):
        if splits[name].images.shape[1:] != shape:
            wrong.append(f"{KEY}: {name} images are {splits[name].images.shape[1:]}, expected {shape} as in train.")
    if not len(splits["train"].rows):
        wrong.append(f"{KEY}: the train split has no rows, expected some to train on.")
    for first, second in combinations(SPLITS, 2):
        is_one_array = splits[first].images is splits[second].images
        shared = len(np.intersect1d(splits[first].rows, splits[second].rows)) if is_one_array else 0
        if shared:
            both = f"the {first} and {second} splits share {shared} images"
            wrong.append(f"{KEY}: {both}, expected none: divide them by rows.")
    refuse(wrong)
    for name in ("val", "test"):
        if not len(splits[name].rows):
            rank_zero_warn(f"{KEY}: the {name} split has no samples, so nothing can be measured on it.")
    converted = (
        replace(split, labels=split.labels.astype(np.int64), rows=split.rows.astype(np.int64))
        for split in splits.values()
    )
    return Splits(*converted)
