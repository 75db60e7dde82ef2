"""Published data sets, CIFAR and Fashion-MNIST: downloads that are read once, and then are memory-mapped arrays."""

import gzip
import hashlib
import http.client
import io
import math
import pickle  # through a class that resolves a few names only
import re
import tarfile
import urllib.error
import urllib.request
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock

from lathe.config.types import Count, Name, Seed, Url
from lathe.config.validation import validated
from lathe.data.splits import Images, Split, Splits, stratified_split
from lathe.errors import UserError, naming, require
from lathe.files import whole

BLOCK = 2**20


def check(path: Path, expected: str) -> None:
    """Raise UserError if a file differs from its published hash, MD5 or SHA-256; call this before reading it."""
    kind = "MD5" if len(expected) == 32 else "SHA-256"  # older data sets have MD5
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, kind.replace("-", "").lower()).hexdigest()
    if digest != expected:
        raise UserError(
            f"{path} has the {kind} hash {digest}, expected the published {expected}: delete it, run again."
        )


def download(url: str, path: Path, expected: str, by_hand: str) -> None:
    """Download `url` to `path`, which appears complete and with the `expected` MD5 or SHA-256 or not at all.

    Raises:
        UserError: no network, no such file, a broken connection, or a wrong hash; `by_hand` is what the user can do.
        OSError: the disk can't be written.
    """
    bare = re.sub(r"(?<=//)[^/@]*@", "", url)
    require(bare == url, f"{bare} can't be fetched with the login that the address has: {by_hand}.")
    require(url.startswith(("http://", "https://")), f"{url} is not an http or https address.")
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with whole(path) as part:
        try:
            with (
                urllib.request.urlopen(url, timeout=30) as response,  # noqa: S310 (the scheme was checked)
                naming(part),
                Progress("[progress.description]{task.description}", *columns) as progress,
                part.open("wb") as file,
            ):
                length = response.headers.get("Content-Length", "")
                total = int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
                bar = progress.add_task(url.rpartition("/")[2], total=total)
                while block := response.read(BLOCK):
                    file.write(block)
                    progress.advance(bar, len(block))
                if total is not None and file.tell() < total:
                    raise http.client.IncompleteRead(b"", total - file.tell())
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            reason = " ".join(str(getattr(error, "reason", None) or error).split())[:200]
            raise UserError(f"{url} cannot be fetched ({ascii(reason)[1:-1]}): {by_hand}.") from error
        try:
            check(part, expected)
        except UserError as error:
            raise UserError(f"{url} arrived with another hash than the published {expected}: {by_hand}.") from error


class Recorded(ABC):
    """A source of `<name>-train.npy` and `<name>-test.npy`, uint8 records with the label first.

    A subclass sets the attributes below, and reads the published data (`read`). Validation images are cut out of the
    training images.
    """

    name: str  # of the data set, in file names and messages
    shape: tuple[int, int, int]  # channels, height, width
    data_dir: Path  # of the `.npy` files and the downloads
    download: bool
    base_url: str  # of the downloads
    val_size: int  # training images used for validation, stratified
    split_seed: int  # of the split; independent of the run's seed

    @abstractmethod
    def read(self) -> dict[str, Images]:
        """Return the published records of "train" and "test", checked; uint8 [n, 1 + pixels]."""

    def fetch(self, file: str, md5: str, files: str) -> Path:
        """Download one of the `files` into `data_dir`, or raise UserError if that is not wanted."""
        by_hand = f"put {files} into data.source.data_dir={self.data_dir} by hand"
        require(
            self.download,
            f"data.source.data_dir={self.data_dir} has no {file} and data.source.download=false: {by_hand}, or set "
            "data.source.download=true.",
        )
        path = self.data_dir / file
        download(self.base_url + file, path, md5, f"{by_hand}, or try data=digits, which needs no network")
        return path

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
            raise UserError(f"data.source.data_dir={self.data_dir} has no {self.name}: call prepare() first.")
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


CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
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


# The binary archive is the one to download, and needs no pickle.
ARCHIVES: dict[str, tuple[Archive, ...]] = {
    "cifar10": (
        Archive(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            {
                "train": tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)),
                "test": ("cifar-10-batches-bin/test_batch.bin",),
            },
            skip=0,
        ),
        Archive(
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            {
                "train": tuple(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)),
                "test": ("cifar-10-batches-py/test_batch",),
            },
            labels=b"labels",
        ),
    ),
    "cifar100": (
        Archive(
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            {"train": ("cifar-100-binary/train.bin",), "test": ("cifar-100-binary/test.bin",)},
            skip=1,  # each record starts with the coarse label
        ),
        Archive(
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            {"train": ("cifar-100-python/train",), "test": ("cifar-100-python/test",)},
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
    batch: Any = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()  # Python 2's text becomes bytes
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
    """Loads numbers, bytes, text, lists, dictionaries and arrays, and refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _ALLOWED[module, name]


class Cifar(Recorded):
    """32 x 32 colour images: 50,000 for training and validation, and 10,000 for the test.

    The archive, downloaded or placed by hand, is checked against its published hash and read once. Each split then is a
    memory-mapped file `<name>-<split>.npy` of uint8 records [n, 1 + 3072], label first.

    The arguments are those of `source` in configs/data/cifar10.yaml; `archives` and `base_url` are for tests and
    mirrors.
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
        base_url: Url = CIFAR_URL,
    ) -> None:
        self.name, self.shape, self.data_dir = name, (3, 32, 32), Path(data_dir)
        self.val_size, self.split_seed = val_size, split_seed
        self.num_classes = 10 if name == "cifar10" else 100
        self.download, self.base_url = download, base_url
        self.archives = tuple(archives or ARCHIVES[name])

    def read(self) -> dict[str, Images]:
        """Return the records of the existing archive, or of a downloaded one."""
        archive = next((a for a in self.archives if (self.data_dir / a.file).exists()), self.archives[0])
        path = self.data_dir / archive.file
        if path.exists():
            check(path, archive.md5)
        else:
            self.fetch(archive.file, archive.md5, " or ".join(a.file for a in self.archives))
        return read_archive(path, archive)


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
        digest = hashlib.sha256(data).hexdigest()
        require(
            digest == self.sha256,
            f"{path} has contents of the SHA-256 hash {digest} and not the published {self.sha256}, so it is damaged "
            "or another file: put the published one in its place, or delete it to have it downloaded.",
        )
        return np.frombuffer(data, np.uint8, offset=head).reshape(self.shape)


IDX_URLS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}
# Images and labels of each split. MD5 hashes are those of the publishers; SHA-256 hashes are those of the contents of
# the same files.
IDX_FILES: dict[str, dict[str, tuple[IdxFile, IdxFile]]] = {
    "mnist": {
        "train": (
            IdxFile(
                "train-images-idx3-ubyte",
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                (60000, SIDE, SIDE),
            ),
            IdxFile(
                "train-labels-idx1-ubyte",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                (60000,),
            ),
        ),
        "test": (
            IdxFile(
                "t10k-images-idx3-ubyte",
                "9fb629c4189551a2d022fa330f9573f3",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                (10000, SIDE, SIDE),
            ),
            IdxFile(
                "t10k-labels-idx1-ubyte",
                "ec29112dd5afa0611ce80d1b7f02629c",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                (10000,),
            ),
        ),
    },
    "fashion_mnist": {
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
    },
}


class Mnist(Recorded):
    """28 x 28 grey images in MNIST's format: 60,000 for training and validation, and 10,000 for the test.

    Each of the four IDX files, downloaded or placed by hand, compressed or not, is checked against its contents' hash.

    The arguments are those of `source` in configs/data/fashion_mnist.yaml; `files` and `base_url` are for tests and
    mirrors.
    """

    num_classes = 10

    @validated
    def __init__(
        self,
        name: Literal["mnist", "fashion_mnist"],
        data_dir: Name,
        folder: Name | None = None,
        download: bool = True,
        val_size: Count = 5000,
        split_seed: Seed = 0,
        files: Mapping[str, Any] | None = None,
        base_url: Url | None = None,
    ) -> None:
        self.name, self.shape, self.data_dir = name, (1, SIDE, SIDE), Path(data_dir)
        self.val_size, self.split_seed = val_size, split_seed
        self.folder = None if folder is None else Path(folder)
        self.download, self.base_url = download, base_url or IDX_URLS[name]
        self.files = IDX_FILES[name] if files is None else files

    def read(self) -> dict[str, Images]:
        """Return the records of the four files; all are searched before one is downloaded."""
        folder = self.folder or self.data_dir
        require(folder.is_dir(), f"data.source.folder={folder} is no folder: give the one that has the IDX files.")
        files = [file for pair in self.files.values() for file in pair]
        names = ", ".join(f"{file.name}.gz" for file in files)
        paths = [
            next((path for name in (f"{file.name}.gz", file.name) if (path := folder / name).is_file()), None)
            for file in files
        ]
        missing = [f"{file.name}.gz" for file, path in zip(files, paths, strict=True) if path is None]
        require(
            not missing or self.folder is None,
            f"{folder} has no {', '.join(missing)}: put {names} there, set data.source.folder to where they are, or to "
            "null with data.source.download=true.",
        )
        arrays = [
            file.read(path or self.fetch(f"{file.name}.gz", file.md5, names))
            for file, path in zip(files, paths, strict=True)
        ]
        return {
            split: np.concatenate([classes[:, None], pixels.reshape(len(pixels), -1)], axis=1)
            for split, pixels, classes in zip(self.files, arrays[::2], arrays[1::2], strict=True)
        }
