"""Files of an export: written whole or not at all, and found again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lathe import files
from lathe.errors import UserError


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """`files.whole` for a place that a user has named.

    Raises:
        UserError: the disk is full or can't be written to, which is told before minutes of work where it is known by
        then.
    """
    path = files.followed(Path(path))
    if not path.parent.exists():
        raise UserError(f"{path} can't be written, its folder does not exist: make it first.")
    with refused(path), files.whole(path) as temporary:
        temporary.touch()
        yield temporary


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Raises UserError where the disk takes nothing at `path`."""
    try:
        yield
    except OSError as error:
        reason = files.disk_reason(error)
        if reason is None:
            raise
        raise UserError(f"{path} can't be written, {reason}.") from error


def readable(path: str | Path, key: str) -> Path:
    """The path, if there is a file.

    Raises:
        UserError: there is none.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{key}={path}: there is no such file; export the run first.")
    return path
