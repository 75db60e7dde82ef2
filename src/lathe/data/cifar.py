"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009)."""

from collections.abc import Sequence
from typing import Any, Literal

from lathe.config.types import Count, Name, Seed, Url
from lathe.config.validation import validated
from lathe.data.archive import ARCHIVES, Archive, read_archive
from lathe.data.download import check, download
from lathe.data.records import Recorded
from lathe.data.splits import Images
from lathe.errors import UserError

BASE_URL = "https://www.cs.toronto.edu/~kriz/"


class Cifar(Recorded):
    """32 x 32 colour images: 50,000 for training and validation, and 10,000 for the test.

    The archive, downloaded or placed by hand, is checked against its published hash and read once. Each split then is a
    memory-mapped file `<name>-<split>.npy` of uint8 records [n, 1 + 3072], label first.

    Args:
        name: which of the two; CIFAR-100 has its 100 fine classes.
        data_dir: folder of archive and `.npy` files.
        download: whether to download the binary archive if neither archive exists.
        val_size: training images used for validation, stratified.
        split_seed: of the split; independent of the run's seed.
        archives: names, hashes and members, for tests and mirrors; None for the published ones.
        base_url: of the archives.
    """

    @validated
    def __init__(
        self,
        name: Literal["cifar10", "cifar100"],
        data_dir: Name,
        download: bool = True,
        val_size: Count = 5000,
        split_seed: Seed = 0,
        archives: Sequence[Any] | None = None,
        base_url: Url = BASE_URL,
    ) -> None:
        super().__init__(name, (3, 32, 32), data_dir, val_size, split_seed)
        self.num_classes = 10 if name == "cifar10" else 100
        self.download = download
        self.archives = tuple(archives or ARCHIVES[name])
        self.base_url = base_url

    def read(self) -> dict[str, Images]:
        """Return the records of the existing archive, or of a downloaded one."""
        archive = next((a for a in self.archives if (self.data_dir / a.file).exists()), None) or self._fetch()
        path = self.data_dir / archive.file
        check(path, archive.md5)
        return read_archive(path, archive)

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
