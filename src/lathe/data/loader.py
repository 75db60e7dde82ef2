"""Images in the memory of the training device: one uint8 tensor, batches by index."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from lathe.data.augment import Draws, draw, mix
from lathe.data.bank import Bank
from lathe.data.normalize import Normalizer
from lathe.data.order import IGNORE, Batch, EpochLoader
from lathe.data.transforms.recipe import Picked, check_folded, recipe
from lathe.errors import UserError

# Bytes of uint8 images that are picked at once: enough to share the Python cost among small batches, few enough for a
# core's cache.
CHUNK_BYTES = 2**18


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
        augment = self.recipe.fields
        if augment.crop_fill == "reflect" and augment.crop >= min(image_shape[1:]):
            raise UserError(
                f"data.augment.crop={augment.crop} cannot mirror images of {image_shape[1:]} pixels: choose less "
                "than a side."
            )
        assert normalizer is not None or not augment.mixes, "uint8 images cannot be mixed"
        self.image_shape = image_shape
        self.labels = labels
        self.num_classes = num_classes
        self.augment = augment
        self.folded = False  # whether images are normalized before they are picked
        self.fill = (
            normalizer.fill.to(device) if normalizer else torch.zeros(image_shape[0], dtype=torch.uint8, device=device)
        )
        self.device = device
        self.normalizer = normalizer.to(device) if normalizer else None

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
