"""Fashion-MNIST (H. Xiao, K. Rasul, R. Vollgraf, 2017, arXiv:1708.07747)."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.config.types import Count, Name, Seed, Url
from lathe.config.validation import validated
from lathe.data.download import download
from lathe.data.idx import IdxFile, parse_idx, read_bounded
from lathe.data.records import Recorded
from lathe.data.splits import Images
from lathe.errors import UserError

BASE_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
SIDE = 28
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

    def prepare(self) -> None:
        """Make the `.npy` files; warn if they exist and the given folder does not."""
        if self.folder is not None and not self.folder.is_dir() and self._ready():
            rank_zero_warn(
                f"data.source.folder={self.folder} is no folder: the images are those that were read before, in "
                f"paths.data_dir={self.data_dir}."
            )
        super().prepare()

    def read(self) -> dict[str, Images]:
        """Return the records of the four files."""
        if self.folder is not None and not self.folder.is_dir():
            raise UserError(f"data.source.folder={self.folder} is no folder: give the one that has the IDX files.")
        found = [self._find(file) for file in self._all()]  # all are searched before one is downloaded
        paths = iter(path or self._fetch(file) for path, file in zip(found, self._all(), strict=True))
        records = {}
        for split, (images, labels) in self.files.items():
            pixels, classes = _contents(next(paths), images), _contents(next(paths), labels)
            if classes.max() >= self.num_classes:
                raise UserError(f"{labels.name} has the label {classes.max()}, expected 0 to {self.num_classes - 1}.")
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
        where = f"data.source.folder={folder}" if self.folder else f"paths.data_dir={folder}"
        off = "" if self.folder else " and data.source.download=false"
        way = (
            "data.source.folder=null with a network"
            if self.folder
            else "set data.source.folder to where they are, or data.source.download=true"
        )
        raise UserError(
            f"{where} has no {file.name}.gz{off}: put {', '.join(f'{one.name}.gz' for one in self._all())} there, or "
            f"{way}."
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


def _contents(path: Path, file: IdxFile) -> Images:
    """Return the array of a file, after checking its hash."""
    most = 4 + 4 * len(file.shape) + math.prod(file.shape)
    data = read_bounded(path, most)
    try:
        array = parse_idx(data, file.shape)
    except ValueError as error:
        raise UserError(
            f"{path} cannot be read as {file.name} ({error}): put the published file there and run again."
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        raise UserError(
            f"{path} has contents of the SHA-256 hash {found} and not the published {file.sha256}, so it is damaged or "
            "another file: delete it and run again."
        )
    return array
