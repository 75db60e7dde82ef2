"""Fashion-MNIST (H. Xiao, K. Rasul, R. Vollgraf, 2017, arXiv:1708.07747)."""

import gzip
import hashlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lathe.config.types import Count, Name, Seed, Url
from lathe.config.validation import validated
from lathe.data.download import download
from lathe.data.records import Recorded
from lathe.data.splits import Images
from lathe.errors import UserError

BASE_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
SIDE = 28


@dataclass(frozen=True)
class IdxFile:
    """A published file in MNIST's IDX format: big-endian sizes after a magic number, and then bytes.

    Its name without `.gz`, MD5 of the compressed file, SHA-256 of its contents, shape.
    """

    name: str
    md5: str
    sha256: str
    shape: tuple[int, ...]

    def read(self, path: Path) -> Images:
        """Return the array at `path`, compressed or not, after checking its hash."""
        head = 4 + 4 * len(self.shape)
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                data = file.read(head + math.prod(self.shape) + 1)  # at the end of the file gzip compares its checksum
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} cannot be read ({error}): put the published file there and run again.") from error
        found = hashlib.sha256(data).hexdigest()
        if found != self.sha256:
            raise UserError(
                f"{path} has contents of the SHA-256 hash {found} and not the published {self.sha256}, so it is "
                "damaged or another file: delete it and run again."
            )
        return np.frombuffer(data, np.uint8, offset=head).reshape(self.shape)


# Images and labels of each split. MD5 hashes are those of the publishers' README; SHA-256 hashes are those of the
# contents of the same files.
FILES: dict[str, tuple[IdxFile, IdxFile]] = {
    "train": (
        IdxFile(
            "train-images-idx3-ubyte",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            (60000, SIDE, SIDE),
        ),
        IdxFile(
            "train-labels-idx1-ubyte",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            (60000,),
        ),
    ),
    "test": (
        IdxFile(
            "t10k-images-idx3-ubyte",
            "bef4ecab320f06d8554ea6380940ec79",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            (10000, SIDE, SIDE),
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte",
            "bb300cfdad3c16e7a12a480ee83cd310",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            (10000,),
        ),
    ),
}


class FashionMnist(Recorded):
    """28 x 28 grey images of clothes: 60,000 for training and validation, and 10,000 for the test.

    Each of the four IDX files, downloaded or placed by hand, compressed or not, is checked against its contents' hash.

    Args:
        data_dir: folder of the downloads, and of the `.npy` files that are made at the first start.
        folder: of the IDX files, compressed (`.gz`) or not; may be read-only. None for `data_dir`.
        download: whether to download missing files, if `folder` is None.
        val_size: training images used for validation, stratified.
        split_seed: of the split; independent of the run's seed.
        files: images and labels of "train" and "test", for tests and mirrors; None for the published ones.
        base_url: of the files.
    """

    num_classes = 10

    @validated
    def __init__(
        self,
        data_dir: Name,
        folder: Name | None = None,
        download: bool = True,
        val_size: Count = 5000,
        split_seed: Seed = 0,
        files: Mapping[str, Any] | None = None,
        base_url: Url = BASE_URL,
    ) -> None:
        super().__init__("fashion_mnist", (1, SIDE, SIDE), data_dir, val_size, split_seed)
        self.folder = None if folder is None else Path(folder)
        self.download = download
        self.files = FILES if files is None else files
        self.base_url = base_url

    def read(self) -> dict[str, Images]:
        """Return the records of the four files."""
        if self.folder is not None and not self.folder.is_dir():
            raise UserError(f"data.source.folder={self.folder} is no folder: give the one that has the IDX files.")
        found = [self._find(file) for file in self._all()]  # all are searched before one is downloaded
        paths = iter(path or self._fetch(file) for path, file in zip(found, self._all(), strict=True))
        records = {}
        for split, (images, labels) in self.files.items():
            pixels, classes = images.read(next(paths)), labels.read(next(paths))
            records[split] = np.concatenate([classes[:, None], pixels.reshape(len(pixels), -1)], axis=1)
        return records

    def _all(self) -> list[IdxFile]:
        return [file for pair in self.files.values() for file in pair]

    def _find(self, file: IdxFile) -> Path | None:
        """Return the file's path; None if it has to be downloaded."""
        folder = self.folder or self.data_dir
        for name in (f"{file.name}.gz", file.name):
            if (folder / name).is_file():
                return folder / name
        if self.folder is None and self.download:
            return None
        files = ", ".join(f"{one.name}.gz" for one in self._all())
        where = f"paths.data_dir={folder} and data.source.download=false: " if self.folder is None else ""
        raise UserError(
            f"{where}{folder} has no {file.name}.gz: put {files} there, set data.source.folder to where they are, or "
            "to null with data.source.download=true."
        )

    def _fetch(self, file: IdxFile) -> Path:
        path = self.data_dir / f"{file.name}.gz"
        by_hand = (
            f"put {', '.join(f'{one.name}.gz' for one in self._all())} into paths.data_dir={self.data_dir} by hand, "
            "set data.source.folder to where they are (Debian's package dataset-fashion-mnist has them), or try "
            "data=digits, which needs no network"
        )
        download(self.base_url + path.name, path, file.md5, by_hand)
        return path
