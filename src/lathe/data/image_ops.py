"""Augmentation operations on batches of uint8 images [n, channels, height, width], with a level each.

They equal Pillow's ImageEnhance and ImageOps on single images to the bit, on any device. Sums are of integers, and all
other rounding is elementwise, so that results do not depend on how a batch is split.
"""

import math

import torch
from torch import Tensor


def grey(images: Tensor) -> Tensor:
    """Return the luma (ITU-R 601) of colour images, int32 [n, 1, height, width]; grey ones unchanged."""
    if images.shape[1] == 1:
        return images.int()
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32, device=images.device)
    return ((images.int() * weights[:, None, None]).sum(1, keepdim=True, dtype=torch.int32) + 0x8000) >> 16


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Interpolate from `other` (`factor` [n] 0) to the image (1) and beyond, clipped to 0 and 255."""
    other = other.float()
    mixed = other + factor.float()[:, None, None, None] * (images.float() - other)
    return mixed.clamp_(0, 255).to(torch.uint8)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black."""
    return blend(images, torch.zeros_like(images), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean grey."""
    pixels = images.shape[-2] * images.shape[-1]
    total = grey(images).sum((1, 2, 3), dtype=torch.int64)
    return blend(images, ((2 * total + pixels) // (2 * pixels))[:, None, None, None], factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image."""
    return blend(images, grey(images), factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by ((1, 1, 1), (1, 5, 1), (1, 1, 1)) / 13, except its border."""
    height, width = images.shape[-2:]
    if min(height, width) < 3:
        return images
    whole = images.int()
    total = 4 * whole[..., 1:-1, 1:-1]
    for y in range(3):
        for x in range(3):
            total = total + whole[..., y : y + height - 2, x : x + width - 2]
    smooth = whole.clone()
    smooth[..., 1:-1, 1:-1] = (2 * total + 13) // 26
    return blend(images, smooth, factor)


def hue(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of colour images by `shift` [n] of a full circle; keeps saturation and value (HSV)."""
    red, green, blue = (images.float() / 255).unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    per = torch.where(chroma > 0, chroma, 1)
    sector = torch.where(
        value == red, (green - blue) / per, torch.where(value == green, 2 + (blue - red) / per, 4 + (red - green) / per)
    )
    turned = sector + 6 * shift.float()[:, None, None]
    found = []
    for offset in (5, 3, 1):
        place = torch.remainder(offset + turned, 6)
        found.append(value - chroma * torch.minimum(place, 4 - place).clamp(0, 1))
    return (torch.stack(found, 1) * 255 + 0.5).clamp_(0, 255).to(torch.uint8)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` [n] of each pixel."""
    mask = 256 - 2 ** (8 - bits.long())
    return images & mask.to(torch.uint8)[:, None, None, None]


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert pixels of at least `threshold` [n]."""
    return torch.where(images >= threshold.float()[:, None, None, None], 255 - images, images)


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel from its least and greatest value to 0 and 255."""
    flat = images.flatten(2)
    low, high = flat.amin(2).double(), flat.amax(2).double()
    span = torch.where(high > low, high - low, 1)
    scale = torch.full_like(span, 255) / span  # a number over a tensor would be rounded twice
    stretched = (flat * scale[..., None] + (-low * scale)[..., None]).clamp_(0, 255).to(torch.uint8)
    return torch.where((high > low)[..., None], stretched, flat).view_as(images)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Equalize the histogram of each channel."""
    flat = images.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))  # of the greatest value
    step = (flat.shape[2] - last) // 255
    table = (counts.cumsum(2) - counts + step // 2) // step.clamp(min=1)
    return torch.where(step > 0, table.clamp(max=255).gather(2, flat), flat).to(torch.uint8).view_as(images)


def warp(images: Tensor, matrix: Tensor) -> Tensor:
    """Move pixel (a x + b y + c, d x + e y + f) to (x, y): nearest neighbour, black outside.

    Coordinates are pixels from the upper left corner to a pixel's middle. `matrix` has a to f, float64 [n, 6].
    """
    height, width = images.shape[-2:]
    a, b, c, d, e, f = matrix[:, :, None, None].unbind(1)
    y = torch.arange(height, dtype=torch.float64, device=images.device)[:, None] + 0.5
    x = torch.arange(width, dtype=torch.float64, device=images.device) + 0.5
    column, row = (a * x + b * y + c).floor(), (d * x + e * y + f).floor()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = torch.where(inside, row * width + column, 0).long().flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index).view_as(images) * inside[:, None]


def _matrix(level: Tensor, **changes: Tensor) -> Tensor:
    one, zero = torch.ones_like(level), torch.zeros_like(level)
    return torch.stack(list(({"a": one, "b": zero, "c": zero, "d": zero, "e": one, "f": zero} | changes).values()), 1)


def shear_x(images: Tensor, level: Tensor) -> Tensor:
    """Shift rows to the left, by `level` [n] times their distance from the top."""
    return warp(images, _matrix(level, b=level))


def shear_y(images: Tensor, level: Tensor) -> Tensor:
    """Shift columns up, by `level` [n] times their distance from the left."""
    return warp(images, _matrix(level, d=level))


def translate_x(images: Tensor, pixels: Tensor) -> Tensor:
    """Shift to the right, by whole pixels."""
    return warp(images, _matrix(pixels, c=-pixels.trunc()))


def translate_y(images: Tensor, pixels: Tensor) -> Tensor:
    """Shift down, by whole pixels."""
    return warp(images, _matrix(pixels, f=-pixels.trunc()))


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate counter-clockwise about the centre."""
    y, x = (side / 2 for side in images.shape[-2:])
    cos, sin = torch.cos(degrees * (math.pi / 180)), torch.sin(degrees * (math.pi / 180))
    return warp(images, _matrix(cos, a=cos, b=-sin, c=x - cos * x + sin * y, d=sin, e=cos, f=y - sin * x - cos * y))
