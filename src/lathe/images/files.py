"""Images in a folder or a .npy file, checked by their headers and read one by one. Imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lathe.errors import UserError, require
from lathe.images.pictures import COLOURS, MOST, SUFFIXES, PictureError, arranged, kind_of, picture_size, read_picture

Array = np.ndarray[Any, Any]


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
        return iter(
            [self.path.name] if self.count == 1 else [f"{self.path.name}[{index}]" for index in range(self.count)]
        )

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
        picture = path.suffix.lower() in SUFFIXES
        return [open_image(path, channels) if picture else open_array(path, channels, one=False)]
    wanted = (*SUFFIXES, ".npy")
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    found = [entry for entry in entries if entry.suffix.lower() in wanted]
    inner = sum(entry.is_dir() for entry in entries) if not found else 0
    if left_out is not None:
        left_out.others = [entry.name for entry in entries if entry.suffix.lower() not in wanted]
    below = f" itself, and its {inner} subfolders are not read: give one of them" if inner else ""
    require(bool(found), f"input={path}: the folder has no {', '.join(wanted)} files{below}.")
    opened = []
    for file in found:
        try:
            opened.append((open_array if file.suffix.lower() == ".npy" else open_image)(file, channels))
        except UnreadableError as error:
            if left_out is None:
                raise
            left_out.add(file, error)
    return opened


def open_image(path: Path, channels: int) -> ImageFile:
    """Read the header of an image file.

    Raises:
        UnreadableError: it is not an image.
    """
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
    found = arranged(array, channels, one=one)
    if found is None:
        raise UserError(
            f"input={path} has shape {list(array.shape)}, but the net takes images of {channels} channels: give "
            f"[n, height, width, {channels}] or [n, {channels}, height, width]."
        )
    return found[0]


def _unreadable(path: Path, error: Exception) -> UnreadableError:
    predicate = (
        str(error) if isinstance(error, PictureError) else f"can't be read as a {SUFFIXES[path.suffix.lower()]} image"
    )
    return UnreadableError(f"input={path} {predicate}: mend it, or take it out of the folder.")
