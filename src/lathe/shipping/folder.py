"""The folder of an export: there whole or not at all, whatever ends the process that makes it."""

import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lathe.errors import Stopped, UserError
from lathe.export.files import REASONS

SPARE = 2**20  # bytes: with less than this left, whatever a writer says, the disk is full
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that takes its place in the end, whole; after an error or a signal nothing is left of it, and what was at
    `path` is untouched. What killed processes have left there is cleaned up.

    Raises:
        UserError: the disk is full or can't be written to.
    """
    temporary, old = _beside(path, os.getpid())
    first = not path.parent.exists()
    try:
        clean(path)
        temporary.mkdir(parents=True)
        yield temporary
        _put(temporary, path, old)
    except OSError as error:
        reasons = {code: reason for code, reason in REASONS.items() if code != errno.ENOENT}  # a missing file is a bug here
        if error.errno not in reasons:
            raise
        raise UserError(f"{path} can't be written, {reasons[error.errno]}.") from error
    except Exception as error:
        if disk_is_full(path):  # exporters raise errors of their own for it
            raise UserError(f"{path} can't be written, {REASONS[errno.ENOSPC]}.") from error
        raise
    finally:
        _settle(path, temporary, old)
        if first:
            with suppress(OSError):  # another export is there by now
                path.parent.rmdir()


def disk_is_full(path: Path) -> bool:
    """Whether nothing more can be written there."""
    there = next((folder for folder in path.parents if folder.exists()), None)
    return there is not None and shutil.disk_usage(there).free < SPARE


def _beside(path: Path, process: int) -> tuple[Path, Path]:
    """Where a process makes a new folder, and where it puts the earlier one for the moment between two names."""
    return path.with_name(f".{path.name}.{process}"), path.with_name(f".{path.name}.{process}.old")


def _put(temporary: Path, path: Path, old: Path) -> None:
    """Gives the new folder its name; no file system replaces a folder that is not empty in one step."""
    while True:
        with suppress(FileNotFoundError):
            os.replace(path, old)
        try:
            os.replace(temporary, path)
            return
        except OSError as error:  # another process has put its own there since
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(old)


def _settle(path: Path, temporary: Path, old: Path) -> None:
    """Removes what is left, and brings back an earlier export if its successor did not get its name."""
    if old.exists() and not path.exists():
        os.replace(old, path)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def clean(path: Path) -> None:
    """Settles what processes that are no more have left beside `path`."""
    if not path.parent.is_dir():
        return
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(\d+)(\.old)?")
    found = {int(match.group(1)) for entry in path.parent.iterdir() if (match := pattern.fullmatch(entry.name))}
    for process in found:
        if not _lives(process):
            _settle(path, *_beside(path, process))


def _lives(process: int) -> bool:
    if process == os.getpid():
        return False  # a number that was given again: this process has left nothing yet
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True


class _Signalled(BaseException):
    """No Exception: what exporters catch must not hold it up."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Signals that end the process unwind the block first, so that nothing half-written is left.

    Raises:
        Stopped: one came.
    """
    taken: dict[Any, Any] = {}

    def stop(number: int, frame: Any) -> None:
        raise _Signalled(number)

    if threading.current_thread() is threading.main_thread():
        for name in SIGNALS:
            number = getattr(signal, name, None)
            usual = (signal.SIG_DFL, signal.default_int_handler)
            if number is not None and signal.getsignal(number) in usual:  # what nohup ignores stays ignored
                taken[number] = signal.signal(number, stop)
    try:
        yield
    except _Signalled as error:
        raise Stopped(signal.Signals(error.args[0]).name, None) from None
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
