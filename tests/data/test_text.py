"""Files and documents of a folder of text."""

from pathlib import Path

import pytest

from lathe.data import text
from lathe.data.text import find_files, read_documents


def test_files_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a.md", "a/.x.txt", "B.TXT", "c.txt.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = [path.relative_to(tmp_path).as_posix() for path in find_files(tmp_path, ["txt", ".md"])]
    assert found == ["B.TXT", "a.md", "a/z.txt", "b.txt"]


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 100])
def test_documents_are_what_stands_between_separators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(text, "PIECE", piece)
    path = tmp_path / "a.txt"
    path.write_bytes(b"<>one<>two\n<two><><>three<")
    found = [b"".join(document.pieces) for document in read_documents(path, "<>")]
    assert found == [b"one", b"two\n<two>", b"three<"]
    whole = list(read_documents(path, None))
    assert [b"".join(document.pieces) for document in whole] == [path.read_bytes()]


def test_equal_documents_have_equal_digests_however_they_are_stored(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one|two")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "c.txt").write_text("")
    divided = list(read_documents(tmp_path / "a.txt", "|"))
    assert divided[1].digest == next(read_documents(tmp_path / "b.txt", None)).digest
    assert divided[0].digest != divided[1].digest
    assert list(read_documents(tmp_path / "c.txt", None)) == []
