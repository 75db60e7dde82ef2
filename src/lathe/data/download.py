"""Downloads over HTTP, with a progress bar, continuation of partial files, and a hash check."""

import hashlib
import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path

from lathe.errors import UserError, naming
from lathe.files import put

BLOCK = 2**20


def hash_kind(expected: str) -> str:
    """Return the kind of hash by its length: MD5 (of older data sets) or SHA-256."""
    return "MD5" if len(expected) == 32 else "SHA-256"


def check(path: Path, expected: str) -> None:
    """Raise UserError if a file differs from its published hash, MD5 or SHA-256; call this before reading it."""
    kind = hash_kind(expected)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, kind.replace("-", "").lower()).hexdigest()
    if found != expected:
        raise UserError(
            f"{path} has the {kind} hash {found} and not the published {expected}, so it is damaged or another file: "
            "delete it and run again."
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
        UserError: no network, no such file on the server, a broken connection, or a wrong hash.
        OSError: the disk can't be written.
    """
    bare = re.sub(r"(?<=//)[^/@]*@", "", url)
    if bare != url:
        raise UserError(f"{bare} can't be fetched with the login that the address has: {by_hand}.")
    part = path.with_name(path.name + ".part")
    continued = part.exists()
    try:
        _fetch(url, part)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        said = " ".join(str(getattr(error, "reason", None) or error).split())[:200]
        kept = part.stat().st_size if part.exists() else 0
        way = f"run again to continue at {kept} bytes, {by_hand}" if kept else by_hand
        raise UserError(f"{url} cannot be fetched ({ascii(said)[1:-1]}): {way}.") from error
    try:
        check(part, expected)
    except UserError as error:
        part.unlink()
        if continued:  # it may have begun with another file
            return download(url, path, expected, by_hand)
        raise UserError(f"{url} arrived with another hash than the published {expected}: {by_hand}.") from error
    put(part, path)


def _fetch(url: str, part: Path) -> None:
    """Append the rest of the file to `part`; raise IncompleteRead if the connection breaks."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url} is not an http or https address.")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310 (scheme checked above)
    try:
        response = urllib.request.urlopen(request, timeout=30)  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing left to send; the hash is checked later
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server sends the whole file again
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with (
            naming(part),
            Progress("[progress.description]{task.description}", *columns) as progress,
            part.open("ab" if have else "wb") as file,
        ):
            bar = progress.add_task(part.stem, completed=have, total=total)
            while block := response.read(BLOCK):
                have += file.write(block)
                progress.advance(bar, len(block))
    if total is not None and have < total:
        raise http.client.IncompleteRead(b"", total - have)
