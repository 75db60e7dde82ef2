"""Atomic writes and lookup of an export's files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lathe import files
from lathe.errors import UserError


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Write a file atomically, with an error of the disk as UserError.

    Raises:
        UserError: the folder does not exist, or the disk is full or read-only, before the body runs if possible.
    """
    path = files.followed(Path(path))
    if not path.parent.exists():
        raise UserError(f"{path} can't be written, its folder does not exist: make it first.")
    with refused(path), files.whole(path) as temporary:
        temporary.touch()
        yield temporary


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Raise UserError if the disk takes nothing at `path`."""
    try:
        yield
    except OSError as error:
        reason = files.disk_reason(error)
        if reason is None:
            raise
        raise UserError(f"{path} can't be written, {reason}.") from error


def readable(path: str | Path, key: str) -> Path:
    """Return the path; raise UserError if it is not a file."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{key}={path}: there is no such file; export the run first.")
    return path
