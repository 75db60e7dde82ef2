"""Images streamed from shards: data sets that are larger than memory, exact on any number of devices and after any
interruption.
"""

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
    """The images of a split as an array of which only the rows that are asked for are read: uint8 [n, channels, height,
    width].

    A row costs one read of its own bytes at its place in its shard, and nothing of it is kept. Safe in worker
    processes.

    Args:
        paths: of the shards.
        sizes: samples of each shard; int64 [shards].
        table: see `lathe.data.shard_index`; may be memory-mapped.
        shape: channels, height, width.
        max_open: shards that are open at the same time in one process.

    Raises:
        UserError: a row's bytes are no image of that shape.
    """

    def __init__(
        self, paths: list[Path], sizes: Labels, table: Table, shape: tuple[int, int, int], max_open: int = 16
    ) -> None:
        self.paths, self.sizes, self.table, self.max_open = paths, sizes, table, max_open
        self.shape, self.dtype = (len(table), *shape), np.dtype(np.uint8)
        self._open: OrderedDict[int, int] = OrderedDict()  # file descriptors, the last used one last
        self._owner = os.getpid()

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, rows: Labels) -> Images:
        places = self.table[rows]
        images = np.empty((len(places), *self.shape[1:]), dtype=np.uint8)
        # in the order of the files: neighbours are read one after the other
        for i in np.lexsort((places[:, 1], places[:, 0])):
            images[i] = self._read(*places[i, :3].tolist())
        return images

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict(), "_owner": None}

    def __del__(self) -> None:
        if getattr(self, "_owner", None) == os.getpid():
            self.close()

    def close(self) -> None:
        """Closes the shards that are open."""
        while self._open:
            os.close(self._open.popitem()[1])

    @property
    def open_shards(self) -> int:
        """How many shards this process has open."""
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
    """The source of images that scripts/make_shards.py wrote; three splits of any size.

    Args:
        data_dir: folder of data sets.
        name: the folder in it, or an absolute path, where index.json lies.
        verify: compare every file with its SHA-256 before training, which reads all of them; sizes are always compared.
        max_open: shards that a process has open at the same time.

    Raises:
        UserError: on use, for a file that is missing, cut, changed or foreign.
    """

    @validated
    def __init__(self, data_dir: str, name: Name, verify: bool = False, max_open: Count = 16) -> None:
        self.folder, self.verify, self.max_open = Path(data_dir) / name, verify, max_open
        self._index: dict[str, Any] | None = None

    @property
    def index(self) -> dict[str, Any]:
        """The contents of index.json, read once."""
        if self._index is None:
            self._index = read_index(self.folder, "data.source.name")
        return self._index

    @property
    def num_classes(self) -> int:
        """As index.json has it."""
        return int(self.index["num_classes"])

    @property
    def class_names(self) -> list[str] | None:
        """As index.json has them; None where it has none."""
        return self.index.get("class_names")

    def prepare(self) -> None:
        """Checks all files."""
        check_files(self.folder, self.index, self.verify)

    def load(self) -> Splits:
        """Opens the tables; images are read when they are asked for."""
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
    """The order of epoch `epoch` over shards of `sizes` samples: a permutation of 0..n-1, int64 [n].

    The shards are shuffled and taken `window` at a time; the samples of those are shuffled among each other. So a
    stretch of the order touches few shards. With a window of all shards it is the order of data in memory.
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
    """`StreamLoader` over shards: the same state, ranks and augmentation, in the order of `window_order`.

    A process reads the bytes of its own samples only, so a resume reads nothing that was seen, and ranks read nothing
    twice.

    Args:
        split: its images are `ShardImages`.
        sizes: samples of each shard; int64 [shards].
        window: shards whose samples are shuffled among each other.
        settings: as `StreamLoader` has them.
    """

    def __init__(self, split: Split, sizes: Labels, window: int, *, shuffle: bool = True, **settings: Any) -> None:
        super().__init__(split, shuffle=False, **settings)
        self.sizes, self.window, self.mixed = sizes, window, shuffle

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        try:
            yield from super()._batches(epoch, first)
        except UserError as error:  # a worker's sentence comes behind its traceback
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from error

    def rank_rows(self, epoch: int, extra: int = 0) -> tuple[Tensor, Tensor]:
        """As `EpochLoader` has it; what it counts are places of the order here."""
        places, counts = super().rank_rows(epoch, extra)
        if not (self.train and self.mixed):
            return places, counts
        return window_order(self.seed, epoch, self.sizes, self.window)[places], counts


class ShardDataModule(ImageDataModule):
    """`ImageDataModule` over a source of shards.

    Args:
        source: of shards.
        window: shards whose samples are shuffled among each other in training.
        settings: as `ImageDataModule` has them; `loader` "workers" streams, "resident" reads all shards into memory, in
            the order that data in memory has.
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
