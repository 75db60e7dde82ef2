"""Unusable folders of images are refused before training; class names are never interpolated."""

import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.pictures import pictures
from support.runs import SMALL, config

from lathe.config.class_names import class_names
from lathe.data import Digits, ImageDataModule, ImageFolder
from lathe.errors import UserError

CLASSES = {"cat": 6, "dog": 6}


def bomb(path: Path) -> None:
    """A PNG whose header declares 10^9 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50000, 20000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))))


def listed(folder: Path, text: str, name: str = "list.txt") -> None:
    (folder / name).write_text(text)


def twice(folder: Path) -> None:
    lines = "\n".join(str(path.relative_to(folder)) for path in folder.glob("*/*.png"))
    listed(folder, lines)
    listed(folder, lines, "val.txt")


def splits(folder: Path, **classes: dict[str, int]) -> None:
    for path in folder.glob("*/*"):
        path.unlink()
    for path in folder.glob("*"):
        path.rmdir()
    for name, counts in classes.items():
        pictures(folder / name, counts)


# The change of the folder, the source's settings, and words of the message.
CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "a class that is not validated": (
        lambda folder: splits(folder, train={"cat": 2, "dog": 2}, val={"cat": 2}),
        {},
        "val has no class dog",
    ),
    "a picture that unpacks to too much": (
        lambda folder: bomb(folder / "cat" / "bomb.png"),
        {},
        r"cat/bomb\.png has 20000 x 50000 pixels",
    ),
    "a list of what is not there": (
        lambda folder: listed(folder, "cat/000.png\ndog/000.png\ncat/nine.png\n"),
        {"train": "list.txt"},
        r"lists cat/nine\.png, not there",
    ),
    "a list that leads out": (
        lambda folder: listed(folder, "cat/../../secret/x.png\n"),
        {"train": "list.txt"},
        "leads out of the folder",
    ),
    "a list of whole paths": (
        lambda folder: listed(folder, "/etc/cat/x.png\n"),
        {"train": "list.txt"},
        "leads out of the folder",
    ),
    "a list without classes": (
        lambda folder: listed(folder, "000.png\n"),
        {"train": "list.txt"},
        r"000\.png without a class",
    ),
    "a file in two splits": (twice, {"train": "list.txt", "val": "val.txt"}, "is in train and val"),
    "a split elsewhere": (
        lambda folder: pictures(folder.parent / "other", CLASSES),
        {"train": "../other"},
        r"leads out of data\.folder",
    ),
    "two names of a split": (
        lambda folder: splits(folder, train=CLASSES, valid=CLASSES, Validation=CLASSES),
        {},
        "Validation and valid, both val",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_trained_on_is_refused(case: str, tmp_path: Path) -> None:
    prepare, settings, words = CASES[case]
    folder = pictures(tmp_path / "photos", CLASSES)
    prepare(folder)
    with pytest.raises(UserError, match=words):
        ImageFolder(str(folder), str(tmp_path / "data"), **{"image_size": 4, **settings}).prepare()
    assert not list((tmp_path / "data").glob("*/photos*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"^data\.folder: a value has to be given"),
        (["data.folder=nope"], r"^data\.folder=nope is no folder"),
        (["data.folder=photos/cat"], "photos/cat has no folder in it"),
    ],
)
def test_a_missing_folder_is_refused_when_the_configuration_is_composed(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path / "photos", CLASSES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        config("data=image_folder", *SMALL, *words)


@pytest.mark.parametrize("kind", ["folder", "list"])
@pytest.mark.parametrize("name", ["${oc.env:SECRET}", "a\nnew", "\x1b[31m"])
def test_names_of_classes_are_never_resolved(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data may come from a stranger, and the environment holds keys."""
    monkeypatch.setenv("SECRET", "hunter2")
    if kind == "folder":
        folder, words = pictures(tmp_path / "photos", {**CLASSES, name: 3}), []
    else:
        folder, words = pictures(tmp_path / "photos", CLASSES), ["data.source.train=list.csv"]
        (folder / "list.csv").write_text(f'path,label\ncat/000.png,"{name}"\n')
    with pytest.raises(UserError, match=r"has a class named '.*', expected printable characters without \$\{") as told:
        config("data=image_folder", f"data.folder={folder}", *SMALL, *words)
    assert repr(name) in str(told.value)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("place", ["cat/pipe.png", "list.csv"])
def test_a_pipe_is_not_waited_for(place: str, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    os.mkfifo(folder / place)
    train = place if place.endswith(".csv") else None
    with pytest.raises(UserError, match=r"pipe\.png is a folder, a pipe or a dev|list\.csv is no file: give one with"):
        ImageFolder(str(folder), str(tmp_path / "data"), image_size=4, train=train).prepare()


def test_folders_that_archives_and_tools_leave_are_not_classes(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    for name in ("__MACOSX", ".git", ".ipynb_checkpoints", ".thumbnails"):
        (folder / name).mkdir()
        (folder / "cat" / name).mkdir()
    assert class_names(str(folder)) == ["cat", "dog"]
    assert config("data=image_folder", f"data.folder={folder}")["data"]["num_classes"] == 2
    (folder / "__MACOSX" / "._000.png").write_bytes(b"\0\5\x16\7")
    shutil.rmtree(folder / "cat" / "__MACOSX")
    ImageFolder(str(folder), str(tmp_path / "data"), val_share=0.2, test_share=0.2).prepare()


def test_one_class_warns(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", {"cat": 6})
    with pytest.warns(UserWarning, match=r"^data\.folder=.*photos has one class, cat, as which any net names every im"):
        ImageFolder(str(folder), str(tmp_path / "data")).prepare()


def test_circular_links_are_not_classes(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    (folder / "around").symlink_to("around")
    (folder / "cat" / "again").symlink_to(folder, target_is_directory=True)
    assert class_names(str(folder)) == ["cat", "dog"]
    with pytest.warns(
        UserWarning, match=r"1 folders in those of the classes are not read, with \d+ images: cat/again\. A list"
    ):
        ImageFolder(str(folder), str(tmp_path / "data"), val_share=0.2, test_share=0.2).prepare()


def test_files_that_differ_in_their_suffix_alone_warn(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    Image.new("RGB", (9, 9)).save(folder / "cat" / "000.jpg")
    with pytest.warns(UserWarning, match=r"cat has 000\.jpg, 000\.png"):
        ImageFolder(str(folder), str(tmp_path / "data"), val_share=0.2, test_share=0.2).prepare()


def test_a_folder_that_the_source_does_not_read(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"num_classes": 10, "channels": 1, "image_size": 8, "mean": [0.3], "std": [0.3]}
    with pytest.raises(UserError, match=r"^data\.folder=x is not what the source Digits reads: leave it out, or choo"):
        ImageDataModule(Digits(), **facts, batch_size=8, folder="x")
