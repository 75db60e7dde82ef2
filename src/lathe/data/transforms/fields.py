"""Transforms that are fields of `Augment` as well: both ways of writing them give the same bits."""

from dataclasses import dataclass
from typing import Any, Literal

from lathe.config.types import Count, Positive
from lathe.config.validation import validated
from lathe.errors import ArgumentError


class Field:
    """A transform that the loaders have built in; its arguments become fields of `Augment`."""

    mixes = False

    def fields(self) -> dict[str, Any]:
        """The fields of `Augment` that say the same."""
        raise NotImplementedError

    def check(self, channels: int, height: int, width: int) -> None:
        """Raises ArgumentError if it can't be used on images of this shape."""


def check_side(name: str, size: int, height: int, width: int) -> None:
    """Raises ArgumentError for a square with sides longer than an image's."""
    if size > min(height, width):
        raise ArgumentError(
            f"{name}={size} is a square larger than images of {height} x {width} pixels: choose a side of "
            f"{min(height, width)} at most."
        )


@validated
@dataclass(frozen=True)
class RandomCrop(Field):
    """Pads each image and cuts a window of the original size out of it.

    Args:
        padding: pixels on each side.
        fill: what the padding holds: black pixels, or the image mirrored at its edge.
    """

    padding: Count
    fill: Literal["zero", "reflect"] = "zero"

    def fields(self) -> dict[str, Any]:
        return {"crop": self.padding, "crop_fill": self.fill}

    def check(self, channels: int, height: int, width: int) -> None:
        if self.padding >= min(height, width):
            what = "cannot mirror" if self.fill == "reflect" else "leaves nothing in some windows of"
            raise ArgumentError(
                f"padding={self.padding} {what} images of {height} x {width} pixels: choose less than a side."
            )


@validated
@dataclass(frozen=True)
class RandomFlip(Field):
    """Left to right.

    Args:
        how: "random" tosses a coin for each sample and epoch; "alternating" as `Augment` has it.
    """

    how: Literal["random", "alternating"] = "random"

    def fields(self) -> dict[str, Any]:
        return {"flip": self.how}


@validated
@dataclass(frozen=True)
class Cutout(Field):
    """Sets a square at a random centre, cut off at the border, to the mean colour (DeVries and Taylor,
    arXiv:1708.04552).

    Args:
        size: side in pixels.
    """

    size: Count

    def fields(self) -> dict[str, Any]:
        return {"cutout": self.size}

    def check(self, channels: int, height: int, width: int) -> None:
        check_side("size", self.size, height, width)


@validated
@dataclass(frozen=True)
class Mixup(Field):
    """Weighted sums of two images and of their labels (Zhang et al., arXiv:1710.09412); comes last.

    Args:
        alpha: of the Beta(alpha, alpha) from which each sample's share is drawn.
    """

    alpha: Positive
    mixes = True

    def fields(self) -> dict[str, Any]:
        return {"mixup": self.alpha}


@validated
@dataclass(frozen=True)
class CutMix(Field):
    """Pastes a box of another image (Yun et al., arXiv:1905.04899); comes last. Beside `Mixup`, each sample takes
    either with probability one half.

    Args:
        alpha: of the Beta(alpha, alpha) from which the share outside the box is drawn.
    """

    alpha: Positive
    mixes = True

    def fields(self) -> dict[str, Any]:
        return {"cutmix": self.alpha}
