"""The archives of CIFAR, read in memory: nothing is extracted, so paths in them have no effect."""

import pickle
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lathe.data.splits import Images
from lathe.data.unpickle import load_arrays
from lathe.errors import UserError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Archive:
    """A published archive: `members` are the files of each split, in order.

    `skip` is the number of bytes before a binary record's label, None for a python archive with the key `labels`.
    """

    file: str
    md5: str
    members: dict[str, tuple[str, ...]]
    skip: int | None = None
    labels: bytes = b""


def _parts(folder: str, train: list[str], test: str) -> dict[str, tuple[str, ...]]:
    return {"train": tuple(f"{folder}/{name}" for name in train), "test": (f"{folder}/{test}",)}


_FIVE = [f"data_batch_{i}" for i in range(1, 6)]
# the binary archive is first: it is the one to download, and needs no pickle
ARCHIVES: dict[str, tuple[Archive, ...]] = {
    "cifar10": (
        Archive(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            _parts("cifar-10-batches-bin", [f"{name}.bin" for name in _FIVE], "test_batch.bin"),
            skip=0,
        ),
        Archive(
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            _parts("cifar-10-batches-py", _FIVE, "test_batch"),
            labels=b"labels",
        ),
    ),
    "cifar100": (
        Archive(
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            _parts("cifar-100-binary", ["train.bin"], "test.bin"),
            skip=1,  # each record starts with the coarse label
        ),
        Archive(
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            _parts("cifar-100-python", ["train"], "test"),
            labels=b"fine_labels",
        ),
    ),
}


def read_archive(path: Path, archive: Archive) -> dict[str, Images]:
    """Return the records of each split, uint8 [n, 1 + 3072]: label, then red, green and blue by rows."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            return {
                split: np.concatenate([_records(tar, name, archive) for name in names])
                for split, names in archive.members.items()
            }
    except (
        tarfile.TarError,
        EOFError,
        OSError,
        zlib.error,
        KeyError,
        ValueError,
        TypeError,
        pickle.UnpicklingError,
    ) as error:
        raise UserError(f"{path} cannot be read as {archive.file} ({error}): delete it and run again.") from error


def _records(tar: tarfile.TarFile, name: str, archive: Archive) -> Images:
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is not a file")
    data = file.read()
    if archive.skip is not None:
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, archive.skip + 1 + PIXELS)
        return records[:, archive.skip :]
    batch = load_arrays(data)
    pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[archive.labels])
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS) or labels.min() < 0 or labels.max() > 255:
        raise ValueError(f"{name} does not hold images and labels")
    return np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1)
