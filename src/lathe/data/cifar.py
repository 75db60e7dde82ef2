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
        """The records of the archive that is there, or is fetched."""
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
