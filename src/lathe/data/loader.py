"""The LightningDataModule of every image data set; loaders of images on the training device, or read by workers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from lathe.config.types import Count, Name, NonNegativeInt, Positive, PositiveShare, Seed
from lathe.config.validation import validated
from lathe.data.augment import (
    Augment,
    Draws,
    Normalizer,
    Picked,
    check_folded,
    crop_and_flip,
    draw,
    mix,
    pad,
    recipe,
    try_out,
)
from lathe.data.base import ExactDataModule
from lathe.data.checks import check_class_names, check_members
from lathe.data.order import IGNORE, Batch, EpochLoader, Reader
from lathe.data.splits import Source, Split, check_folds, load_splits, refold, share_rows
from lathe.data.transfer import needs_no_trainer
from lathe.errors import UserError

Slabs = np.ndarray[Any, np.dtype[np.void]]

# Bytes of uint8 images that are picked at once: enough to share the Python cost among small batches, few enough for a
# core's cache.
CHUNK_BYTES = 2**18
CACHED_BYTES = 2**19  # of slabs that are compacted at once, small enough to stay in a core's cache


class ImageLoader(EpochLoader):
    """Base of the image loaders: the epoch's random decisions, and everything after the crop.

    Yields (x, y): x float32 [batch, channels, height, width], y int64 [batch], or float32 class probabilities [batch,
    classes] if the augmentation mixes samples.

    Args:
        image_shape: channels, height, width.
        labels: int64 [n].
        num_classes: of mixed targets.
        normalizer: converts uint8 to float32; None yields uint8 (and cannot mix).
        augment: `Augment`, or a list of transforms and functions; None for no augmentation.
        device: of the batches.
        order: as in `EpochLoader`: batch_size, seed, rank, world_size, train, shuffle, limit.
    """

    goes_ahead = True

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        labels: Tensor,
        *,
        num_classes: int,
        normalizer: Normalizer | None,
        augment: Any,
        device: torch.device,
        **order: float | None,
    ) -> None:
        super().__init__(len(labels), **order)  # type: ignore[arg-type]
        self.recipe = recipe(augment, image_shape)
        self.augment = self.recipe.fields
        assert normalizer is not None or not self.augment.mixes, "uint8 images cannot be mixed"
        self.image_shape, self.labels, self.num_classes = image_shape, labels, num_classes
        self.folded = False  # whether images are normalized before they are picked
        self.device = device
        self.normalizer = normalizer.to(device) if normalizer else None
        black = torch.zeros(image_shape[0], dtype=torch.uint8, device=device)
        self.fill = black if normalizer is None else normalizer.fill

    def _plan(self, epoch: int) -> tuple[Tensor, Draws, Tensor]:
        """Return this rank's samples and labels of an epoch, [batches, width], and their flat draws.

        `width` is the local batch, plus one for mixing. Only the draws are on the device.
        """
        rows, counts = self.rank_rows(epoch, extra=int(self.augment.mixes))
        table = draw(self.augment, self.seed, epoch, self.n, *self.image_shape[1:])
        return rows, table[rows.flatten()].to(self.device), self.labels[rows].where(counts, IGNORE)

    def _finish(
        self, images: Tensor, labels: Tensor, draws: Draws, samples: Tensor, epoch: int, batches: int
    ) -> Iterator[Batch]:
        """Yield batches of picked images [batches * width, ...], after all that follows the crop."""
        images = self.recipe(images, Picked(self.seed, epoch, samples, draws, self.fill))
        if self.normalizer is not None and not self.folded:
            images = self.normalizer(images)
        if not self.augment.mixes:
            return zip(images.view(batches, -1, *self.image_shape).unbind(), labels.unbind(), strict=True)
        # a sample's partner is the next one: the own images leave out the last of a batch, the partners the first
        grid = torch.arange(len(images), device=self.device).view(batches, -1)
        own, partner = grid[:, :-1].flatten(), grid[:, 1:].flatten()
        flat = labels.flatten()
        mixed, targets = mix(images[own], images[partner], flat[own], flat[partner], draws[own], self.num_classes)
        return zip(
            mixed.view(batches, -1, *self.image_shape).unbind(),
            targets.view(batches, -1, self.num_classes).unbind(),
            strict=True,
        )


class Bank:
    """Padded images, followed by their mirror images, viewed through all windows of the original size.

    The view [images, offsets, offsets, channels, height, width] takes no memory; indexing it by (image, top, left)
    copies exactly the pixels of the batch. Memory: n x channels x (height + 2 padding) x (width + 2 padding) bytes,
    twice with flips, and four times that with float32.

    Args:
        images: uint8 [n, channels, height, width], on the device of the batches.
        padding: pixels on each side; 0 for no crops.
        fill: "zero" or "reflect".
        flips: whether to store mirror images.
        convert: applied to all images after padding, keeps the shape; None keeps uint8.
    """

    def __init__(
        self, images: Tensor, padding: int, fill: str, flips: bool, convert: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.n, self.channels, self.height, self.width = images.shape
        self.padding = padding
        padded = pad(images, padding, fill) if padding else images
        padded = convert(padded) if convert else padded
        shape = (self.n * (1 + flips), *padded.shape[1:])
        if padded.device.type == "cpu":
            # NumPy asks Linux for huge pages, torch does not: 1.1 times the images/s in random access to some 100 MB
            self.images = torch.from_numpy(np.empty(shape, dtype=padded[:0].numpy().dtype))
        else:
            self.images = padded.new_empty(shape)
        self.images[: self.n] = padded
        if flips:
            self.images[self.n :] = self.images[: self.n].flip(-1)
        self.windows: Tensor | Slabs | None = None
        if padding:
            self.windows = self.slab_windows() if images.device.type == "cpu" else self.strided_windows()

    def gather(self, rows: Tensor, draws: Draws) -> Tensor:
        """Return images `rows` (int64 [b]), cropped and flipped by `draws`; [b, channels, height, width]."""
        if draws.flip is not None:
            rows = rows + self.n * draws.flip
        if self.windows is None or draws.top is None or draws.left is None:
            return self.images.index_select(0, rows)
        if isinstance(self.windows, Tensor):
            return self.windows[rows, draws.top, draws.left]
        picked = torch.empty((len(rows), self.channels, self.height, self.width), dtype=self.images.dtype)
        row_type = f"V{self.width * self.images.element_size()}"
        result = picked.numpy().view(row_type)[..., 0]
        _, channel, row, _ = (s * self.images.element_size() for s in self.images.stride())
        size = self.windows.itemsize
        step = max(1, CACHED_BYTES // size)
        index = rows.numpy(), draws.top.numpy(), draws.left.numpy()
        for start in range(0, len(rows), step):
            slabs = self.windows[tuple(i[start : start + step] for i in index)]
            shape = (len(slabs), self.channels, self.height)
            result[start : start + step] = np.ndarray(shape, row_type, slabs, strides=(size, channel, row))
        return picked

    def strided_windows(self) -> Tensor:
        """Return the view that the class describes, for any device."""
        offsets = 2 * self.padding + 1
        shape = (len(self.images), offsets, offsets, self.channels, self.height, self.width)
        image, channel, row, pixel = self.images.stride()
        return self.images.as_strided(shape, (image, row, pixel, channel, row, pixel))

    def slab_windows(self) -> Slabs:
        """Return the view for the CPU, [images, offsets, offsets]: an element spans a window's bytes.

        A slab is read from memory in one stretch, and the bytes between its rows are dropped while it is in the cache:
        3 times the images/s of torch's indexing, which copies pixel by pixel.
        """
        offsets = 2 * self.padding + 1
        image, channel, row, pixel = (s * self.images.element_size() for s in self.images.stride())
        length = (self.channels - 1) * channel + (self.height - 1) * row + self.width * pixel
        shape = (len(self.images), offsets, offsets)
        return np.ndarray(shape, f"V{length}", self.images.numpy(), strides=(image, row, pixel))


class ResidentLoader(ImageLoader):
    """Batches of images in device memory, made several at a time by a few index operations.

    Args:
        images: uint8 [n, channels, height, width].
        labels: int64 [n].
        normalize: "batch" keeps uint8; "folded" keeps normalized float32, in four times the memory. Same bits.
        settings: as in `ImageLoader`.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, *, normalize: Literal["batch", "folded"] = "batch", **settings: object
    ) -> None:
        channels, height, width = images.shape[1:]
        super().__init__((channels, height, width), labels, **settings)  # type: ignore[arg-type]
        folded = self.normalizer if normalize == "folded" else None
        if folded is not None:
            check_folded(self.recipe)
            self.folded, self.fill = True, folded(self.fill[:, None, None]).flatten()
        # folded after the padding, so that padding is black in both forms
        picking = self.recipe.picking
        self.bank = Bank(images.to(self.device), picking.crop, picking.crop_fill, picking.flip != "none", folded)
        self.chunk = max(1, CHUNK_BYTES // (self.local_batch_size * channels * height * width))

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        rows, draws, labels = self._plan(epoch)
        width = rows.shape[1]
        flat, labels = rows.flatten().to(self.device), labels.to(self.device)
        # chunks start at multiples of `chunk` also after a resume: a batch then has the same alignment in memory, and
        # so the same rounding in kernels that depend on it
        for start in range(first - first % self.chunk, len(rows), self.chunk):
            stop = min(start + self.chunk, len(rows))
            part = slice(start * width, stop * width)
            images, drawn = self.bank.gather(flat[part], self.recipe.picked(draws[part])), draws[part]
            for number, batch in enumerate(
                self._finish(images, labels[start:stop], drawn, flat[part], epoch, stop - start), start
            ):
                if number >= first:
                    yield batch


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
        self.split = split
        self._upcoming: list[list[int]] = []  # the samples of the batches to read
        self._reader = Reader(
            _Rows(split),
            batch_sampler=self._upcoming,
            num_workers=num_workers,
            pin_memory=pin_memory and self.device.type == "cuda",
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers and num_workers > 0,
            collate_fn=torch.as_tensor,  # which returns the images that are read
            generator=torch.Generator(),  # a DataLoader draws a seed at each start, here not from the global generator
        )

    def close(self) -> None:
        self._reader.close()

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        rows, draws, labels = self._plan(epoch)
        width, picking = rows.shape[1], self.recipe.picking
        self._upcoming[:] = rows[first:].tolist()
        for number, raw in enumerate(self._reader, start=first):
            part = draws[slice(number * width, (number + 1) * width)]
            images = crop_and_flip(
                raw.to(self.device, non_blocking=True), self.recipe.picked(part), picking.crop, picking.crop_fill
            )
            target = labels[number : number + 1].to(self.device, non_blocking=True)
            samples = rows[number].to(self.device, non_blocking=True)
            yield from self._finish(images, target, part, samples, epoch, batches=1)


class ImageDataModule(ExactDataModule[Split]):
    """Train, validation and test loaders over a source of images, equal on any number of devices.

    The arguments are the keys of configs/data/image_folder.yaml, which describes them. `augment` is an `Augment`, or a
    list of transforms and functions `(images, rng) -> images`.
    """

    @validated
    def __init__(
        self,
        source: Source,
        num_classes: Count,
        channels: Count,
        image_size: Count,
        mean: Annotated[Sequence[float], Field(min_length=1)],
        std: Annotated[Sequence[Positive], Field(min_length=1)],
        batch_size: Count,
        eval_batch_size: Count | None = None,
        seed: Seed = 0,
        augment: Augment | Sequence[Callable[..., Any]] | None = None,
        normalize: Literal["batch", "folded"] = "batch",
        loader: Literal["resident", "workers"] = "resident",
        num_workers: NonNegativeInt | None = None,
        pin_memory: bool = False,
        prefetch_factor: Count | None = None,
        persistent_workers: bool = False,
        class_names: Sequence[Name] | None = None,
        folds: Annotated[int, Field(ge=2)] | None = None,
        fold: NonNegativeInt | None = None,
        folder: Name | None = None,
        share: PositiveShare = 1.0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed)
        if loader == "workers" and normalize == "folded":
            raise UserError(
                "data.normalize=folded needs resident images: use data.normalize=batch with data.loader=workers."
            )
        check_folds(folds, fold)
        self.folds, self.fold, self.share = folds, fold, share
        check_members(source, "num_classes", "prepare", "load")
        if folder is not None and str(getattr(source, "folder", None)) != str(Path(folder)):
            raise UserError(
                f"data.folder={folder} is not what the source {type(source).__name__} reads: leave it out, or choose "
                "data=image_folder."
            )
        self.source, self.num_classes = source, num_classes
        self.class_names = check_class_names(class_names, num_classes)
        self.channels, self.image_size = channels, image_size
        self.mean, self.std = list(mean), list(std)
        self.augment = recipe(augment, (channels, image_size, image_size))
        if normalize == "folded":
            check_folded(self.augment)
        self.normalize, self.loader = normalize, loader
        self.reader: dict[str, Any] = {
            "num_workers": num_workers or 0,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        Normalizer(self.mean, self.std, channels)  # raises for a wrong mean or std before a download

    @property
    def selects(self) -> bool:
        return True

    def setup(self, stage: str | None = None) -> None:
        """Open the data; a fit first tests the user's augmentation functions."""
        if stage in ("fit", None):
            device = None if self.trainer is None else self.trainer.strategy.root_device
            try_out(self.augment, (self.channels, self.image_size, self.image_size), device)
        super().setup(stage)

    def open(self) -> dict[str, Split]:
        """Return the source's splits, checked; take missing class names from the source."""
        facts = {name: getattr(self, name) for name in ("num_classes", "channels", "image_size")}
        splits = load_splits(self.source, facts)
        if self.class_names is None:
            self.class_names = check_class_names(getattr(self.source, "class_names", None), self.num_classes)
        if self.folds is not None and self.fold is not None:
            splits = refold(splits, self.folds, self.fold, getattr(self.source, "split_seed", 0), self.class_names)
        if self.share < 1:
            rows = splits.train.rows
            subset = share_rows(splits.train.labels[rows], self.share, getattr(self.source, "split_seed", 0))
            splits = replace(splits, train=replace(splits.train, rows=rows[subset]))
        return {"train": splits.train, "val": splits.val, "test": splits.test}

    def first_images(self, n: int) -> torch.Tensor:
        """Return the first `n` training images, normalized: float32 [n, channels, height, width]."""
        split = self.opened["train"]
        return Normalizer(self.mean, self.std, self.channels)(torch.from_numpy(split.images[split.rows[:n]]))

    @needs_no_trainer
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return a batch on `device` unchanged; move any other as Lightning does."""
        if isinstance(batch, tuple) and isinstance(batch[0], torch.Tensor) and batch[0].device == device:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def build(self, split: Split, device: torch.device, **order: Any) -> ImageLoader:
        """Return the loader that `loader` names; training augments unless the trainer overfits."""
        settings = self.settings(device, order)
        if self.loader == "workers":
            return StreamLoader(split, **self.reader, **settings)
        images, labels = split.read()
        return ResidentLoader(torch.from_numpy(images), torch.from_numpy(labels), normalize=self.normalize, **settings)

    def settings(self, device: torch.device, order: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of every `ImageLoader`, together with those of `order`."""
        augmented = order["train"] and order.get("shuffle", True)
        return {
            "num_classes": self.num_classes,
            "normalizer": Normalizer(self.mean, self.std, self.channels),
            "device": device,
            "augment": self.augment if augmented else None,
            **order,
        }
