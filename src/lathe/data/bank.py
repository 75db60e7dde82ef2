"""Images kept on the training device, from which a batch of crops and flips is one index operation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lathe.data.augment import Draws, pad

Slabs = np.ndarray[Any, np.dtype[np.void]]

CACHED_BYTES = 2**19  # of slabs that are compacted at once, small enough to stay in a core's cache


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
        self,
        images: Tensor,
        padding: int,
        fill: str,
        flips: bool,
        convert: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.n, self.channels, self.height, self.width = images.shape
        self.padding = padding
        padded = pad(images, padding, fill) if padding else images
        padded = convert(padded) if convert else padded
        self.images = _empty((self.n * (1 + flips), *padded.shape[1:]), padded)
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
        return self._gather_slabs(self.windows, rows, draws.top, draws.left)

    def _gather_slabs(self, windows: Slabs, rows: Tensor, top: Tensor, left: Tensor) -> Tensor:
        picked = torch.empty((len(rows), self.channels, self.height, self.width), dtype=self.images.dtype)
        row_type = f"V{self.width * self.images.element_size()}"
        result = picked.numpy().view(row_type)[..., 0]
        _, channel, row, _ = (s * self.images.element_size() for s in self.images.stride())
        step = max(1, CACHED_BYTES // windows.itemsize)
        index = rows.numpy(), top.numpy(), left.numpy()
        for start in range(0, len(rows), step):
            slabs = windows[tuple(i[start : start + step] for i in index)]
            shape, strides = (len(slabs), self.channels, self.height), (windows.itemsize, channel, row)
            result[start : start + step] = np.ndarray(shape, row_type, slabs, strides=strides)
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


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    # NumPy asks Linux for huge pages, torch does not: 1.1 times the images/s in random access to some 100 MB
    return torch.from_numpy(np.empty(shape, dtype=like[:0].numpy().dtype))
