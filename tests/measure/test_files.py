"""Sizes of files on disk and after gzip."""

import gzip
import random
from pathlib import Path

from lathe.measure.files import FileSize, file_size


def test_a_file(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(3 * 2**20 + 5)  # more than one piece
    (tmp_path / "noise").write_bytes(content)
    size = file_size(tmp_path / "noise")
    assert size == FileSize(len(content), len(gzip.compress(content, compresslevel=6, mtime=0)))
    assert size.gzipped > size.bytes  # noise does not shrink


def test_zeros_show_in_gzip_alone(tmp_path: Path) -> None:
    noise = bytearray(random.Random(0).randbytes(100_000))
    (tmp_path / "dense").write_bytes(noise)
    for i in range(0, 100_000, 4):
        if i % 20:
            noise[i : i + 4] = bytes(4)  # four of five words
    (tmp_path / "sparse").write_bytes(noise)
    dense, sparse = file_size(tmp_path / "dense"), file_size(tmp_path / "sparse")
    assert dense.bytes == sparse.bytes == 100_000
    assert 0.2 < sparse.gzipped / dense.gzipped < 0.35


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"x" * 1000)
    (tmp_path / "a" / "b" / "two").write_bytes(b"y" * 500)
    parts = [file_size(tmp_path / "a" / "one"), file_size(tmp_path / "a" / "b" / "two")]
    assert file_size(tmp_path / "a") == FileSize(1500, parts[0].gzipped + parts[1].gzipped)
