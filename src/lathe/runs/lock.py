"""Who may write to a run directory. Imports no torch."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lathe.errors import UserError
from lathe.files import open_plain

_held: set[IO[str]] = set()


@contextmanager
def locked(path: Path, shared: bool = False) -> Iterator[None]:
    """Holds the directory for this process, or with `shared` for it and the other machines of its launch; the kernel
    lets go of it however the process ends. Processes that are forked meanwhile, as those that read data, don't hold
    it: they outlive a parent that was killed by seconds.

    Raises:
        UserError: another process is writing to it.
        NotPlain: something else than a plain file stands at .lock.
    """
    with open_plain(path / ".lock", "a") as file:
        _lock(file, path, shared)
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


def _let_go() -> None:
    with open(os.devnull) as nothing:
        for file in _held:  # the number stays taken, by nothing: who closes the file closes no other's
            os.dup2(nothing.fileno(), file.fileno(), inheritable=False)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_let_go)


def _lock(file: IO[str], path: Path, shared: bool = False) -> None:
    if sys.platform == "win32":  # no flock there: two writers are not kept apart
        return
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(f"{path} is being written to by another process: wait for it, or stop it first.") from error
