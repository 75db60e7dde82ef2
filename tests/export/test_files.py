"""Files are written completely or not at all."""

import errno
import os
from pathlib import Path

import pytest

from lathe.errors import UserError
from lathe.export.files import whole


def test_the_file_is_there_at_the_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with whole(path) as temporary:
        assert temporary.suffix == ".onnx"
        temporary.write_bytes(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["net.onnx"]


def test_a_link_is_written_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "kept.csv").write_bytes(b"old")
    (tmp_path / "link.csv").symlink_to("kept.csv")
    with whole(tmp_path / "link.csv") as temporary:
        temporary.write_bytes(b"new")
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "kept.csv").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["kept.csv", "link.csv"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"old")

    def half_way() -> None:
        with whole(path) as temporary:
            temporary.write_bytes(b"ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        half_way()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["net.onnx"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"net\.onnx can't be written, the disk is full"), whole(tmp_path / "net.onnx"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []
