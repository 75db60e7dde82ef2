"""Downloads over HTTP, with a progress bar, continuation of partial files, and a hash check."""

import contextlib
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lathe.errors import UserError, naming
from lathe.files import put

BLOCK = 2**20
TRIES = 3  # broken connections before an error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock `path` against other processes until the block ends; no lock on Windows and some file systems."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                yield
                return
            if not _is_at(path, file):
                continue  # the process that held the lock has deleted the file
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(path: Path, file: IO[str]) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def kind_of(expected: str) -> str:
    """Return the kind of hash by its length: MD5 (of older data sets) or SHA-256."""
    return "MD5" if len(expected) == 32 else "SHA-256"


def hashed(path: Path, kind: str) -> str:
    """Return the hash of a file, "MD5" or "SHA-256"; hexadecimal."""
    found = hashlib.md5(usedforsecurity=False) if kind == "MD5" else hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def check(path: Path, expected: str) -> None:
    """Raise UserError if a file differs from its published hash; call this before reading it."""
    kind = kind_of(expected)
    if (found := hashed(path, kind)) != expected:
        raise UserError(
            f"{path} has the {kind} hash {found} and not the published {expected}, so it is damaged or another file:"
            " delete it and run again."
        )


def download(url: str, path: Path, expected: str, by_hand: str) -> None:
    """Download `url` to `path`, which appears complete and checked or not at all.

    Received bytes are kept in `<path>.part`; a later call requests only the rest.

    Args:
        url: http or https.
        path: in a folder that exists.
        expected: MD5 or SHA-256 hash, hexadecimal.
        by_hand: end of the error message without a network: what the user can do.

    Raises:
        UserError: no network, no such file on the server, or a wrong hash.
        OSError: the disk can't be written.
    """
    bare = re.sub(r"(?<=//)[^/@]*@", "", url)
    if bare != url:
        raise UserError(f"{bare} can't be fetched with the login that the address has: {by_hand}.")
    part = path.with_name(path.name + ".part")
    for left in reversed(range(TRIES)):
        continued = part.exists()
        try:
            complete = _fetch(url, part)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            if part.exists() and not part.stat().st_size:
                part.unlink()
            raise UserError(f"{url} cannot be fetched ({_reason(error)}): {by_hand}.") from error
        if complete and hashed(part, kind_of(expected)) == expected:
            put(part, path)
            return
        if complete:
            part.unlink()
            if not continued:  # a continued download may have begun with another file: download it again
                raise UserError(f"{url} arrived with another hash than the published {expected}: {by_hand}.")
        elif not left:
            raise UserError(
                f"{url} broke off {TRIES} times, last at {part.stat().st_size} bytes: run again to continue there."
            )
    raise UserError(f"{url} arrived with another hash than the published {expected}: {by_hand}.")


def _reason(error: Exception) -> str:
    """Return the error's reason in one line, without the server's unprintable characters."""
    said = " ".join(str(getattr(error, "reason", None) or error).split())
    if "infinite loop" in said or getattr(error, "code", None) in (301, 302, 303, 307, 308):
        return "the server redirects without end"
    return "".join(letter if letter.isprintable() else "?" for letter in said)[:200]


def _fetch(url: str, part: Path) -> bool:
    """Append the rest of the file to `part`; return whether it is complete."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url} is not an http or https address.")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310 (scheme checked above)
    try:
        response = urllib.request.urlopen(request, timeout=30)  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # nothing left to send; the hash is checked later
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server sends the whole file again
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
        _copy(response, part, have, total)
    return total is None or part.stat().st_size >= total


def _copy(response: http.client.HTTPResponse, part: Path, have: int, total: int | None) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        "[progress.description]{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    # a broken connection leaves what was received; the caller compares the sizes
    broken = (http.client.IncompleteRead, ConnectionError, TimeoutError)
    with (
        naming(part),
        Progress(*columns) as progress,
        part.open("ab" if have else "wb") as file,
        contextlib.suppress(*broken),
    ):
        bar = progress.add_task(part.stem, completed=have, total=total)
        while block := response.read(BLOCK):
            file.write(block)
            progress.advance(bar, len(block))
