"""Atomic writes, cleanup after killed processes, and messages for errors of the disk.

Everything is written under a hidden name next to its place, `.tmp-<machine>-<process>.<name>`, and moved there at the
end. Temporary folders in other places are named `lathe-<machine>-<process>-...`.
"""

import csv
import errno
import hashlib
import io
import os
import platform
import re
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_MACHINE = re.sub(r"\W", "_", platform.node()) or "machine"
_TEMPORARY = re.compile(r"\.tmp-(\w+)-(\d+)\.(.+?)(\.old)?")
_SCRATCH = re.compile(r"lathe-(\w+)-(\d+)-.+")
_STARTED = time.time()
_OTHER_PLACE = "choose another place"
_REASONS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "the disk is full: free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"this user is not permitted to read or write there: {_OTHER_PLACE}"),
    **{
        number: f"{os.strerror(number).lower()}: {_OTHER_PLACE}"
        for number in (errno.EROFS, errno.ENOTDIR, errno.EFBIG, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
    },
}
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
DAY = 86400.0  # seconds until the temporary files of another machine are removed, whose processes can't be asked


class NotPlain(OSError):
    """There is something else than a plain file at a path; the text is a whole message."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(f"{path} is {kind}, where a plain file belongs: move it away.")
        self.filename = str(path)

    def __str__(self) -> str:
        return str(self.args[0])


def require_plain(path: Path, links: bool = True) -> None:
    """Refuse what `open` would wait for or read without end; without `links` also links, which lead to other places.

    Raises NotPlain for a folder, pipe, device or socket. A missing file is right.
    """
    if not links and path.is_symlink():
        raise NotPlain(path, "a link")
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return
    if kind != stat.S_IFREG:
        raise NotPlain(path, _KINDS.get(kind, "a socket"))


def require_file(path: Path) -> None:
    """Refuse to replace a pipe, device or socket. Raises NotPlain."""
    if path.exists() and not path.is_dir():
        require_plain(path)


def require_writable(folder: Path) -> None:
    """Raise PermissionError if this user may not write into `folder`."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def open_plain(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
    """Open a file of a run directory, which may be someone else's: only a plain one, and for writing no link."""
    require_plain(path, links=mode in ("r", "rb"))
    return open(path, mode, **options)


def disk_reason(error: OSError) -> str | None:
    """Return why the disk refused a write, and what to do; None for any other error."""
    if error.errno == errno.ENOENT and str(error.filename).startswith(("/proc", "/dev", "/sys")):
        return f"no file can be made there: {_OTHER_PLACE}"  # on other disks a missing file is a bug
    return _REASONS.get(error.errno or 0)


def disk_sentence(error: OSError) -> str | None:
    """Return the message for an error of the disk, or for a file that is not plain; None for any other error."""
    if isinstance(error, NotPlain):
        return str(error)
    reason = disk_reason(error)
    return reason and f"{error.filename or 'a file'}: {reason} (paths.log_dir and paths.data_dir say where things go)."


def beside(path: Path) -> Path:
    """Return the temporary name of this process for `path`: in the same folder, with the same suffix."""
    return path.with_name(f".tmp-{_MACHINE}-{os.getpid()}.{path.name}")


@contextmanager
def whole(path: Path, replace_folder: bool = False) -> Iterator[Path]:
    """Give a temporary name for a file, folder or link, and move it to `path` at the end, synced to the disk.

    It replaces a folder at `path` only with `replace_folder`. After an error nothing is left, `path` is unchanged, and
    an OSError names `path`. Temporary files of killed processes in that folder are removed.
    """
    require_file(path)
    temporary = beside(path)
    sweep(path.parent)
    try:
        yield temporary
        if not os.path.lexists(temporary):  # a writer in C++ may hide its error
            require_writable(path.parent)
        if _is_folder(path) and not replace_folder and not temporary.is_dir():
            raise NotPlain(path, "a folder")
        put(temporary, path, replace_folder)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(error.filename or path).replace(temporary.name, path.name)
        raise
    finally:
        _delete(temporary)
        _restore(path, _set_aside_name(path))


def put(temporary: Path, path: Path, replace_folder: bool = False) -> None:
    """Sync a file, folder or link to the disk, and move it to `path` as `whole` does."""
    for part in () if temporary.is_symlink() else (temporary, *temporary.rglob("*")):
        if part.is_file() and not part.is_symlink():
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
    while True:
        if replace_folder and (_is_folder(path) or _is_folder(temporary)):  # no file system replaces folders at once
            with suppress(FileNotFoundError):
                os.replace(path, _set_aside_name(path))
        try:
            os.replace(temporary, path)
            return
        except OSError as error:  # another process has put its own there since
            if not replace_folder or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR):
                raise
            _delete(_set_aside_name(path))


def write_atomically(path: Path, text: str) -> None:
    """Write the whole of `text` or nothing, even if the process is killed."""
    with whole(path) as temporary:
        temporary.write_text(text)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end, for torch's writer of checkpoints and for imports."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    received: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(*received[-1])


def move(old: Path, new: Path) -> None:
    """Move a folder; to another disk as a copy that is complete before the old one is removed."""
    try:
        os.replace(old, new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with whole(new) as temporary:
            shutil.copytree(old, temporary, symlinks=True)
        remove(old)


def remove(folder: Path) -> None:
    """Remove a folder in one step, without following its links."""
    temporary = beside(folder)
    os.replace(folder, temporary)
    shutil.rmtree(temporary)


def followed(path: Path) -> Path:
    """Return the target of a link that the user has named, so that writing keeps the link.

    In a run directory, which may be someone else's, files replace links.
    """
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextmanager
def scratch(folder: Path | None = None) -> Iterator[Path]:
    """Give a temporary folder, by default among the system's, and remove it at the end."""
    parent = Path(tempfile.gettempdir()) if folder is None else folder
    sweep(parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=scratch_prefix(), ignore_cleanup_errors=True) as name:
        yield Path(name)


def scratch_prefix() -> str:
    """Return the prefix of the temporary folders of this process."""
    return f"lathe-{_MACHINE}-{os.getpid()}-"


def sweep(*folders: Path) -> None:
    """Remove the temporary files of this user's dead processes from `folders`."""
    for folder in folders:
        with suppress(OSError):  # missing, or not ours to read
            for entry in list(os.scandir(folder)):
                match = _TEMPORARY.fullmatch(entry.name) or _SCRATCH.fullmatch(entry.name)
                if match is None or not _is_abandoned(entry, match[1], int(match[2])):
                    continue
                path = Path(entry.path)
                if match.re is _TEMPORARY and match[4]:
                    _restore(path.with_name(match[3]), path)
                else:
                    _delete(path)


def _set_aside_name(path: Path) -> Path:
    """Return the name of what was at `path` while it is being replaced."""
    return path.with_name(f"{beside(path).name}.old")


def _restore(path: Path, old: Path) -> None:
    """Move `old` back to `path` if nothing has replaced it, and else remove it."""
    if os.path.lexists(old) and not os.path.lexists(path):
        with suppress(OSError):  # another process was faster
            os.replace(old, path)
    _delete(old)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _delete(path: Path) -> None:
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _is_abandoned(entry: os.DirEntry[str], machine: str, process: int) -> bool:
    status = entry.stat(follow_symlinks=False)
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return False
    if machine != _MACHINE:
        return time.time() - status.st_mtime > DAY
    if process == os.getpid():
        return status.st_mtime < _STARTED - 1.0  # of an earlier process with the same number, as in containers
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        return False
    return False


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()
