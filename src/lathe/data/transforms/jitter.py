"""Colour jitter."""

from collections.abc import Callable
from typing import Annotated

from pydantic import Field
from torch import Tensor

from lathe.config.types import NonNegative
from lathe.config.validation import validated
from lathe.data.random import Rng
from lathe.data.transforms import ops
from lathe.data.transforms.base import Transform
from lathe.errors import ArgumentError

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": ops.brightness,
    "contrast": ops.contrast,
    "saturation": ops.saturation,
    "hue": ops.hue,
}


class ColorJitter(Transform):
    """Changes brightness, contrast, saturation and hue, in random order per sample (as torchvision's).

    Args:
        brightness: the factor is uniform from 1 - brightness, at least 0, to 1 + brightness; 0 is off.
        contrast: as for brightness.
        saturation: as for brightness; for RGB images.
        hue: the shift is uniform from -hue to hue of a full circle; 0 is off; for RGB images.
    """

    uint8_only = True
    is_tested = True

    @validated
    def __init__(
        self,
        brightness: NonNegative = 0.0,
        contrast: NonNegative = 0.0,
        saturation: NonNegative = 0.0,
        hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0,
    ) -> None:
        self.widths = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
        if not any(self.widths.values()):
            raise ArgumentError("brightness=0, and contrast, saturation and hue as well: give one of them.")

    def check(self, channels: int, height: int, width: int) -> None:
        coloured = [name for name in ("saturation", "hue") if self.widths[name]]
        if channels != 3 and coloured:
            raise ArgumentError(f"{coloured[0]} changes RGB images alone, and data.channels={channels}: leave it out.")
        if channels not in (1, 3) and self.widths["contrast"]:
            raise ArgumentError(f"contrast takes grey or RGB images, and data.channels={channels}: leave it out.")

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        u, order = rng.uniform(4), rng.uniform(4).argsort(dim=1, stable=True)
        images = images.clone()
        for place in range(4):
            for number, (name, operation) in enumerate(OPS.items()):
                rows = (order[:, place] == number).nonzero()[:, 0]
                if self.widths[name] and len(rows):
                    images[rows] = operation(images[rows], self.level(name, u[rows, number]))
        return images

    def level(self, name: str, u: Tensor) -> Tensor:
        """Return the factor or shift for a number in [0, 1)."""
        width = self.widths[name]
        low, high = (-width, width) if name == "hue" else (max(0.0, 1 - width), 1 + width)
        return low + (high - low) * u
