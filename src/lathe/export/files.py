"""Write an export's files and its folder atomically."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lathe import files
from lathe.errors import UserError, require
from lathe.export.manifest import NAME

SPARE = 2**20  # bytes: with less free space the disk counts as full, whatever the error


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Write a file atomically, with an error of the disk as UserError."""
    path = files.followed(Path(path))
    require(path.parent.exists(), f"{path} can't be written, its folder does not exist: make it first.")
    with _refused(path), files.whole(path) as temporary:
        temporary.touch()
        yield temporary


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = files.disk_reason(error)
        if reason is None:
            raise
        raise UserError(f"{error.filename or path} can't be written, {reason}.") from error


def readable(path: str | Path) -> Path:
    """Return the path; raise UserError if it is not a file."""
    require(Path(path).is_file(), f"path={path}: there is no such file; export the run first.")
    return Path(path)


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` at the end, or is removed after an error or a signal.

    Raises UserError if the disk is full or not writable, or `path` is not an export.
    """
    foreign = path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / NAME).is_file())
    require(not foreign, f"{path} is there, and no export that Lathe has written: move it elsewhere.")
    first = not path.parent.exists()
    try:
        with _refused(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.whole(path, replace_folder=True) as temporary:
                temporary.mkdir()
                yield temporary
    except Exception as error:
        # exporters raise errors of their own if the disk is full
        if not isinstance(error, UserError | OSError) and shutil.disk_usage(path.parent).free < SPARE:
            reason = files.disk_reason(OSError(errno.ENOSPC, ""))
            raise UserError(f"{path} can't be written, {reason}.") from error
        raise
    finally:
        if first:
            with suppress(OSError):  # it holds another export
                path.parent.rmdir()
