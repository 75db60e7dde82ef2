"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from lathe.config.schema.held import held
from lathe.data.archive import ARCHIVES, PIXELS, Archive, read_archive
from lathe.data.download import check, download, locked
from lathe.data.splits import Images, Split, Splits, stratified_split
from lathe.errors import UserError
from lathe.files import whole

BASE_URL = "https://www.cs.toronto.edu/~kriz/"


@held("lathe.data.Cifar")
class Cifar:
    """32 x 32 colour images: 50,000 for training, of which `val_size` are kept for validation, and 10,000 for the test.

    The archive, downloaded or put there by hand, is checked against its published hash before it is opened, and read
    once; each split then is one memory-mapped file `<name>-<split>.npy` of uint8 records [n, 1 + 3072], label first.

    Args:
        name: which of the two; CIFAR-100 has its 100 fine classes.
        data_dir: folder of archive and `.npy` files.
        download: whether to fetch the binary archive if no archive is there.
        val_size: training images kept for validation, stratified.
        split_seed: draws them; apart from the run's seed.
        archives: names, hashes and members of the archives; None is the published ones. For tests and mirrors.
        base_url: folder they are fetched from.

    Raises:
        UserError: for an unknown name; in `prepare`, without data and network, for an archive with another hash or cut
            short, and for a folder that cannot be written; in `load`, if `prepare` has not run.
    """

    def __init__(
        self,
        name: Literal["cifar10", "cifar100"],
        data_dir: str,
        download: bool = True,
        val_size: int = 5000,
        split_seed: int = 0,
        archives: Sequence[Archive] | None = None,
        base_url: str = BASE_URL,
    ) -> None:
        self.name = name
        self.num_classes = 10 if name == "cifar10" else 100
        self.data_dir = Path(data_dir)
        self.download = download
        self.val_size = val_size
        self.split_seed = split_seed
        self.archives = tuple(archives or ARCHIVES[name])
        self.base_url = base_url

    def prepare(self) -> None:
        """Makes the `.npy` files, unless they are there."""
        if self._ready():
            return
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            with locked(self.data_dir / f".{self.name}.lock"):
                if not self._ready():  # another run may have made them meanwhile
                    self._make()
        except OSError as error:
            raise UserError(
                f"paths.data_dir={self.data_dir} cannot be written ({error.strerror or error}): choose a folder with "
                "enough space that you may write to."
            ) from error

    def load(self) -> Splits:
        """Images uint8 [n, 3, 32, 32], memory-mapped."""
        train, test = self._open("train"), self._open("test")
        if train is None or test is None:
            raise UserError(f"paths.data_dir={self.data_dir} has no {self.name}: call prepare() of its source first.")
        labels, images = train[:, 0].astype(np.int64), train[:, 1:].reshape(-1, 3, 32, 32)
        rows = stratified_split(labels, {"val": self.val_size}, self.split_seed)
        return Splits(
            train=Split(images, labels, rows["train"]),
            val=Split(images, labels, rows["val"]),
            test=Split.whole(test[:, 1:].reshape(-1, 3, 32, 32), test[:, 0].astype(np.int64)),
        )

    def _ready(self) -> bool:
        return all(self._open(split) is not None for split in ("train", "test"))

    def _make(self) -> None:
        archive = next((a for a in self.archives if (self.data_dir / a.file).exists()), None) or self._fetch()
        path = self.data_dir / archive.file
        check(path, archive.md5)
        for split, records in read_archive(path, archive).items():
            self._save(split, records)

    def _fetch(self) -> Archive:
        archive = self.archives[0]
        known = " or ".join(a.file for a in self.archives)
        if not self.download:
            raise UserError(
                f"paths.data_dir={self.data_dir} has no {self.name} and data.source.download=false: put {known} there, "
                "or set data.source.download=true."
            )
        by_hand = f"put {known} into paths.data_dir={self.data_dir} by hand, or try data=digits, which needs no network"
        download(self.base_url + archive.file, self.data_dir / archive.file, archive.md5, by_hand)
        return archive

    def _path(self, split: str) -> Path:
        return self.data_dir / f"{self.name}-{split}.npy"

    def _open(self, split: str) -> Images | None:
        """The records of a split, or None if they are not there or not whole, in which case they are made again."""
        try:
            records: Images = np.load(self._path(split), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        return records if records.dtype == np.uint8 and records.ndim == 2 and records.shape[1] == 1 + PIXELS else None

    def _save(self, split: str, records: Images) -> None:
        with whole(self._path(split)) as temporary, open(temporary, "wb") as file:
            np.save(file, records)
