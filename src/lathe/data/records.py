"""Published images of one size, read once and then kept as two memory-mapped files."""

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from filelock import FileLock

from lathe.data.splits import Images, Split, Splits, stratified_split
from lathe.errors import UserError
from lathe.files import whole


class Recorded(ABC):
    """A source of `<name>-train.npy` and `<name>-test.npy`, uint8 records with the label first.

    A subclass reads the published data (`read`). Validation images are cut out of the training images.

    Args:
        name: of the data set, in file names and messages.
        shape: channels, height, width.
        data_dir: folder of the `.npy` files.
        val_size: training images used for validation, stratified.
        split_seed: of the split; independent of the run's seed.
    """

    def __init__(self, name: str, shape: tuple[int, int, int], data_dir: str, val_size: int, split_seed: int) -> None:
        self.name = name
        self.shape = shape
        self.data_dir = Path(data_dir)
        self.val_size = val_size
        self.split_seed = split_seed

    @abstractmethod
    def read(self) -> dict[str, Images]:
        """Return the published records of "train" and "test", checked; uint8 [n, 1 + pixels]."""

    def prepare(self) -> None:
        """Make the `.npy` files if they do not exist."""
        if self._ready():
            return
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(self.data_dir / f".{self.name}.lock"):
            if not self._ready():  # another run may have made them
                for split, records in self.read().items():
                    with whole(self._path(split)) as temporary, open(temporary, "wb") as file:
                        np.save(file, records)

    def load(self) -> Splits:
        """Return images uint8 [n, *shape], memory-mapped."""
        train, test = self._open("train"), self._open("test")
        if train is None or test is None:
            raise UserError(f"paths.data_dir={self.data_dir} has no {self.name}: call prepare() of its source first.")
        labels, images = train[:, 0].astype(np.int64), train[:, 1:].reshape(-1, *self.shape)
        rows = stratified_split(labels, {"val": self.val_size}, self.split_seed)
        return Splits(
            train=Split(images, labels, rows["train"]),
            val=Split(images, labels, rows["val"]),
            test=Split.whole(test[:, 1:].reshape(-1, *self.shape), test[:, 0].astype(np.int64)),
        )

    def _ready(self) -> bool:
        return all(self._open(split) is not None for split in ("train", "test"))

    def _path(self, split: str) -> Path:
        return self.data_dir / f"{self.name}-{split}.npy"

    def _open(self, split: str) -> Images | None:
        """Return the records of a split; None if the file is missing or incomplete."""
        try:
            records: Images = np.load(self._path(split), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        wide = 1 + int(np.prod(self.shape))
        return records if records.dtype == np.uint8 and records.shape[1:] == (wide,) else None
