"""Sizes of exported files, on disk and compressed."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

CHUNK = 2**20


@dataclass(frozen=True)
class FileSize:
    """`bytes` on disk and after gzip at level 6; only the latter shows unstructured zeros."""

    bytes: int
    gzipped: int


class _Counter:
    """A file that keeps only its length."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.bytes += len(data)
        return len(data)


def file_size(path: Path) -> FileSize:
    """Return the size of a file, or of all files in a folder, each compressed separately.

    Raises:
        FileNotFoundError: there is nothing at `path`.
    """
    total, zipped = 0, _Counter()
    for file in _files(path):
        total += file.stat().st_size
        target: IO[bytes] = zipped  # type: ignore[assignment]  # GzipFile needs only write
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
