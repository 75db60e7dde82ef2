"""Write the folder of an export atomically."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lathe.errors import UserError, require
from lathe.export.files import refused
from lathe.export.manifest import NAME
from lathe.files import disk_reason, whole

SPARE = 2**20  # bytes: with less free space the disk counts as full, whatever the error


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` at the end, or is removed after an error or a signal.

    Raises UserError if the disk is full or not writable, or `path` is not an export.
    """
    foreign = path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / NAME).is_file())
    require(not foreign, f"{path} is there, and no export that Lathe has written: move it elsewhere.")
    first = not path.parent.exists()
    try:
        with refused(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole(path, replace_folder=True) as temporary:
                temporary.mkdir()
                yield temporary
    except Exception as error:
        if not isinstance(error, UserError | OSError) and disk_is_full(path):  # exporters raise other errors for it
            raise UserError(f"{path} can't be written, {disk_reason(OSError(errno.ENOSPC, ''))}.") from error
        raise
    finally:
        if first:
            with suppress(OSError):  # contains another export
                path.parent.rmdir()


def disk_is_full(path: Path) -> bool:
    """Return whether the disk of `path` is full."""
    there = next((folder for folder in path.parents if folder.exists()), None)
    return there is not None and shutil.disk_usage(there).free < SPARE
