"""Files that are whole or not there, and what a user is told where a disk takes none."""

import errno
import os
from pathlib import Path

from lathe.errors import naming


def disk_sentence(error: OSError) -> str | None:
    """One sentence for a full, read-only or forbidden disk; None for any other error."""
    if error.errno == errno.ENOENT and not str(error.filename).startswith(("/proc", "/dev", "/sys")):
        return None  # elsewhere a missing file is a bug
    reasons = {
        errno.ENOSPC: "the disk is full: free some space",
        errno.EDQUOT: "the disk quota is used up: free some space",
        errno.EROFS: "the disk is read-only: choose another place",
        errno.EACCES: "writing there is not permitted: choose another place",
        errno.EPERM: "writing there is not permitted: choose another place",
        errno.ENOENT: "the folder above it can't hold it: choose another place",
        errno.ENOTDIR: "a part of that path is a file: choose another place",
        errno.EEXIST: "something that is no folder stands there: choose another place",
        errno.ELOOP: "its links lead round in a circle: choose another place",
        errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
    }
    if error.errno not in reasons:
        return None
    return f"{error.filename or 'a file'} can't be written, {reasons[error.errno]} (paths.log_dir and paths.data_dir say where things go)."


def write_atomically(path: Path, text: str) -> None:
    """Writes the whole of `text` or nothing: readers never see half a file, whatever kills the writer."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
