"""Downloads over HTTP, with a progress bar and a hash check."""

import hashlib
import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path

from lathe.errors import UserError, naming, require
from lathe.files import whole

BLOCK = 2**20


def check(path: Path, expected: str) -> None:
    """Raise UserError if a file differs from its published hash, MD5 or SHA-256; call this before reading it."""
    kind = "MD5" if len(expected) == 32 else "SHA-256"  # older data sets have MD5
    with path.open("rb") as file:
        found = hashlib.file_digest(file, kind.replace("-", "").lower()).hexdigest()
    if found != expected:
        raise UserError(f"{path} has the {kind} hash {found}, expected the published {expected}: delete it, run again.")


def download(url: str, path: Path, expected: str, by_hand: str) -> None:
    """Download `url` to `path`, which appears complete and checked or not at all.

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
    require(bare == url, f"{bare} can't be fetched with the login that the address has: {by_hand}.")
    require(url.startswith(("http://", "https://")), f"{url} is not an http or https address.")
    with whole(path) as part:
        try:
            _fetch(url, part)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            said = " ".join(str(getattr(error, "reason", None) or error).split())[:200]
            raise UserError(f"{url} cannot be fetched ({ascii(said)[1:-1]}): {by_hand}.") from error
        try:
            check(part, expected)
        except UserError as error:
            raise UserError(f"{url} arrived with another hash than the published {expected}: {by_hand}.") from error


def _fetch(url: str, part: Path) -> None:
    """Write the file at `url` to `part`; raise IncompleteRead if the connection breaks."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with (
        urllib.request.urlopen(url, timeout=30) as response,  # noqa: S310 (the scheme was checked)
        naming(part),
        Progress("[progress.description]{task.description}", *columns) as progress,
        part.open("wb") as file,
    ):
        length = response.headers.get("Content-Length", "")
        total = int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
        bar = progress.add_task(url.rpartition("/")[2], total=total)
        while block := response.read(BLOCK):
            file.write(block)
            progress.advance(bar, len(block))
        if total is not None and file.tell() < total:
            raise http.client.IncompleteRead(b"", total - file.tell())
