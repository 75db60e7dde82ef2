"""Files that are whole or not there, what killed processes have left of others, and what a user is told where a disk
takes none.

Whatever Lathe writes stands first under a hidden name beside its place that tells machine and process,
`.tmp-<machine>-<process>.<name>` (for temporary folders elsewhere `lathe-<machine>-<process>-...`), and is moved to its
place whole.
"""

import csv
import errno
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
_BESIDE = re.compile(r"\.tmp-(\w+)-(\d+)\.(.+?)(\.old)?")
_ELSEWHERE = re.compile(r"lathe-(\w+)-(\d+)-.+")
_BEGAN = time.time()
_REASONS = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "files of that size are not allowed there (ulimit -f): raise the limit",
    errno.EROFS: "the disk is read-only: choose another place",
    errno.EACCES: "writing there is not permitted: choose another place",
    errno.EPERM: "writing there is not permitted: choose another place",
    errno.ENOENT: "the folder above it can't hold it: choose another place",
    errno.ENOTDIR: "a part of that path is a file: choose another place",
    errno.EEXIST: "something that is no folder stands there: choose another place",
    errno.ENXIO: "a device, a pipe or a socket stands there: name a file",
    errno.ELOOP: "its links lead round in a circle: choose another place",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
}
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
DAY = 86400.0  # seconds after which what another machine has left is nobody's: its processes can't be asked


class NotPlain(OSError):
    """Something else stands where a plain file belongs; its words are a sentence."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} is {what}, where a plain file belongs: move it away.")
        self.filename = str(path)

    def __str__(self) -> str:
        return str(self.args[0])


def require_plain(path: Path, links: bool = True) -> None:
    """Refuses what `open` would wait for, or read for ever. Without `links` no link may stand at `path` either: what is
    written through one goes where it leads.

    Raises:
        NotPlain: a folder, a pipe, a device or a socket stands there. Nothing at all is no mistake.
    """
    if not links and path.is_symlink():
        raise NotPlain(path, "a link")
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return
    if kind != stat.S_IFREG:
        raise NotPlain(path, _KINDS.get(kind, "a socket"))


def open_plain(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
    """As `open`, for a file that somebody else may have put there: a plain one alone, and to write, no link.

    Raises:
        NotPlain: as `require_plain`.
        OSError: it can't be opened.
    """
    require_plain(path, links=mode in ("r", "rb"))
    return open(path, mode, **options)


def disk_reason(error: OSError) -> str | None:
    """Why a full, read-only or forbidden disk takes nothing, and the way out; None for any other error."""
    if error.errno == errno.ENOENT and not str(error.filename).startswith(("/proc", "/dev", "/sys")):
        return None  # elsewhere a missing file is a bug
    return _REASONS.get(error.errno or 0)


def disk_sentence(error: OSError) -> str | None:
    """One sentence for a full, read-only or forbidden disk, or a file that is none; None for any other error."""
    reason = disk_reason(error)
    if isinstance(error, NotPlain) or reason is None:
        return str(error) if isinstance(error, NotPlain) else None
    path = Path(str(error.filename or "a file"))
    if error.errno in (errno.EACCES, errno.EPERM) and _hidden(path):
        return f"{path} can't be read, this user is not permitted to: change its rights (chmod), or take another."
    other = "choose another place"
    if run := next((above for above in path.parents if os.path.isfile(above / "config.yaml")), None):
        reason = reason.replace(other, f"copy the run, {run}, to a place of your own")
    hint = " (paths.log_dir and paths.data_dir say where things go)" * reason.endswith((other, "free some space"))
    return f"{path} can't be written, {reason}{hint}."


def _hidden(path: Path) -> bool:
    """Whether what stands there may not be read, or a folder on the way not be entered."""
    there = next((part for part in (path, *path.absolute().parents) if os.path.lexists(part)), path)
    return not os.access(there, os.R_OK if there == path else os.X_OK)


def require_writable(folder: Path) -> None:
    """Raises OSError where this user may put nothing into `folder`, before there is something to put."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def beside(path: Path) -> Path:
    """Where this process writes what will stand at `path`; in the same folder and with the same suffix."""
    return path.with_name(f".tmp-{_MACHINE}-{os.getpid()}.{path.name}")


@contextmanager
def whole(path: Path, replace_folder: bool = False) -> Iterator[Path]:
    """A name beside `path`, with its suffix, for a file, a folder or a link; what stands there at the end is brought to
    the disk and takes the place of `path` in one step. A folder that stands at `path` gives way only with
    `replace_folder`.

    After an error nothing is left, what was at `path` is untouched, and an OSError names `path`. What killed processes
    have left in that folder goes.
    """
    require_file(path)
    temporary = beside(path)
    sweep(path.parent)
    try:
        yield temporary
        if not os.path.lexists(temporary):  # a writer in C++ may say nothing of what it met
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
        _settle(path, _aside(path))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets a Ctrl-C wait for the end: torch's writer of checkpoints, and its import, can't be left in their middle."""
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


def require_file(path: Path) -> None:
    """Raises OSError where a device, a pipe or a socket stands at `path`: it would be gone for all who use it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.ENXIO, "it is no file", str(path))


def put(temporary: Path, path: Path, replace_folder: bool = False) -> None:
    """Brings a file, a folder or a link to the disk, and moves it to `path` as `whole` does."""
    for part in () if temporary.is_symlink() else (temporary, *temporary.rglob("*")):
        if part.is_file() and not part.is_symlink():
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
    while True:
        if replace_folder and (_is_folder(path) or _is_folder(temporary)):  # which no file system replaces in one step
            with suppress(FileNotFoundError):
                os.replace(path, _aside(path))
        try:
            os.replace(temporary, path)
            return
        except OSError as error:  # another process has put its own there since
            if not replace_folder or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR):
                raise
            _delete(_aside(path))


def move(old: Path, new: Path) -> None:
    """Moves a folder; to another disk as a copy that is there whole before the old one goes."""
    try:
        os.replace(old, new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with whole(new) as making:
            shutil.copytree(old, making, symlinks=True)
        remove(old)


def remove(folder: Path) -> None:
    """A folder is gone in one step; links in it are not followed. What a kill leaves has a name that `sweep` knows."""
    aside = beside(folder)
    os.replace(folder, aside)
    shutil.rmtree(aside)


def followed(path: Path) -> Path:
    """Where a link that a user has named leads: what is written there is what whoever made it looks at. Other writers
    put a file in a link's place, since a run directory may be a stranger's."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def write_atomically(path: Path, text: str) -> None:
    """Writes the whole of `text` or nothing: readers never see half a file, whatever kills the writer."""
    with whole(path) as temporary:
        temporary.write_text(text)


@contextmanager
def scratch(folder: Path | None = None) -> Iterator[Path]:
    """A folder of this process's own among the system's temporary files, or in `folder`; removed at the end."""
    where = Path(tempfile.gettempdir()) if folder is None else folder
    sweep(where)
    with tempfile.TemporaryDirectory(dir=where, prefix=scratch_prefix(), ignore_cleanup_errors=True) as name:
        yield Path(name)


def scratch_prefix() -> str:
    """What the names of this process's temporary folders begin with."""
    return f"lathe-{_MACHINE}-{os.getpid()}-"


def sweep(*folders: Path) -> None:
    """Removes from `folders` what dead processes of this user have left under these names, never a living one's."""
    for folder in folders:
        with suppress(OSError):  # not there, or not ours to read
            for entry in list(os.scandir(folder)):
                match = _BESIDE.fullmatch(entry.name) or _ELSEWHERE.fullmatch(entry.name)
                if match is not None and _abandoned(entry, match.group(1), int(match.group(2))):
                    _remove(Path(entry.path))


def _aside(path: Path) -> Path:
    """Where this process puts what stands at `path` between two names; it comes back if nothing takes its place."""
    return path.with_name(f"{beside(path).name}.old")


def _settle(path: Path, aside: Path) -> None:
    """Brings back what was put aside from `path` if nothing took its place, and else removes it."""
    if os.path.lexists(aside) and not os.path.lexists(path):
        with suppress(OSError):  # another process has done so meanwhile
            os.replace(aside, path)
    _delete(aside)


def _remove(path: Path) -> None:
    match = _BESIDE.fullmatch(path.name)
    if match is not None and match.group(4):
        _settle(path.with_name(match.group(3)), path)
    else:
        _delete(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _delete(path: Path) -> None:
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _abandoned(entry: os.DirEntry[str], machine: str, process: int) -> bool:
    found = entry.stat(follow_symlinks=False)
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        return False
    if machine != _MACHINE:
        return time.time() - found.st_mtime > DAY
    if process == os.getpid():
        return found.st_mtime < _BEGAN - 1.0  # of an earlier process whose number was given again, as in containers
    return not _lives(process)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()
