"""Transforms that are also fields of `Augment`; both forms give the same bits."""

from dataclasses import dataclass
from typing import Any, Literal

from lathe.config.types import Count, Positive
from lathe.config.validation import validated
from lathe.errors import ArgumentError


class Field:
    """A transform that the loaders have built in; its arguments become fields of `Augment`."""

    mixes = False

    def fields(self) -> dict[str, Any]:
        """Return the equivalent fields of `Augment`."""
        raise NotImplementedError

    def check(self, channels: int, height: int, width: int) -> None:
        """Raise ArgumentError if it can't be used on images of this shape."""


def check_side(name: str, size: int, height: int, width: int) -> None:
    """Raise ArgumentError for a square larger than the image."""
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
        fill: padding with black pixels, or with the mirrored image.
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
    """Flips images left to right.

    Args:
        how: "random" draws for each sample and epoch; "alternating" is as in `Augment`.
    """

    how: Literal["random", "alternating"] = "random"

    def fields(self) -> dict[str, Any]:
        return {"flip": self.how}


@validated
@dataclass(frozen=True)
class Cutout(Field):
    """Sets a random square, clipped at the border, to the mean colour (DeVries et al., arXiv:1708.04552).

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
        alpha: of the Beta(alpha, alpha) of each sample's weight.
    """

    alpha: Positive
    mixes = True

    def fields(self) -> dict[str, Any]:
        return {"mixup": self.alpha}


@validated
@dataclass(frozen=True)
class CutMix(Field):
    """Pastes a box of another image (Yun et al., arXiv:1905.04899); comes last.

    With `Mixup` too, each sample takes either with probability one half.

    Args:
        alpha: of the Beta(alpha, alpha) of the share outside the box.
    """

    alpha: Positive
    mixes = True

    def fields(self) -> dict[str, Any]:
        return {"cutmix": self.alpha}
