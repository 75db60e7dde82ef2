"""Images that fit in memory: one uint8 tensor on the training device, batches by index."""

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

# Bytes of uint8 images that are picked at once: small batches share the Python cost, and all stays within a core's
# cache.
CHUNK_BYTES = 2**18


class ImageLoader(EpochLoader):
    """What both image loaders share: the epoch's decisions, and everything after the crop.

    Yields (x, y): x float32 [batch, channels, height, width], y int64 [batch], or float32 class probabilities [batch,
    classes] when the augmentation mixes samples.

    Args:
        image_shape: channels, height, width.
        labels: int64 [n].
        num_classes: used by mixed targets.
        normalizer: makes float32 out of uint8; None yields uint8 (and cannot mix).
        augment: `Augment`, or a list of transforms and functions; None switches all of it off.
        device: where batches are wanted.
        order: as `EpochLoader` has it: batch_size, seed, rank, world_size, train, shuffle, limit.

    Raises:
        UserError: as `EpochLoader`, and for a mirrored padding that is not smaller than the image.
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
        self.folded = False  # whether images are normalised already when they are picked
        self.fill = (
            normalizer.fill.to(device) if normalizer else torch.zeros(image_shape[0], dtype=torch.uint8, device=device)
        )
        self.device = device
        self.normalizer = normalizer.to(device) if normalizer else None

    def _plan(self, epoch: int) -> tuple[Tensor, Draws, Tensor]:
        """For this rank's whole epoch: samples [batches, width] and labels of the same shape, both on the CPU, and
        their draws.

        `width` is the local batch, and one more with mixing. Draws are flat, [batches * width], on the device.
        """
        rows, counts = self.rank_rows(epoch, extra=int(self.augment.mixes))
        table = draw(self.augment, self.seed, epoch, self.n, *self.image_shape[1:])
        return rows, table[rows.flatten()].to(self.device), self.labels[rows].where(counts, IGNORE)

    def _finish(
        self, images: Tensor, labels: Tensor, draws: Draws, samples: Tensor, epoch: int, batches: int
    ) -> Iterator[Batch]:
        """Picked images of whole batches [batches * width, ...] to batches: what else is listed, normalisation,
        mixing.
        """
        images = self.recipe(images, Picked(self.seed, epoch, samples, draws, self.fill))
        if self.normalizer is not None and not self.folded:
            images = self.normalizer(images)
        if not self.augment.mixes:
            return zip(images.view(batches, -1, *self.image_shape).unbind(), labels.unbind(), strict=True)
        # each sample's partner is the next one: leave out the last of a batch for the one, the first for the other
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
    """Batches out of images that live on the training device, in a few index operations for several batches at a time.

    Args:
        images: uint8 [n, channels, height, width].
        labels: int64 [n].
        normalize: "batch" keeps uint8 images and normalises each batch; "folded" normalises once and keeps float32
            images, which takes four times the memory and spares that step. Same bits.
        settings: as `ImageLoader` has them.

    Raises:
        UserError: as `ImageLoader`.
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
        # folded after the padding, so that the padding is black in both forms
        picking = self.recipe.picking
        self.bank = Bank(images.to(self.device), picking.crop, picking.crop_fill, picking.flip != "none", folded)
        self.chunk = max(1, CHUNK_BYTES // (self.local_batch_size * channels * height * width))

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        rows, draws, labels = self._plan(epoch)
        width = rows.shape[1]
        flat, labels = rows.flatten().to(self.device), labels.to(self.device)
        # chunks start at multiples of `chunk` also after a resume: a batch then has the same place in memory, and so
        # the same rounding # in kernels that look at alignment
        for start in range(first - first % self.chunk, len(rows), self.chunk):
            stop = min(start + self.chunk, len(rows))
            part = slice(start * width, stop * width)
            images, drawn = self.bank.gather(flat[part], self.recipe.picked(draws[part])), draws[part]
            for number, batch in enumerate(
                self._finish(images, labels[start:stop], drawn, flat[part], epoch, stop - start), start
            ):
                if number >= first:
                    yield batch
