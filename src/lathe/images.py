"""Images as arrays of pixels, read and resized alike for training, prediction and serving. Imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps
from PIL import ImageFile as PillowFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from lathe.errors import UserError, require

Array = np.ndarray[Any, Any]

# Not Image.open, which tries all its formats, and warns about large images instead of raising.
READERS: dict[str, type[PillowFile.ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "BMP": BmpImageFile,
    "WEBP": WebPImageFile,
}
SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}
MOST = 2**28  # pixels of an image in a folder; a small file with more is an accident or an attack
COLOURS = {1: "L", 3: "RGB"}
SCANS = 100  # most scans of a JPEG; a progressive one has about ten, and its thumbnail some more
ORIENTATION = 0x0112  # the EXIF tag of the camera's orientation
TURNED = (5, 6, 7, 8)  # its values that swap height and width


class PictureError(ValueError):
    """A problem with an image; the message is the predicate of a sentence that names the file."""


class TooLarge(PictureError):
    """An image has too many pixels."""


def kind_of(start: bytes) -> str | None:
    """Return the kind of a file, a key of `READERS`, from its first 12 bytes; None if unknown."""
    if start[8:12] == b"WEBP":
        return "WEBP"
    beginnings = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"BM": "BMP"}
    return next((kind for beginning, kind in beginnings.items() if start.startswith(beginning)), None)


def open_picture(file: IO[bytes], kind: str, most: int) -> PillowFile.ImageFile:
    """Open an image of a kind in `READERS` with at most `most` pixels: read its header, not its pixels.

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
    if kind == "JPEG":  # a scan may have only 33 bytes, and each one takes a pass over all pixels
        file.seek(0)
        scans = file.read().count(b"\xff\xda")  # these bytes cannot occur within a scan
        file.seek(0)
        if scans > SCANS:
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


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # an image with damaged EXIF data is still readable
        return 1


def scaled(picture: Array, size: tuple[int, int], squash: bool = False) -> Array:
    """Crop and resize uint8 pixels `[channels, height, width]` to `size` (height, width).

    The window is the largest of that shape in the centre; `squash` takes the whole image. Pillow's bilinear filter
    antialiases when it shrinks. `lathe.export.preprocess` does the same in the graph, without `squash`.
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
    bilinear = Image.Resampling.BILINEAR
    return np.stack(
        [np.asarray(Image.fromarray(plane).resize((width, height), bilinear, box=window)) for plane in picture]
    )


def arranged(
    array: Array, channels: int, size: tuple[int, int] | None = None, one: bool | None = None
) -> tuple[Array, bool] | None:
    """Return a view `[n, channels, height, width]` of images, and whether it was a single image.

    None if the array has no such layout. Layouts are tried in this order: [n, channels, height, width], [n, height,
    width, channels], [channels, height, width], [height, width, channels], [n, height, width], [height, width]; the
    last two for one channel. `size` is the required height and width, None for any. `one` True allows only layouts of a
    single image, False only those of several.
    """
    layouts: list[tuple[Array, bool]] = []
    if array.ndim == 4:
        layouts = [(array, False), (array.transpose(0, 3, 1, 2), False)]
    elif array.ndim == 3:
        layouts = [(array[None], True), (array.transpose(2, 0, 1)[None], True), (array[:, None], False)]
    elif array.ndim == 2:
        layouts = [(array[None, None], True)]
    for pictures, single in layouts:
        fits = pictures.shape[1] == channels and size in (None, pictures.shape[2:]) and pictures.size > 0
        if fits and one in (None, single):
            return pictures, single
    return None


HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether it is in Fortran order, and dtype; `file` is left at the values.

    Raises:
        ValueError: it is not a .npy file.
    """
    try:
        shape, fortran, dtype = HEADERS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # the parser of the header's Python literal raises many types
        raise ValueError("this is no header of a .npy file") from error
    if not all(type(side) is int for side in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, fortran, dtype


@dataclass(frozen=True)
class ImageFile:
    """A file with `count` images of one `size` (height, width); `opened` memory-maps a .npy file."""

    path: Path
    channels: int
    size: tuple[int, int]
    count: int = 1
    opened: Callable[[], Array] | None = None  # an open map costs a file descriptor, and a folder may need too many
    numbered: bool = False  # images are named by their number, not by the file

    @property
    def names(self) -> Iterator[str]:
        """Return the images' names: the file's, with an index if it has several."""
        if self.numbered:
            return map(str, range(self.count))
        return iter((self.path.name,)) if self.count == 1 else (f"{self.path.name}[{i}]" for i in range(self.count))

    def read(self) -> Iterator[Array]:
        """Yield the images, uint8 `[channels, height, width]` each.

        Raises:
            UnreadableError: the pixels are damaged.
        """
        if self.opened is not None:
            array = self.opened()
            require(len(array) == self.count, f"input={self.path} has changed since its header was read: start again.")
            yield from map(np.ascontiguousarray, array)
            return
        try:
            pixels = read_image(self.path, self.channels)
        except (PictureError, OSError) as error:
            raise _unreadable(self.path, error) from error
        yield pixels


class UnreadableError(UserError):
    """A file is not an image, or is damaged."""


class LeftOut:
    """At most `most` (option `key`) unreadable files to leave out; `others` are a folder's non-images."""

    def __init__(self, most: int = 0, key: str = "") -> None:
        self.most, self.key, self.files, self.others = most, key, list[Path](), list[str]()

    def add(self, path: Path, error: UnreadableError) -> None:
        """Leave out a file; raise `error` if `most` is reached."""
        if len(self.files) == self.most:
            way = f", or set {self.key} to how many may be left out." if self.key else "."
            raise UnreadableError(str(error).rstrip(".") + way) from error
        self.files.append(path)


def find_images(path: Path, channels: int, left_out: LeftOut | None = None) -> list[ImageFile]:
    """Return the images and .npy files of a folder by name, or those of a single file.

    Images of a single .npy file are named by their number. Subfolders are not read. Unreadable files and other entries
    of a folder go to `left_out`.
    """
    if not path.is_dir():
        require(path.is_file(), f"input={path}: there is no such file or folder.")
        is_image = path.suffix.lower() in SUFFIXES
        return [open_image(path, channels) if is_image else open_array(path, channels, one=False)]
    wanted = (*SUFFIXES, ".npy")
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.suffix.lower() in wanted]
    inner = sum(entry.is_dir() for entry in entries) if not files else 0
    if left_out is not None:
        left_out.others = [entry.name for entry in entries if entry.suffix.lower() not in wanted]
    below = f" itself, and its {inner} subfolders are not read: give one of them" if inner else ""
    require(bool(files), f"input={path}: the folder has no {', '.join(wanted)} files{below}.")
    opened = []
    for file in files:
        try:
            opened.append((open_array if file.suffix.lower() == ".npy" else open_image)(file, channels))
        except UnreadableError as error:
            if left_out is None:
                raise
            left_out.add(file, error)
    return opened


def open_image(path: Path, channels: int) -> ImageFile:
    """Read the header of an image file; raise UnreadableError if it is not an image."""
    named = SUFFIXES.get(path.suffix.lower())
    require(named is not None, f"input={path} is no image by its name: give {', '.join((*SUFFIXES, '.npy'))}.")
    require(
        channels in COLOURS,
        f"input={path}: {named} images have 1 or 3 channels, but the net takes {channels}; give a .npy file.",
    )
    try:
        kind = file_kind(path)
        with open(path, "rb") as file:
            return ImageFile(path, channels, picture_size(file, kind, MOST))
    except (PictureError, OSError) as error:
        raise _unreadable(path, error) from error


def read_image(path: Path, channels: int) -> Array:
    """Return the pixels of an image file, uint8 `[channels, height, width]`.

    Raises:
        PictureError: it is not an image, is damaged or too large.
        OSError: it can't be read.
    """
    kind = file_kind(path)
    with open(path, "rb") as file:
        return read_picture(file, kind, channels, MOST)


def file_kind(path: Path) -> str:
    """Return the kind of an image file by its first bytes, or else by its name."""
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise PictureError("is a folder, a pipe or a device, and no file")
    with open(path, "rb") as file:
        return kind_of(file.read(12)) or SUFFIXES[path.suffix.lower()]


def open_array(path: Path, channels: int, one: bool | None = None) -> ImageFile:
    """Return a .npy file of uint8 images, which stays on disk; `one` is as in `arranged`."""
    count, _, height, width = _mapped(path, channels, one).shape
    return ImageFile(
        path, channels, (height, width), count, partial(_mapped, path, channels, one), numbered=one is False
    )


def _mapped(path: Path, channels: int, one: bool | None) -> Array:
    try:
        if not path.is_file():  # opening a pipe would block
            raise OSError
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # the parser of the header's Python literal raises many types
        raise UnreadableError(
            f"input={path} can't be read as a .npy array: give one of uint8 images, or a folder of "
            f"{', '.join((*SUFFIXES, '.npy'))} files, or one of them."
        ) from error
    require(array.dtype == np.uint8, f"input={path}: images must be uint8, from 0 to 255.")
    require(array.size > 0, f"input={path} holds no images: its shape is {list(array.shape)}.")
    layout = arranged(array, channels, one=one)
    if layout is None:
        raise UserError(
            f"input={path} has shape {list(array.shape)}, but the net takes images of {channels} channels: give "
            f"[n, height, width, {channels}] or [n, {channels}, height, width]."
        )
    return layout[0]


def _unreadable(path: Path, error: Exception) -> UnreadableError:
    damaged = f"can't be read as a {SUFFIXES[path.suffix.lower()]} image"
    why = str(error) if isinstance(error, PictureError) else damaged
    return UnreadableError(f"input={path} {why}: mend it, or take it out of the folder.")
