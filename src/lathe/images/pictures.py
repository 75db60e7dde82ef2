"""Pictures as arrays of pixels: image files as whoever looks at them sees them, their size, and the layouts of arrays.
Imports no torch.

Training data, predictions and requests are all read and brought to size here, so that a net is asked about what it was
trained on (law 6).
"""

from typing import IO, Any

import numpy as np
from PIL import Image, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

Array = np.ndarray[Any, Any]

# Its classes and not Image.open, which tries all formats that it knows, and warns of large pictures instead of refusing
# them.
READERS: dict[str, type[ImageFile.ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "BMP": BmpImageFile,
    "WEBP": WebPImageFile,
}
SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}
MOST = 2**28  # pixels of a picture in a folder; a small file that unpacks to more is an accident or a trap
COLOURS = {1: "L", 3: "RGB"}
SCANS = 100  # of a JPEG at most: a progressive one has ten or so, and its thumbnail some of its own
ORIENTATION, TURNED = (
    0x0112,
    (5, 6, 7, 8),
)  # the EXIF tag of how the camera was held, and its values that swap height and width


class PictureError(ValueError):
    """What is wrong with a picture, as the predicate of a sentence that names it."""


class TooLarge(PictureError):
    """The picture has more pixels than it may have."""


def kind_of(start: bytes) -> str | None:
    """The kind of a file with these first bytes (12 are enough), a key of `READERS`, or None."""
    if start[8:12] == b"WEBP":
        return "WEBP"
    beginnings = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"BM": "BMP"}
    return next((kind for beginning, kind in beginnings.items() if start.startswith(beginning)), None)


def open_picture(file: IO[bytes], kind: str, most: int) -> ImageFile.ImageFile:
    """A picture whose header is read and whose pixels are not; `kind` is a key of `READERS`, `most` the pixels that it
    may have.

    Raises:
        PictureError: it is of another kind, damaged, or too large.
    """
    try:
        image = READERS[kind](file)
    except (
        Exception
    ) as error:  # Pillow's parsers raise OSError, SyntaxError, ValueError, struct.error, IndexError and more
        raise PictureError(f"can't be read as a {kind} image") from error
    width, height = image.size
    if width * height > most:
        raise TooLarge(f"has {height} x {width} pixels, more than {most}")
    frames = getattr(image, "n_frames", 1)  # of formats that may be animated
    if frames > 1:
        raise PictureError(f"is animated, {frames} frames, expected one picture")
    return image


def picture_size(file: IO[bytes], kind: str, most: int) -> tuple[int, int]:
    """Height and width as the header tells them, turned as the camera was held.

    Raises:
        PictureError: as `open_picture`.
    """
    image = open_picture(file, kind, most)
    width, height = image.size
    turned = "exif" in image.info and _orientation(image) in TURNED
    return (width, height) if turned else (height, width)


def read_picture(file: IO[bytes], kind: str, channels: int, most: int) -> Array:
    """Pixels uint8 `[channels, height, width]` of a picture, for 1 channel (grey) or 3 (red, green, blue).

    It is turned as the camera was held; what is transparent lies on white, as on paper; 16 bits become the upper 8.

    Raises:
        PictureError: as `open_picture`, or its pixels are damaged.
    """
    first = open_picture(file, kind, most)
    # each scan of a progressive JPEG takes a pass over all pixels, and may be 33 bytes
    if kind == "JPEG" and _scans(file) > SCANS:
        raise PictureError(f"has more than {SCANS} scans, which no encoder writes")
    try:
        first.verify()  # checksums, which decoding does not look at; a verified picture has to be opened again
        file.seek(0)
        image: Image.Image = READERS[kind](file)
        return as_seen(image, channels)
    except Exception as error:
        raise PictureError(f"can't be read as a {kind} image") from error


def as_seen(image: Image.Image, channels: int) -> Array:
    """Pixels uint8 `[channels, height, width]` of an image that Pillow opened: turned, on white, in 8 bits, as
    `read_picture` says.
    """
    image = ImageOps.exif_transpose(image) if _orientation(image) != 1 else image
    if image.mode.startswith("I"):  # 16 bits of grey; convert("L") would make 255 of all above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    pixels = np.asarray(image.convert(COLOURS[channels]))
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _scans(file: IO[bytes]) -> int:
    """How often a scan begins; within one, these two bytes can't stand."""
    file.seek(0)
    found = file.read().count(b"\xff\xda")
    file.seek(0)
    return found


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged notes of the camera do not make the picture unreadable
        return 1


def scaled(picture: Array, size: tuple[int, int], squash: bool = False) -> Array:
    """uint8 pixels `[channels, height, width]` at height and width `size`: the largest window of that shape in the
    middle, or with `squash` the whole picture whatever its shape, scaled by Pillow's bilinear filter, which averages
    when it shrinks. `lathe.export.preprocess` is the same in the graph, without `squash`."""
    if picture.shape[1:] == size:
        return picture
    (tall, wide), (height, width) = picture.shape[1:], size
    step = min(tall / height, wide / width)  # pixels of the picture to one of the result
    # not below 0, where one of both is but for the last digit
    top, left = max(0.0, (tall - step * height) / 2), max(0.0, (wide - step * width) / 2)
    window: tuple[float, float, float, float] = (0, 0, wide, tall)
    if not squash:
        window = (left, top, min(left + step * width, wide), min(top + step * height, tall))
    kept = Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(plane).resize((width, height), kept, box=window)) for plane in picture])


def arranged(
    array: Array, channels: int, size: tuple[int, int] | None = None, one: bool | None = None
) -> tuple[Array, bool] | None:
    """A view `[n, channels, height, width]` of pictures in any usual layout, and whether it was a single picture; None
    if it is no such array.

    Layouts are tried in this order: [n, channels, height, width], [n, height, width, channels], [channels, height,
    width], [height, width, channels], [n, height, width], [height, width]; the last two for one channel.

    Args:
        array: pixels of any type.
        channels: of each picture.
        size: height and width that the pictures must have, or None for any.
        one: True takes layouts of a single picture alone, False those of several alone, None both.
    """
    found: list[tuple[Array, bool]] = []
    if array.ndim == 4:
        found = [(array, False), (array.transpose(0, 3, 1, 2), False)]
    elif array.ndim == 3:
        found = [(array[None], True), (array.transpose(2, 0, 1)[None], True), (array[:, None], False)]
    elif array.ndim == 2:
        found = [(array[None, None], True)]
    for pictures, single in found:
        fits = pictures.shape[1] == channels and size in (None, pictures.shape[2:]) and pictures.size > 0
        if fits and one in (None, single):
            return pictures, single
    return None
