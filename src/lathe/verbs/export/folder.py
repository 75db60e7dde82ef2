"""The folder of an export: there whole or not at all, whatever ends the process that makes it."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lathe.errors import UserError, require
from lathe.export.files import refused
from lathe.export.manifest import NAME
from lathe.files import disk_reason, whole

SPARE = 2**20  # bytes: with less than this left, whatever a writer says, the disk is full


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that takes its place in the end, whole; after an error or a signal nothing is left of it,
    and what was at `path` is untouched. What killed processes have left there is cleaned up.

    Raises:
        UserError: the disk is full or can't be written to, or something else than an export stands there.
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
        if not isinstance(error, UserError | OSError) and disk_is_full(
            path
        ):  # exporters raise errors of their own for it
            raise UserError(f"{path} can't be written, {disk_reason(OSError(errno.ENOSPC, ''))}.") from error
        raise
    finally:
        if first:
            with suppress(OSError):  # another export is there by now
                path.parent.rmdir()


def disk_is_full(path: Path) -> bool:
    """Whether nothing more can be written there."""
    there = next((folder for folder in path.parents if folder.exists()), None)
    return there is not None and shutil.disk_usage(there).free < SPARE
