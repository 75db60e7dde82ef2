"""Image files, decoded and scaled once, and then kept as one memory-mapped array."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lathe.data.checks import first_few
from lathe.data.download import locked
from lathe.data.splits import Images
from lathe.errors import UserError, require
from lathe.files import whole
from lathe.images.pictures import PictureError

BLOCK = 256  # images that are read before they are written


@dataclass(frozen=True)
class ImageCache:
    """A folder `<home>/<name>-<digest>` with `images.npy`, uint8 [n, *shape], and `bad.json`.

    `bad.json` has the rows and reasons of unreadable files, whose images are black. `name` is of the data and the
    options of its images, `digest` of the n `files`; a new digest replaces the folder.
    """

    home: Path
    name: str
    digest: str
    files: Sequence[Path]
    shape: tuple[int, int, int]

    @property
    def place(self) -> Path:
        """Return the folder's path."""
        return self.home / f"{self.name}-{self.digest[:16]}"

    def make(self, read: Callable[[Path], Images], most_bad: int) -> bool:
        """Read all files by `read` in threads, unless the cache exists; return whether it did.

        One process does this while others wait.
        """
        if self.open() is not None:
            return False
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            with locked(self.home / f".{self.name}.lock"):
                if self.open() is not None:  # another process may have made it
                    return False
                with whole(self.place, replace_folder=True) as partial:
                    partial.mkdir()
                    bad = self._write(partial / "images.npy", read, most_bad)
                    (partial / "bad.json").write_text(json.dumps(bad))
                for older in self.home.glob(f"{self.name}-*"):
                    if older != self.place:
                        shutil.rmtree(older, ignore_errors=True)
        except OSError as error:
            raise UserError(
                f"paths.data_dir={self.home.parent} cannot be written ({error.strerror or error}): choose a folder "
                "with enough space that you may write to."
            ) from error
        return True

    def open(self) -> tuple[Images, dict[int, str]] | None:
        """Return the images, and the reasons of unreadable rows; None if the cache is missing or incomplete."""
        try:
            images = np.load(self.place / "images.npy", mmap_mode="r", allow_pickle=False)
            bad = {int(row): str(why) for row, why in json.loads((self.place / "bad.json").read_text()).items()}
        except (OSError, ValueError, EOFError, AttributeError):
            return None
        fits = images.dtype == np.uint8 and images.shape == (len(self.files), *self.shape)
        return (images, bad) if fits else None

    def _write(self, path: Path, read: Callable[[Path], Images], most_bad: int) -> dict[int, str]:
        bad: dict[int, str] = {}
        with open(path, "wb") as file, _progress(self.name) as progress:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(self.files), *self.shape)}
            np.lib.format.write_array_header_1_0(file, header)
            bar = progress.add_task(self.name, total=len(self.files))
            with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
                for start in range(0, len(self.files), BLOCK):
                    block = self.files[start : start + BLOCK]
                    images = np.zeros((len(block), *self.shape), dtype=np.uint8)
                    for row, result in enumerate(threads.map(lambda name: _tried(read, name), block)):
                        if isinstance(result, str):
                            bad[start + row] = result
                        else:
                            images[row] = result
                    check_bad(bad, self.files, most_bad)
                    file.write(images.tobytes())
                    progress.advance(bar, len(block))
        return bad


def check_bad(bad: dict[int, str], files: Sequence[Path], most: int) -> None:
    """Raise UserError if more than `most` files can't be read."""
    told = first_few([f"{files[row]} {why}" for row, why in bad.items()])
    require(
        len(bad) <= most,
        f"data.source.skip_bad={most}: {told}: mend or remove what can't be read, or set data.source.skip_bad to how "
        "many may be left out.",
    )


def _tried(read: Callable[[Path], Images], path: Path) -> Images | str:
    try:
        return read(path)
    except PictureError as error:
        return str(error)
    except OSError as error:
        return f"can't be read ({error.strerror or error})"


def _progress(name: str) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    return Progress(
        "[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )
