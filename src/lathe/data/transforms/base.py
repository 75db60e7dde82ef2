"""What a batched transform is."""

from abc import ABC, abstractmethod

from torch import Tensor

from lathe.data.random import Rng


class Transform(ABC):
    """What is done to a batch of training images on the device; any function `(images, rng) -> images` does as well.

    `images` are [n, channels, height, width] from 0 to 255: uint8, or float32 once a function has made them so. What
    comes back has the same shape and dtype, or is float32. Numbers are drawn from `rng` alone, and what is done to an
    image does not depend on the others in the batch, so that neither devices nor interruptions change it.
    """

    uint8_only = False  # True if it does not take float32
    is_tested = False  # of the class itself: Lathe's tests check what is else checked at the start of a run

    @abstractmethod
    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        """The images as they are trained on."""

    def check(self, channels: int, height: int, width: int) -> None:  # noqa: B027 (most take all images)
        """Raises ArgumentError if it can't be used on images of this shape."""
