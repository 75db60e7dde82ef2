"""The interface of image sources: three splits of uint8 arrays, and stratified splitting."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lathe.data.checks import check_number
from lathe.errors import ArgumentError

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


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


def stratified_order(labels: Labels, seed: int) -> Labels:
    """Return an order in which every contiguous piece has nearly the class shares of the whole; int64 [n].

    Samples are shuffled within their class and sorted by their relative place in it, so that pieces of any exact size
    can be cut.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    shuffled = rng.permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return np.argsort(place, kind="stable").astype(np.int64)


def stratified_split(labels: Labels, sizes: dict[str, int], seed: int) -> dict[str, Labels]:
    """Return rows of sets of the given sizes, and of the rest as "train", in ascending order.

    Raises:
        ArgumentError: nothing is left to train on, or an argument is invalid; keys of `sizes` are named `<key>_size`.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ArgumentError(f"labels: expected one for each sample, got an array of shape {list(labels.shape)}.")
    check_number("seed", seed, 0)
    if "train" in sizes:
        raise ArgumentError(f"train_size={sizes['train']} cannot be asked for: train is what the other sets leave.")
    if min(sizes.values(), default=1) < 1 or sum(sizes.values()) >= len(labels):
        asked = ", ".join(f"{name}_size={size}" for name, size in sizes.items())
        raise ArgumentError(
            f"{asked} cannot be cut out of {len(labels)} samples: choose sizes of at least 1 that leave some to "
            "train on."
        )
    order = stratified_order(labels, seed)
    cuts = {}
    for name, size in sizes.items():
        cuts[name], order = np.sort(order[:size]), order[size:]
    return cuts | {"train": np.sort(order)}
