"""Images streamed from shards: data sets larger than memory, exact on any number of devices."""

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lathe.config.types import Count, Name
from lathe.config.validation import validated
from lathe.data.module import ImageDataModule
from lathe.data.order import Batch
from lathe.data.random import epoch_permutation, hashed_seed
from lathe.data.shard_index import SPLITS, Table, check_files, decode, read_index
from lathe.data.splits import Images, Labels, Split, Splits
from lathe.data.stream import StreamLoader
from lathe.errors import UserError


class ShardImages:
    """The images of a split, uint8 [n, channels, height, width], read row by row on request.

    A row is one read of its bytes, and is not cached. Works in worker processes. `sizes` int64 [shards] are the samples
    of each shard; `table` is as in `lathe.data.shard_index`. At most `max_open` shards are open.
    """

    def __init__(
        self, paths: list[Path], sizes: Labels, table: Table, shape: tuple[int, int, int], max_open: int = 16
    ) -> None:
        self.paths, self.sizes, self.table, self.max_open = paths, sizes, table, max_open
        self.shape, self.dtype = (len(table), *shape), np.dtype(np.uint8)
        self._open: OrderedDict[int, int] = OrderedDict()  # file descriptors, the most recently used last
        self._owner = os.getpid()

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, rows: Labels) -> Images:
        places = self.table[rows]
        images = np.empty((len(places), *self.shape[1:]), dtype=np.uint8)
        # in file order, so that neighbours are read consecutively
        for i in np.lexsort((places[:, 1], places[:, 0])):
            images[i] = self._read(*places[i, :3].tolist())
        return images

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict(), "_owner": None}

    def __del__(self) -> None:
        if getattr(self, "_owner", None) == os.getpid():
            self.close()

    def close(self) -> None:
        """Close the open shards."""
        while self._open:
            os.close(self._open.popitem()[1])

    @property
    def open_shards(self) -> int:
        """Return the number of shards that this process has open."""
        return len(self._open)

    def _read(self, shard: int, start: int, size: int) -> Images:
        data = os.pread(self._file(shard), size, start)
        try:
            pixels = decode(data, self.shape[1])
            if pixels.shape != self.shape[1:]:
                raise ValueError(f"{list(pixels.shape)} instead of {list(self.shape[1:])}")
        except (ValueError, OSError) as error:
            raise UserError(
                f"{self.paths[shard]} has no image at byte {start}, where its index says so ({error}): check all files "
                "with data.source.verify=true."
            ) from error
        return pixels

    def _file(self, shard: int) -> int:
        if self._owner != os.getpid():  # a forked worker opens its own: the parent may close its files at any time
            self._open, self._owner = OrderedDict(), os.getpid()
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            while len(self._open) >= self.max_open:
                os.close(self._open.popitem(last=False)[1])
            self._open[shard] = os.open(self.paths[shard], os.O_RDONLY)
        return self._open[shard]


# empty: name is an absolute path
class Shards:
    """The source of images that scripts/make_shards.py wrote.

    Args:
        data_dir: folder of data sets.
        name: the folder of index.json in it, or an absolute path.
        verify: compare every file with its SHA-256 before training; sizes are always compared.
        max_open: most open shards in a process.
    """

    @validated
    def __init__(self, data_dir: str, name: Name, verify: bool = False, max_open: Count = 16) -> None:
        self.folder, self.verify, self.max_open = Path(data_dir) / name, verify, max_open
        self._index: dict[str, Any] | None = None

    @property
    def index(self) -> dict[str, Any]:
        """Return the contents of index.json, read once."""
        if self._index is None:
            self._index = read_index(self.folder, "data.source.name")
        return self._index

    @property
    def num_classes(self) -> int:
        """Return the number of classes in index.json."""
        return int(self.index["num_classes"])

    @property
    def class_names(self) -> list[str] | None:
        """Return the class names in index.json, or None."""
        return self.index.get("class_names")

    def prepare(self) -> None:
        """Check all files."""
        check_files(self.folder, self.index, self.verify)

    def load(self) -> Splits:
        """Open the tables; images are read on request."""
        check_files(self.folder, self.index, verify=False)
        return Splits(**{name: self._split(name) for name in SPLITS})

    def _split(self, name: str) -> Split:
        entry = self.index["splits"][name]
        path = self.folder / entry["table"]["file"]
        try:
            table: Table = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise UserError(
                f"{path} is not a table of samples: check all files with data.source.verify=true."
            ) from error
        sizes = np.array([shard["samples"] for shard in entry["shards"]], dtype=np.int64)
        if table.dtype != np.int64 or table.shape != (sizes.sum(), 4) or not len(table):
            raise UserError(f"{path} does not list the {sizes.sum()} samples of its shards: write the shards again.")
        channels, height, width = self.index["image"]
        paths = [self.folder / shard["file"] for shard in entry["shards"]]
        images: Any = ShardImages(paths, sizes, table, (channels, height, width), self.max_open)
        return Split.whole(images, np.array(table[:, 3]))


def window_order(seed: int, epoch: int, sizes: Labels, window: int) -> Tensor:
    """Return the order of an epoch over shards of `sizes` samples: a permutation, int64 [n].

    Shards are shuffled and taken `window` at a time, and the samples of a window are shuffled. So consecutive samples
    touch few shards. A window of all shards gives the order of data in memory.
    """
    n = int(sizes.sum())
    if window >= len(sizes):
        return epoch_permutation(seed, epoch, n)
    generator = torch.Generator().manual_seed(hashed_seed(seed, "shards", epoch))
    ends = torch.from_numpy(np.cumsum(sizes))
    pieces = []
    for shards in torch.randperm(len(sizes), generator=generator).split(window):
        places = torch.cat([torch.arange(int(ends[s]) - int(sizes[s]), int(ends[s])) for s in shards.tolist()])
        pieces.append(places[torch.randperm(len(places), generator=generator)])
    return torch.cat(pieces)


class ShardLoader(StreamLoader):
    """`StreamLoader` over `ShardImages`, with the same state, ranks and augmentation.

    The order is that of `window_order` for `sizes` int64 [shards] and `window`. A process reads only the bytes of its
    samples, so a resume and several ranks read nothing twice.
    """

    def __init__(self, split: Split, sizes: Labels, window: int, *, shuffle: bool = True, **settings: Any) -> None:
        super().__init__(split, shuffle=False, **settings)
        self.sizes, self.window, self.mixed = sizes, window, shuffle

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        try:
            yield from super()._batches(epoch, first)
        except UserError as error:  # a worker's message follows its traceback
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from error

    def rank_rows(self, epoch: int, extra: int = 0) -> tuple[Tensor, Tensor]:
        """Return the samples of `EpochLoader`'s places in the window order."""
        places, counts = super().rank_rows(epoch, extra)
        if not (self.train and self.mixed):
            return places, counts
        return window_order(self.seed, epoch, self.sizes, self.window)[places], counts


class ShardDataModule(ImageDataModule):
    """`ImageDataModule` over a source of shards.

    Args:
        source: of shards.
        window: shards whose samples are shuffled together in training.
        settings: as in `ImageDataModule`; `loader` "workers" streams, "resident" reads all shards into memory, in the
            order of data in memory.
    """

    source: Shards
    fixed_parameters = ("normalize", "folds", "fold", "share", "folder")

    @validated
    def __init__(self, source: Shards, *, window: Count = 16, **settings: Any) -> None:
        super().__init__(source, **settings)
        self.window = window

    @property
    def selects(self) -> bool:
        return self.loader != "workers"  # which reads whole shards

    def build(self, split: Split, device: torch.device, **order: Any) -> Any:
        if self.loader != "workers":
            return super().build(split, device, **order)
        images: Any = split.images
        settings = self.settings(device, order)
        return self.streamed(lambda **reader: ShardLoader(split, images.sizes, self.window, **reader, **settings))
