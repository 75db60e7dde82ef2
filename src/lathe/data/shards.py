"""Images streamed from shards: data sets larger than memory, exact on any number of devices.

Shards are uncompressed tar files in WebDataset's format, with members `<key>.png` (or .npy, .jpg) and `<key>.cls` for
each sample. `index.json` has facts, sizes and hashes, and names a table for each split with the place of each image's
bytes, so that any sample can be read directly.
"""

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lathe.config.class_names import class_names
from lathe.config.cpu_count import physical_cores
from lathe.config.types import Count, Name
from lathe.config.validation import validated
from lathe.data.checks import check_class_names
from lathe.data.image_folder import find_files
from lathe.data.loader import ImageDataModule, StreamLoader
from lathe.data.random import epoch_permutation, hashed_seed
from lathe.data.splits import SPLITS, Images, Labels, Split, Splits, Statistics, stratified_split
from lathe.errors import UserError, require
from lathe.files import sha256, whole
from lathe.images import PictureError, as_seen, read_image, scaled

FORMAT, VERSION = "lathe shards", 1
INDEX = "index.json"
HOW = "python scripts/make_shards.py"
PARTS = ("png", "npy", "jpg", "jpeg")  # suffixes of images
WORKERS = 4  # by default at most, for each of the train and evaluation loaders

Table = NDArray[np.int64]  # [samples, 4]: shard, first byte, bytes, label
Sample = tuple[Images, int]  # image [channels, height, width] and class


def decode(data: bytes, channels: int | None = None) -> Images:
    """Decode an image: uint8 [channels, height, width], as for predictions (`lathe.images`).

    Does not unpickle. `channels`, 1 or 3, applies to PNG and JPEG; None keeps theirs.

    Raises:
        ValueError, OSError: the bytes are not such an image.
    """
    if data[:6] == b"\x93NUMPY":
        pixels: Images = np.load(io.BytesIO(data), allow_pickle=False)
    else:
        try:
            image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
            pixels = as_seen(image, channels or (1 if image.mode[0] in "1LI" else 3))
        except (SyntaxError, KeyError) as error:  # a damaged PNG, and images of other numbers of channels
            raise ValueError(str(error)) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 3:
        raise ValueError(f"{pixels.dtype} {list(pixels.shape)} is no image of uint8 [channels, height, width]")
    return pixels


def read_index(folder: Path) -> dict[str, Any]:
    """Return the contents of index.json."""
    path = folder / INDEX
    lacks = f"data.source.name={folder} holds no shards, as it has no {INDEX}"
    require(path.is_file(), f"{lacks}: write them with {HOW} output={folder.name}.")
    try:
        index: dict[str, Any] = json.loads(path.read_bytes())
        check_class_names(index.get("class_names"), index["num_classes"])
        is_valid = (index["format"], index["version"]) == (FORMAT, VERSION)
        is_valid = is_valid and all(isinstance(n, int) for n in (*index["image"], index["num_classes"]))
        # the index may come from someone else: files are in its folder
        is_valid = is_valid and all(Path(entry["file"]).name == entry["file"] != "" for entry in _entries(index))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError):
        is_valid = False
    require(is_valid, f"{path} is not version {VERSION} of what {HOW} writes, or is damaged: write the shards again.")
    return index


def _entries(index: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of all files: tables and shards."""
    splits = [index["splits"][name] for name in SPLITS]
    return [entry for split in splits for entry in (split["table"], *split["shards"])]


class ShardImages:
    """The images of a split, uint8 [n, channels, height, width], read row by row on request.

    A row is one read of its bytes, and is not cached. Works in worker processes. `sizes` int64 [shards] are the samples
    of each shard. At most `max_open` shards are mapped into memory.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self, paths: list[Path], sizes: Labels, table: Table, shape: tuple[int, int, int], max_open: int = 16
    ) -> None:
        self.paths, self.sizes, self.table, self.max_open = paths, sizes, table, max_open
        self.shape = (len(table), *shape)
        self._open = lru_cache(max_open)(lambda shard: np.memmap(self.paths[shard], mode="r"))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, rows: Labels) -> Images:
        places = self.table[rows]
        images = np.empty((len(places), *self.shape[1:]), dtype=np.uint8)
        for i in np.lexsort((places[:, 1], places[:, 0])):  # neighbours are read consecutively
            images[i] = self._read(*places[i, :3].tolist())
        return images

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardImages, (self.paths, self.sizes, self.table, self.shape[1:], self.max_open)

    def _read(self, shard: int, start: int, size: int) -> Images:
        try:
            pixels = decode(self._open(shard)[start : start + size].tobytes(), self.shape[1])
            if pixels.shape != self.shape[1:]:
                raise ValueError(f"{list(pixels.shape)} instead of {list(self.shape[1:])}")
        except (ValueError, OSError) as error:
            raise UserError(
                f"{self.paths[shard]} has no image at byte {start}, where its index says so ({error}): check all files "
                "with data.source.verify=true."
            ) from error
        return pixels


class Shards:
    """The source of images that scripts/make_shards.py wrote.

    The arguments are those of `source` in configs/data/shards.yaml, which describes them.
    """

    @validated
    def __init__(self, data_dir: str, name: Name, verify: bool = False, max_open: Count = 16) -> None:
        # data_dir is empty if name is an absolute path
        self.folder, self.verify, self.max_open = Path(data_dir) / name, verify, max_open

    @cached_property
    def index(self) -> dict[str, Any]:
        """The contents of index.json."""
        return read_index(self.folder)

    @property
    def num_classes(self) -> int:
        return int(self.index["num_classes"])

    @property
    def class_names(self) -> list[str] | None:
        return self.index.get("class_names")

    def prepare(self) -> None:
        """Check all files."""
        self._check(self.verify)

    def load(self) -> Splits:
        """Open the tables; images are read on request."""
        self._check(verify=False)
        return Splits(**{name: self._split(name) for name in SPLITS})

    def _check(self, verify: bool) -> None:
        for entry in _entries(self.index):
            path = self.folder / entry["file"]
            size = path.stat().st_size if path.is_file() else None
            if size != entry["bytes"] or (verify and sha256(path) != entry["sha256"]):
                what = "is missing" if size is None else "was cut or changed"
                raise UserError(f"{path} {what}, by {INDEX}: copy it again, or write the shards again with {HOW}.")

    def _split(self, name: str) -> Split:
        entry = self.index["splits"][name]
        path = self.folder / entry["table"]["file"]
        sizes = np.array([shard["samples"] for shard in entry["shards"]], dtype=np.int64)
        try:
            table: Table = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise UserError(f"{path} is not a table of samples ({error}): write the shards again.") from error
        fits = table.dtype == np.int64 and table.shape == (sizes.sum(), 4) and len(table) > 0
        require(fits, f"{path} does not list the {sizes.sum()} samples of its shards: write the shards again.")
        paths = [self.folder / shard["file"] for shard in entry["shards"]]
        images: Any = ShardImages(paths, sizes, table, tuple(self.index["image"]), self.max_open)
        return Split.whole(images, np.array(table[:, 3]))


def window_order(seed: int, epoch: int, sizes: Labels, window: int) -> Tensor:
    """Return the order of an epoch over shards of `sizes` samples: a permutation, int64 [n].

    Shards are shuffled and taken `window` at a time, and the samples of a window are shuffled. So consecutive samples
    touch few shards. A window of all shards gives the order of data in memory.
    """
    if window >= len(sizes):
        return epoch_permutation(seed, epoch, int(sizes.sum()))
    generator = torch.Generator().manual_seed(hashed_seed(seed, "shards", epoch))
    members = torch.arange(int(sizes.sum())).split(sizes.tolist())
    pieces = []
    for shards in torch.randperm(len(sizes), generator=generator).split(window):
        places = torch.cat([members[shard] for shard in shards.tolist()])
        pieces.append(places[torch.randperm(len(places), generator=generator)])
    return torch.cat(pieces)


class ShardLoader(StreamLoader):
    """`StreamLoader` over `ShardImages`, in the order of `window_order` for `sizes` int64 [shards] and `window`."""

    def __init__(self, split: Split, sizes: Labels, window: int, **settings: Any) -> None:
        super().__init__(split, **settings)
        self.sizes, self.window = sizes, window

    def epoch_order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return super().epoch_order(epoch)
        return window_order(self.seed, epoch, self.sizes, self.window)


class ShardDataModule(ImageDataModule):
    """`ImageDataModule` over a source of shards.

    The arguments are the keys of configs/data/shards.yaml, which describes them.
    """

    source: Shards
    fixed_parameters = ("normalize", "folds", "fold", "share", "folder")

    @validated
    def __init__(self, source: Shards, *, window: Count = 16, **settings: Any) -> None:
        super().__init__(source, **settings)
        self.window = window
        if settings.get("num_workers") is None:  # images are decoded during training
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self.reader["num_workers"] = min(WORKERS, max(1, physical_cores() // processes))

    @property
    def selects(self) -> bool:
        return self.loader != "workers"  # which reads whole shards

    def build(self, split: Split, device: torch.device, **order: Any) -> Any:
        if self.loader != "workers":
            return super().build(split, device, **order)
        images: Any = split.images
        return ShardLoader(split, images.sizes, self.window, **self.reader, **self.settings(device, order))


class FolderSamples:
    """Image files of class folders (`lathe.data.image_folder`), read one at a time.

    The arguments are those of `images` in configs/make_shards.yaml, which describes them.
    """

    def __init__(
        self, folder: str, channels: int, image_size: int | None, val_size: int, test_size: int, split_seed: int = 0
    ) -> None:
        self.folder, self.channels, self.image_size = Path(folder), channels, image_size
        try:
            self.classes = class_names(folder)
            self.files = find_files(self.folder, self.classes, {})
        except UserError as error:
            raise UserError(str(error).replace("data.folder", "images.folder")) from error
        self.num_classes = len(self.classes)
        self.rows = dict(self.files.rows)
        sizes = {name: size for name, size in (("val", val_size), ("test", test_size)) if name not in self.rows}
        if sizes:
            train = self.rows["train"]
            cut = stratified_split(self.files.labels[train], sizes, split_seed)
            self.rows |= {name: train[rows] for name, rows in cut.items()}

    def samples(self, split: str) -> Iterator[Sample]:
        """Yield the images of a split, one by one; raise UserError for a file that is not an image."""
        for row in self.rows[split]:
            path = self.folder / self.files.names[row]
            try:
                pixels = read_image(path, self.channels)
            except (PictureError, OSError) as error:
                raise UserError(f"{path} cannot be read as an image ({error}): mend it or remove it.") from error
            if self.image_size is not None:
                pixels = scaled(pixels, (self.image_size, self.image_size))
            yield pixels, int(self.files.labels[row])


def write_shards(
    output: Path,
    splits: Mapping[str, Iterable[Sample]],
    num_classes: int,
    shard_size: int,
    encoding: Literal["png", "npy"] = "png",
    overwrite: bool = False,
    class_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Write `output`/<split>-<number>.tar and their index, all or nothing; return the index.

    One image is in memory at a time. Equal input gives equal bytes.

    Args:
        output: the folder.
        splits: images and classes of "train", "val" and "test".
        num_classes: of all splits.
        shard_size: samples of a shard; the last of a split may have fewer.
        encoding: "png" (lossless; 1 or 3 channels) or "npy" (raw pixels: larger, and faster to read).
        overwrite: whether to replace existing shards.
        class_names: in the order of the classes, for training; None for none.
    """
    if output.exists() and not (overwrite and (output / INDEX).is_file()):
        way = "name another folder, or replace it with overwrite=true"
        raise UserError(
            f"output={output} is there already: {'it holds no shards: name another folder' if overwrite else way}."
        )
    try:
        from webdataset import ShardWriter
    except ImportError as error:
        raise UserError("writing shards needs webdataset: install it with pip install -e '.[shards]'.") from error
    facts: dict[str, Any] = {"num_classes": num_classes, "encoding": encoding}
    if class_names is not None:
        facts["class_names"] = check_class_names(class_names, num_classes)
    options = {"maxcount": shard_size, "maxsize": 2**62, "verbose": 0, "mtime": 0, "user": "", "group": ""}
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole(output, replace_folder=True) as partial:
        partial.mkdir()
        paths: dict[str, list[Path]] = {}
        for name, samples in splits.items():
            written, count, statistics = list[str](), 0, Statistics()
            with ShardWriter(f"{partial}/{name}-%06d.tar", post=written.append, **options) as writer:
                for count, (image, label) in enumerate(samples, 1):
                    shape = facts.setdefault("image", list(image.shape))
                    what = f"image {count - 1} of {name}"
                    require(
                        list(image.shape) == shape,
                        f"{what} has the shape {list(image.shape)} and the first one {shape}: set images.image_size to "
                        "make them equal.",
                    )
                    require(
                        encoding == "npy" or len(image) in (1, 3),
                        f"encoding=png takes 1 or 3 channels and the images have {len(image)}: use encoding=npy.",
                    )
                    require(0 <= label < num_classes, f"{what} has the class {label}, but there are {num_classes}.")
                    statistics.add(image[None])
                    if encoding == "png":
                        image = image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)
                    writer.write({"__key__": f"{count - 1:09d}", encoding: np.ascontiguousarray(image), "cls": label})
            require(count > 0, f"the {name} split has no images: shards need some in each of {', '.join(SPLITS)}.")
            paths[name] = [Path(path) for path in written]
            facts |= statistics.facts() if name == "train" else {}
        return write_index(partial, paths, facts)


def write_index(folder: Path, shards: dict[str, list[Path]], facts: dict[str, Any]) -> dict[str, Any]:
    """Write the tables and then index.json for the shards in `folder`; return the index."""

    def entry(path: Path) -> dict[str, Any]:
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}

    splits = {}
    for name, paths in shards.items():
        tables = [scan(path, number) for number, path in enumerate(paths)]
        table = folder / f"{name}.index.npy"
        np.save(table, np.concatenate(tables))
        entries = [entry(path) | {"samples": len(rows)} for path, rows in zip(paths, tables, strict=True)]
        splits[name] = {"table": entry(table), "shards": entries}
    index = {"format": FORMAT, "version": VERSION, **facts, "splits": splits}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return index


def scan(path: Path, number: int) -> Table:
    """Return the table rows of shard `number`, in the order of the tar file."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, _, part = name.partition(".")
                if part in PARTS:
                    images[f"{folder}/{stem}"] = (member.offset_data, member.size)
                elif part == "cls" and (file := tar.extractfile(member)) is not None:
                    labels[f"{folder}/{stem}"] = int(file.read())
    except (tarfile.TarError, ValueError) as error:
        raise UserError(f"{path} is not an uncompressed tar file of images and classes: {error}.") from error
    if not images or images.keys() != labels.keys():
        odd = sorted(images.keys() ^ labels.keys())
        what = f"sample {odd[0].strip('/')} of it has not both" if odd else "there is none in it"
        raise UserError(f"{path} has to hold an image (.{', .'.join(PARTS)}) and a .cls of every sample: {what}.")
    return np.array([(number, *images[key], labels[key]) for key in images], dtype=np.int64)


def index_tars(folder: Path, num_classes: int) -> dict[str, Any]:
    """Write the index for existing tar files `<split>-*.tar` in WebDataset's format."""
    paths = {name: sorted(folder.glob(f"{name}-*.tar")) for name in SPLITS}
    for name, tars in paths.items():
        require(bool(tars), f"tars.folder={folder} has no {name}-*.tar: each of {', '.join(SPLITS)} needs some.")
    for path in [path for tars in paths.values() for path in tars]:
        labels = scan(path, 0)[:, 3]
        least, most = labels.min(), labels.max()
        require(
            least >= 0 and most < num_classes,
            f"{path} has classes from {least} to {most}, but tars.num_classes={num_classes}: set as many as there are.",
        )
    first = paths["train"][0]
    start, size = scan(first, 0)[0, 1:3].tolist()
    try:
        image = decode(np.memmap(first, mode="r")[start : start + size].tobytes())
    except (ValueError, OSError) as error:
        raise UserError(f"{first} starts with what is no image ({error}): leave it out, or write it again.") from error
    return write_index(folder, paths, {"num_classes": num_classes, "image": list(image.shape), "encoding": "any"})
