"""Folders of images that can't be trained on: one sentence each, before training, that says what to do."""

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
from lathe.config.validate import check
from lathe.data import Digits, ImageDataModule, ImageFolder
from lathe.errors import UserError

CLASSES = {"cat": 6, "dog": 6}


def bomb(path: Path) -> None:
    """A PNG whose header announces 10^9 pixels."""

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


# What is done to the folder, the source's settings, and the sentence.
CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "an empty class": (
        lambda folder: (folder / "eel").mkdir(),
        {},
        r"^data\.folder=.*eel has no image \(\.png, .*\): put some there, or remove it\.$",
    ),
    "a class of folders": (
        lambda folder: (folder / "eel" / "young").mkdir(parents=True),
        {},
        r"eel has no image \(.*\), and the folders in it are not read: young: put some there, or remove it, or name it",
    ),
    "a class that is not validated": (
        lambda folder: splits(folder, train={"cat": 2, "dog": 2}, val={"cat": 2}),
        {},
        r"^data\.folder=.*: val has no class dog, one of data\.source\.classes \(cat, dog\): each class has to be in e",
    ),
    "a class that is not trained": (
        lambda folder: splits(folder, train={"cat": 2}, val={"cat": 1, "dog": 2}),
        {},
        r"^data\.folder=.*: val has the class dog, which is none of data\.source\.classes \(cat\): each class has to",
    ),
    "one image of a class": (
        lambda folder: splits(folder, cat={"": 1}, dog={"": 4}),
        {"val_share": 0.5, "test_share": 0.1},
        r"no image of class (cat|dog) is left to train on: add images of it, or name the splits",
    ),
    "too few images": (
        lambda folder: splits(folder, cat={"": 1}, dog={"": 1}),
        {},
        r"has 2 images to train on, of which data\.source\.val_share=0\.1 and data\.source\.test_share=0\.1 leave none",
    ),
    "a picture that unpacks to too much": (
        lambda folder: bomb(folder / "cat" / "bomb.png"),
        {},
        r"^data\.source\.skip_bad=0: .*cat/bomb\.png has 20000 x 50000 pixels, more than 268435456: mend or remove",
    ),
    "a list of what is not there": (
        lambda folder: listed(folder, "cat/000.png\ndog/000.png\ncat/nine.png\n"),
        {"train": "list.txt"},
        r"^data\.source\.train=list\.txt lists cat/nine\.png, not there in data\.folder=.*photos: mend it\.$",
    ),
    "a list of other files": (
        lambda folder: (listed(folder, "cat/000.png\ncat/a.gif\n"), (folder / "cat" / "a.gif").write_bytes(b"")),
        {"train": "list.txt"},
        r"^data\.source\.train=list\.txt lists cat/a\.gif, expected images \(\.png, .*\): mend it\.$",
    ),
    "a list that leads out": (
        lambda folder: listed(folder, "cat/../../secret/x.png\n"),
        {"train": "list.txt"},
        r"^data\.source: the list .*list\.txt names cat/\.\./\.\./secret/x\.png, which leads out of the folder: write ",
    ),
    "a list of whole paths": (
        lambda folder: listed(folder, "/etc/cat/x.png\n"),
        {"train": "list.txt"},
        r"list\.txt names /etc/cat/x\.png, which leads out of the folder",
    ),
    "a list without classes": (
        lambda folder: listed(folder, "000.png\n"),
        {"train": "list.txt"},
        r"list\.txt has 000\.png without a class: write <class>/000\.png, or a CSV with the columns path and label\.$",
    ),
    "an empty list": (
        lambda folder: listed(folder, "\n"),
        {"train": "list.txt"},
        r"list\.txt has no files: write a path on each line\.$",
    ),
    "a list with a file twice": (
        lambda folder: listed(folder, "cat/000.png\ncat/000.png\n"),
        {"train": "list.txt"},
        r"list\.txt has cat/000\.png twice: leave one out\.$",
    ),
    "a list in no encoding": (
        lambda folder: (folder / "list.txt").write_bytes(b"\xff\xfe\x00"),
        {"train": "list.txt"},
        r"^data\.source: the list .*list\.txt can't be read \(.*decode.*\): ",
    ),
    "a table without paths": (
        lambda folder: listed(folder, "file,label\ncat/000.png,cat\n", "list.csv"),
        {"train": "list.csv"},
        r"list\.csv has the columns .*\. Name them path, or path and label\.$",
    ),
    "a table with a label missing": (
        lambda folder: listed(folder, "path,label\ncat/000.png,cat\ndog/000.png,\n", "list.csv"),
        {"train": "list.csv"},
        r"list\.csv has no label in line 3: give each file one\.$",
    ),
    "a misspelt column": (
        lambda folder: listed(folder, "path,Label\ncat/000.png,cat\n", "list.csv"),
        {"train": "list.csv"},
        r"list\.csv has the columns path, Label\. Name them path, or path and label\.$",
    ),
    "no such list": (
        lambda folder: None,
        {"train": "list.csv"},
        r"^data\.source: the list .*list\.csv can't be read \(No such file or directory\): give one that can\.$",
    ),
    "a column twice": (
        lambda folder: listed(folder, "path,label,label\ncat/000.png,cat,dog\n", "list.csv"),
        {"train": "list.csv"},
        r"list\.csv has the columns path, label, label\. Name them path, or path and label\.$",
    ),
    "a file in two splits": (
        twice,
        {"train": "list.txt", "val": "val.txt"},
        r"^data\.folder=.*: (cat|dog)/00\d\.png is in train and val, expected it in one split: leave it out of one\.$",
    ),
    "validation alone": (
        lambda folder: None,
        {"val": "cat"},
        r"^data\.source\.val=cat needs data\.source\.train: say which images the net is trained on\.$",
    ),
    "a split elsewhere": (
        lambda folder: pictures(folder.parent / "other", CLASSES),
        {"train": "../other"},
        r"^data\.source\.train=\.\./other leads out of data\.folder=.*: name a folder or a list of files in it\.$",
    ),
    "no such split": (
        lambda folder: splits(folder, learn={"cat": 2}),
        {"train": "learn", "val": "choose"},
        r"^data\.folder=.*choose is no folder: name one, or a list of files \(\.txt, \.csv\)\.$",
    ),
    "two names of a split": (
        lambda folder: splits(folder, train=CLASSES, valid=CLASSES, Validation=CLASSES),
        {},
        r"^data\.folder=.* has Validation and valid, both val by their names: say which by data\.source\.train",
    ),
    "two channels": (lambda folder: None, {"channels": 2}, r"^channels=2: expected 1 or 3, got another number\.$"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_can_not_be_used(case: str, tmp_path: Path) -> None:
    prepare, settings, sentence = CASES[case]
    folder = pictures(tmp_path / "photos", CLASSES)
    prepare(folder)
    with pytest.raises(UserError, match=sentence) as refused:
        ImageFolder(str(folder), str(tmp_path / "data"), **{"image_size": 4, **settings}).prepare()
    assert len(refused.value.args) == 1
    assert not list((tmp_path / "data").glob("*/photos*"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], r"^data\.folder: a value has to be given, data\.folder=\.\.\.; --help data\.folder says what it takes\.$"),
        (
            ["data.folder=nope"],
            r"^data\.folder=nope is no folder: give one that has a folder of images for each class, also to a run w",
        ),
        (["data.folder=7"], r"^data\.folder=7: expected a word, got a whole number\.$"),
        (
            ["data.folder=photos/cat"],
            r"^data\.folder=photos/cat: photos/cat has no folder in it, expected one of images",
        ),
        (["data.folder=loop"], r"^data\.folder=loop is no folder: "),
        (["data.folder=photos", "data.source.train=x"], r"^data\.source\.train=x: photos/x is no folder: name one in "),
    ],
)
def test_what_the_configuration_says_at_once(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path / "photos", CLASSES)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence) as refused:
        config("data=image_folder", *SMALL, *words)
    assert len(refused.value.args) == 1


@pytest.mark.parametrize("kind", ["folder", "list"])
@pytest.mark.parametrize("name", ["${oc.env:SECRET}", "${", "${.x}", "${now:%Y}", "a\nnew", "\x1b[31m"])
def test_names_of_classes_are_never_resolved(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data may be somebody else's, and the environment holds keys."""
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


@pytest.mark.parametrize("channels", [0, 2, 4])
def test_image_files_have_one_or_three_channels(channels: int, tmp_path: Path) -> None:
    cfg = config("data=image_folder", f"data.folder={pictures(tmp_path / 'photos', CLASSES)}")
    cfg["data"]["source"]["channels"] = channels
    (told,) = check(cfg)
    assert told == f"data.source.channels={channels}: expected 1 or 3, got another number."


def test_what_an_archive_leaves_is_no_class(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    for name in ("__MACOSX", ".git", ".ipynb_checkpoints", ".thumbnails"):
        (folder / name).mkdir()
        (folder / "cat" / name).mkdir()
    assert class_names(str(folder)) == ["cat", "dog"]
    assert config("data=image_folder", f"data.folder={folder}")["data"]["num_classes"] == 2
    (folder / "__MACOSX" / "._000.png").write_bytes(b"\0\5\x16\7")
    shutil.rmtree(folder / "cat" / "__MACOSX")
    ImageFolder(str(folder), str(tmp_path / "data"), val_share=0.2, test_share=0.2).prepare()


def test_one_class_is_told(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", {"cat": 6})
    with pytest.warns(UserWarning, match=r"^data\.folder=.*photos has one class, cat, as which any net names every im"):
        ImageFolder(str(folder), str(tmp_path / "data")).prepare()


def test_a_link_in_a_circle_is_no_class(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    (folder / "around").symlink_to("around")
    (folder / "cat" / "again").symlink_to(folder, target_is_directory=True)
    assert class_names(str(folder)) == ["cat", "dog"]
    with pytest.warns(
        UserWarning, match=r"1 folders in those of the classes are not read, with \d+ images: cat/again\. A list"
    ):
        ImageFolder(str(folder), str(tmp_path / "data"), val_share=0.2, test_share=0.2).prepare()


def test_files_of_one_stem_are_told(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    Image.new("RGB", (9, 9)).save(folder / "cat" / "000.jpg")
    with pytest.warns(UserWarning, match=r"cat has 000\.jpg, 000\.png, which differ in their suffix alone"):
        ImageFolder(str(folder), str(tmp_path / "data"), val_share=0.2, test_share=0.2).prepare()


def test_a_folder_that_the_source_does_not_read(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"num_classes": 10, "channels": 1, "image_size": 8, "mean": [0.3], "std": [0.3]}
    with pytest.raises(UserError, match=r"^data\.folder=x is not what the source Digits reads: leave it out, or choo"):
        ImageDataModule(Digits(), **facts, batch_size=8, folder="x")
