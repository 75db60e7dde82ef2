"""Images larger than device memory: rows of a memory-mapped array, read ahead by workers."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lathe.data.augment import crop_and_flip
from lathe.data.loader import ImageLoader
from lathe.data.order import Batch
from lathe.data.splits import Split
from lathe.data.workers import Reader


class _Rows(Dataset[Tensor]):
    """Raw uint8 images of a split; a batch is one read."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, samples: list[int]) -> Tensor:
        # sorted rows are read in file order; the inverse restores their order
        rows, back = torch.from_numpy(self.split.rows[samples]).unique(return_inverse=True)
        return torch.from_numpy(self.split.images[rows.numpy()])[back]


class _Batches:
    """Batch sampler of one DataLoader for all epochs, whose lists its owner sets."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)


def _as_it_is(images: Any) -> Any:
    return images


class StreamLoader(ImageLoader):
    """Yields the batches of `ResidentLoader`, bit for bit, through a DataLoader.

    Workers only read uint8 rows; augmentation and normalization are batched in this process, on its device. The order
    depends on (seed, epoch) only, so the state does not depend on what workers have read ahead.

    Args:
        split: of the images.
        num_workers: reading processes; 0 reads in this one.
        pin_memory: page-locked batches, for faster copies to a GPU; no effect on other devices.
        prefetch_factor: batches that each worker reads ahead; None for torch's default.
        persistent_workers: keep workers between epochs.
        settings: as in `ImageLoader`.
    """

    def __init__(
        self,
        split: Split,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        **settings: object,
    ) -> None:
        channels, height, width = split.images.shape[1:]
        labels = torch.from_numpy(split.labels[split.rows])
        super().__init__((channels, height, width), labels, **settings)  # type: ignore[arg-type]
        self.split, self._pinned, self._ahead = split, pin_memory and self.device.type == "cuda", _Batches()
        self._prefetch_factor = prefetch_factor
        self._reader = self.read(num_workers, self._ahead, persistent_workers)

    def read(self, workers: int, lists: Iterable[list[int]], stay: bool = False) -> Reader:
        """Return a reader of raw images, uint8 [samples, channels, height, width]; `stay` keeps its `workers`."""
        return Reader(
            _Rows(self.split),
            batch_sampler=lists,
            num_workers=workers,
            pin_memory=self._pinned,
            prefetch_factor=self._prefetch_factor if workers else None,
            persistent_workers=stay and workers > 0,
            collate_fn=_as_it_is,
            # a DataLoader draws a seed at each start, here not from the global generator
            generator=torch.Generator(),
        )

    def close(self) -> None:
        self._reader.close()

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        rows, draws, labels = self._plan(epoch)
        width, picking = rows.shape[1], self.recipe.picking
        self._ahead.lists = rows[first:].tolist()
        for number, raw in enumerate(self._reader, start=first):
            part = draws[slice(number * width, (number + 1) * width)]
            images = crop_and_flip(
                raw.to(self.device, non_blocking=True), self.recipe.picked(part), picking.crop, picking.crop_fill
            )
            target = labels[number : number + 1].to(self.device, non_blocking=True)
            samples = rows[number].to(self.device, non_blocking=True)
            yield from self._finish(images, target, part, samples, epoch, batches=1)
