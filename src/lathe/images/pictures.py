"""Images as arrays of pixels, read and resized alike for training, prediction and serving. No torch."""

from typing import IO, Any

import numpy as np
from PIL import Image, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

Array = np.ndarray[Any, Any]

# Not Image.open, which tries all its formats, and warns about large images instead of raising.
READERS: dict[str, type[ImageFile.ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "BMP": BmpImageFile,
    "WEBP": WebPImageFile,
}
SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}
MOST = 2**28  # pixels of an image in a folder; a small file with more is an accident or an attack
COLOURS = {1: "L", 3: "RGB"}
SCANS = 100  # most scans of a JPEG; a progressive one has about ten, and its thumbnail some more
ORIENTATION, TURNED = (
    0x0112,
    (5, 6, 7, 8),
)  # the EXIF tag of the camera's orientation, and its values that swap height and width


class PictureError(ValueError):
    """A problem with an image; the message is the predicate of a sentence that names the file."""


class TooLarge(PictureError):
    """The image has too many pixels."""


def kind_of(start: bytes) -> str | None:
    """Return the kind of a file, a key of `READERS`, from its first 12 bytes; None if unknown."""
    if start[8:12] == b"WEBP":
        return "WEBP"
    beginnings = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"BM": "BMP"}
    return next((kind for beginning, kind in beginnings.items() if start.startswith(beginning)), None)


def open_picture(file: IO[bytes], kind: str, most: int) -> ImageFile.ImageFile:
    """Open an image: read its header, not its pixels.

    `kind` is a key of `READERS`, `most` the allowed number of pixels.

    Raises:
        PictureError: it is of another kind, damaged, or too large.
    """
    try:
        image = READERS[kind](file)
    except Exception as error:  # Pillow's parsers raise many types
        raise PictureError(f"can't be read as a {kind} image") from error
    width, height = image.size
    if width * height > most:
        raise TooLarge(f"has {height} x {width} pixels, more than {most}")
    frames = getattr(image, "n_frames", 1)  # only formats that may be animated have it
    if frames > 1:
        raise PictureError(f"is animated, {frames} frames, expected one picture")
    return image


def picture_size(file: IO[bytes], kind: str, most: int) -> tuple[int, int]:
    """Return height and width by the header, after the EXIF rotation; errors as in `open_picture`."""
    image = open_picture(file, kind, most)
    width, height = image.size
    turned = "exif" in image.info and _orientation(image) in TURNED
    return (width, height) if turned else (height, width)


def read_picture(file: IO[bytes], kind: str, channels: int, most: int) -> Array:
    """Return pixels uint8 `[channels, height, width]`, for 1 channel (grey) or 3 (red, green, blue).

    The EXIF orientation is applied, transparency is composed onto white, and 16 bits become the upper 8.

    Raises:
        PictureError: as in `open_picture`, or the pixels are damaged.
    """
    first = open_picture(file, kind, most)
    # a scan may have only 33 bytes, and each one takes a pass over all pixels
    if kind == "JPEG" and _scans(file) > SCANS:
        raise PictureError(f"has more than {SCANS} scans, which no encoder writes")
    try:
        first.verify()  # checks the checksums, which decoding ignores; a verified image has to be reopened
        file.seek(0)
        image: Image.Image = READERS[kind](file)
        return as_seen(image, channels)
    except Exception as error:
        raise PictureError(f"can't be read as a {kind} image") from error


def as_seen(image: Image.Image, channels: int) -> Array:
    """Return the pixels of an image opened by Pillow, converted as in `read_picture`."""
    image = ImageOps.exif_transpose(image) if _orientation(image) != 1 else image
    if image.mode.startswith("I"):  # 16 bits of grey; convert("L") would clip all above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    pixels = np.asarray(image.convert(COLOURS[channels]))
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _scans(file: IO[bytes]) -> int:
    """Count the scans; these two bytes cannot occur within one."""
    file.seek(0)
    found = file.read().count(b"\xff\xda")
    file.seek(0)
    return found


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # an image with damaged EXIF data is still readable
        return 1


def scaled(picture: Array, size: tuple[int, int], squash: bool = False) -> Array:
    """Crop and resize uint8 pixels `[channels, height, width]` to `size` (height, width).

    The window is the largest of that shape in the centre; `squash` takes the whole image. Pillow's bilinear filter
    antialiases when it shrinks. `lathe.export.inputs` does the same in the graph, without `squash`.
    """
    if picture.shape[1:] == size:
        return picture
    (tall, wide), (height, width) = picture.shape[1:], size
    step = min(tall / height, wide / width)  # pixels of the image per pixel of the result
    # rounding may make one of them negative
    top, left = max(0.0, (tall - step * height) / 2), max(0.0, (wide - step * width) / 2)
    window: tuple[float, float, float, float] = (0, 0, wide, tall)
    if not squash:
        window = (left, top, min(left + step * width, wide), min(top + step * height, tall))
    kept = Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(plane).resize((width, height), kept, box=window)) for plane in picture])


def arranged(
    array: Array, channels: int, size: tuple[int, int] | None = None, one: bool | None = None
) -> tuple[Array, bool] | None:
    """Return a view `[n, channels, height, width]` of images, and whether it was a single image.

    None if the array has no such layout. Layouts are tried in this order: [n, channels, height, width], [n, height,
    width, channels], [channels, height, width], [height, width, channels], [n, height, width], [height, width]; the
    last two for one channel. `size` is the required height and width, None for any. `one` True allows only layouts of a
    single image, False only those of several.
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
