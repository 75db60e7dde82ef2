"""Bytes of what ships, as they lie on disk and as they travel."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

CHUNK = 2**20


@dataclass(frozen=True)
class FileSize:
    """`bytes` on disk, and after gzip at its default level 6: unstructured zeros show in the second alone."""

    bytes: int
    gzipped: int


class _Counter:
    """A file that keeps nothing but its length."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.bytes += len(data)
        return len(data)


def file_size(path: Path) -> FileSize:
    """Of a file, or of all files in a folder, which are compressed each for itself.

    Raises FileNotFoundError if there is nothing.
    """
    total, zipped = 0, _Counter()
    for file in _files(path):
        total += file.stat().st_size
        target: IO[bytes] = zipped  # type: ignore[assignment]  # GzipFile asks for no more than write
        with (
            file.open("rb") as source,
            gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=target, mtime=0) as sink,
        ):
            while chunk := source.read(CHUNK):
                sink.write(chunk)
    return FileSize(total, zipped.bytes)


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise FileNotFoundError(path)
    yield from sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
