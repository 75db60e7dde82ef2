"""What is told of a disk that takes no file."""

import errno

import pytest

from lathe.files import disk_sentence


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk quota is used up"), (errno.EROFS, "the disk is read-only"),
     (errno.EACCES, "writing there is not permitted"), (errno.EPERM, "writing there is not permitted"), (errno.ENOTDIR, "is a file"),
     (errno.EEXIST, "no folder stands there"), (errno.ELOOP, "in a circle"), (errno.ENAMETOOLONG, "too long")],
)  # fmt: skip
def test_disk_sentences(number: int, words: str) -> None:
    sentence = disk_sentence(OSError(number, "x", "/a/b"))
    assert sentence is not None
    assert sentence.startswith("/a/b can't be written, ")
    assert words in sentence


def test_a_missing_file_is_a_bug_and_not_a_sentence() -> None:
    assert disk_sentence(FileNotFoundError(errno.ENOENT, "x", "/a/b")) is None
    assert disk_sentence(OSError(errno.EIO, "x", "/a/b")) is None
    assert disk_sentence(FileNotFoundError(errno.ENOENT, "x", "/proc/x")) is not None
