"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

Their archives are read in memory: nothing is extracted, so paths in them have no effect.
"""

import io
import pickle  # through a class that resolves a few names only
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lathe.config.types import Count, Name, Seed, Url
from lathe.config.validation import validated
from lathe.data.download import check, download
from lathe.data.records import Recorded
from lathe.data.splits import Images
from lathe.errors import UserError

BASE_URL = "https://www.cs.toronto.edu/~kriz/"
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
    except Exception as error:  # a damaged archive can fail in any way
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


def _encode(text: str, encoding: str) -> bytes:
    """Encode as Python 3 writes bytes in old protocols; raise for any other codec."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding}")
    return text.encode("latin1")


# NumPy has moved these modules; an array's own reduction has the function under any name
_RECONSTRUCT: Callable[..., Any] = np.zeros(0).__reduce__()[0]  # type: ignore[assignment]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


def load_arrays(data: bytes) -> Any:
    """Load numbers, bytes, text, lists, dictionaries and arrays; text of Python 2 becomes bytes.

    Raises:
        pickle.UnpicklingError: the pickle names anything else, or is damaged.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise pickle.UnpicklingError(str(error)) from error


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
