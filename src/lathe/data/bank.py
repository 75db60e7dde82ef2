"""Images that stay on the training device, from which a batch of crops and flips is one index operation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from lathe.data.augment import Draws, pad

Windows = np.ndarray[Any, np.dtype[Any]]


class Bank:
    """Padded originals, and behind them their mirror images, seen through all windows of the original size.

    The view has the shape [images, offsets, offsets, channels, height, width] and costs no memory; picking (image, top, left)
    from it copies exactly the pixels of the batch. Memory: n x channels x (height + 2 padding) x (width + 2 padding) bytes, twice
    with flips.

    Args:
        images: [n, channels, height, width], uint8 or (normalisation folded in) float32, on the device where batches are wanted.
        padding: pixels on each side; 0 gives no crops.
        fill: "zero" or "reflect".
        flips: whether mirror images are wanted.
    """

    def __init__(self, images: Tensor, padding: int, fill: str, flips: bool) -> None:
        self.n, channels, height, width = images.shape
        padded = pad(images, padding, fill) if padding else images
        self.images = (torch.cat([padded, padded.flip(-1)]) if flips else padded).contiguous()
        self.shape = (len(self.images), 2 * padding + 1, 2 * padding + 1, channels, height, width)
        self.windows = self._windows() if padding else None

    def convert(self, to_float: Callable[[Tensor], Tensor]) -> None:
        """Replaces all images, padding included, by a function of them that keeps their shape."""
        self.images = to_float(self.images)
        self.windows = self._windows() if self.windows is not None else None

    def _windows(self) -> Tensor | Windows:
        image, channel, row, pixel = self.images.stride()
        strides = (image, row, pixel, channel, row, pixel)
        if self.images.device.type != "cpu":
            return self.images.as_strided(self.shape, strides)
        # NumPy copies a picked window row by row, torch pixel by pixel: 2.5 times the images/s
        size = self.images.element_size()
        return as_strided(self.images.numpy(), self.shape, tuple(s * size for s in strides), writeable=False)

    def gather(self, rows: Tensor, draws: Draws) -> Tensor:
        """Images `rows` (int64 [b]) as `draws` (of b samples) has them cropped and flipped; [b, channels, height, width]."""
        if draws.flip is not None:
            rows = rows + self.n * draws.flip
        if self.windows is None or draws.top is None or draws.left is None:
            return self.images.index_select(0, rows)
        if isinstance(self.windows, np.ndarray):
            return torch.from_numpy(self.windows[rows.numpy(), draws.top.numpy(), draws.left.numpy()])
        return self.windows[rows, draws.top, draws.left]
