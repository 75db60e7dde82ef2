"""Files that are there whole or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lathe.errors import UserError
from lathe.files import beside, sweep

REASONS = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EROFS: "the disk is read-only: choose another place",
    errno.EACCES: "writing there is not permitted: choose another place",
    errno.EPERM: "writing there is not permitted: choose another place",
    errno.ENOENT: "its folder does not exist: make it first",
    errno.ENOTDIR: "a part of that path is a file: choose another place",
}


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """A name beside `path` to write to, with the same suffix; what is there at the end is moved to `path` in one step.

    After an error nothing is left, and what was at `path` before is untouched.

    Raises:
        UserError: the disk is full or can't be written to.
    """
    path = Path(path)
    temporary = beside(path)
    try:
        sweep(path.parent)
        with open(temporary, "wb"):  # a place that can't be written to is told of before minutes of work
            pass
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in REASONS or (error.errno == errno.ENOENT and path.parent.is_dir()):
            raise
        raise UserError(f"{path} can't be written, {REASONS[error.errno]}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def readable(path: str | Path, key: str) -> Path:
    """The path, if there is a file.

    Raises:
        UserError: there is none.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{key}={path}: there is no such file; export the run first.")
    return path
