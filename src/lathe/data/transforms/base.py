"""Interface of batched transforms."""

from abc import ABC, abstractmethod

from torch import Tensor

from lathe.data.random import Rng


class Transform(ABC):
    """A transform of a batch of training images; any function `(images, rng) -> images` works too.

    `images` are [n, channels, height, width] from 0 to 255: uint8, or float32 after a function that returns it. The
    result has the same shape and dtype, or is float32. Random numbers must come from `rng`, and an image's result must
    not depend on the others in the batch, so that neither devices nor interruptions change it.
    """

    uint8_only = False  # True if it does not take float32
    is_tested = False  # for Lathe's transforms: tests replace the check at the start of a run

    @abstractmethod
    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        """Return the transformed images."""

    def check(self, channels: int, height: int, width: int) -> None:  # noqa: B027 (most take all images)
        """Raise ArgumentError if it can't be used on images of this shape."""
