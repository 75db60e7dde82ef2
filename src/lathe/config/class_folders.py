"""The classes of a folder of images, by the names of the folders in it or by a list of its files: what a configuration
has to know of them before any image is read. Imports no NumPy.
"""

import csv
import os
import stat
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from lathe.config.values import is_valid, problem
from lathe.errors import UserError, require

SPLITS = ("train", "val", "test")
# What folders of splits are called, in small letters.
CALLED = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
_NAME = {"type": "string", "minLength": 1}
NO_CLASSES = ("__MACOSX",)  # what an archive leaves, beside hidden folders
LISTS = (".txt", ".csv")  # the suffixes of lists of files


def class_names(folder: Any, train: Any = None) -> list[str]:
    """The classes of `folder`, sorted: of its folders, of those in `<folder>/train` if it is divided so, or of those in
    the folder or the list of files that `train` names in it.

    Raises:
        UserError: there are none.
    """
    for key, value in (("data.folder", folder), ("data.source.train", train)):
        optional = key.endswith("train")
        sentence = problem(key, value, {**_NAME, "type": ["string", "null"] if optional else "string"})
        require(sentence is None, sentence or "")
    home = Path(folder)
    require(
        os.path.isdir(home),
        f"data.folder={folder} is no folder: give one that has a folder of images for each class, also to a run whose "
        "images have moved (to resume it: with data=image_folder).",
    )
    if train is not None and is_list(train):
        return _checked({label for _, label in read_list(home / train)}, str(home / train))
    place = home / (train or splits_of(home).get("train", ""))
    key = f"data.folder={folder}" if train is None else f"data.source.train={train}"
    there = os.path.isdir(place)
    require(there, f"{key}: {place} is no folder: name one in data.folder, or a list of files in it (.txt, .csv).")
    names = subfolders(place)
    lacking = "has no folder in it, expected one of images for each class, such as"
    require(bool(names), f"{key}: {place} {lacking} {place / 'cat'}.")
    return _checked(names, str(place))


def _checked(names: Iterable[str], place: str) -> list[str]:
    """The classes found in a folder or list, sorted, if a configuration can hold them as they are. Data may be somebody
    else's: an interpolation among them, such as one of an environment's variable, is never resolved."""
    for name in sorted(names):
        require(
            is_valid(name, _NAME) and "${" not in name,
            f"data.folder: {place} has a class named {name!r}, expected printable characters without ${{ and without "
            "blanks around them: rename it.",
        )
    return sorted(names)


def is_list(name: str) -> bool:
    """Whether a split is named by a list of files, and not by a folder."""
    return name.lower().endswith(LISTS)


def splits_of(folder: Path) -> dict[str, str]:
    """The folders in it that are splits, if they are called train, val and test or as people call these: all of them,
    or all three among others. Empty where they are classes.

    Raises:
        UserError: two of them are one split.
    """
    names = subfolders(folder)
    if set(SPLITS) <= set(names):
        return dict(zip(SPLITS, SPLITS, strict=True))
    called = [(CALLED[name.lower()], name) for name in names if name.lower() in CALLED]
    found = dict(reversed(called))
    if "train" not in found or (len(called) < len(names) and len(found) < len(SPLITS)):
        return {}
    for split, name in called:
        require(
            found[split] == name,
            f"data.folder={folder} has {found[split]} and {name}, both {split} by their names: say which by "
            f"data.source.train=..., data.source.{split}={name}.",
        )
    return {split: found[split] for split in SPLITS if split in found}


def subfolders(folder: Path) -> list[str]:
    """The names of the folders in it, sorted; not the hidden ones, nor `NO_CLASSES`."""
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in NO_CLASSES]
            return sorted(entry.name for entry in seen if _is_folder(entry))
    except OSError as error:
        raise UserError(f"data.folder: {folder} can't be read ({error.strerror}): give one that can.") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads round in a circle
        return False


def read_list(path: Path) -> tuple[tuple[str, str], ...]:
    """The files that a list names, relative to the data's folder, each with its class: a line for each, whose class is
    the folder that it lies in, or a CSV with a column `path` and, where the folders are not the classes, `label`.

    Raises:
        UserError: it can't be read, or names a file outside that folder or twice.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"data.source: the list {path} can't be read ({error.strerror}): give one that can.") from error
    require(stat.S_ISREG(found.st_mode), f"data.source: the list {path} is no file: give one with a path on each line.")
    return _read_list(path, (found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=8)
def _read_list(path: Path, _: tuple[int, int]) -> tuple[tuple[str, str], ...]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = _rows(file, path) if path.suffix.lower() == ".csv" else [(line.strip("\r\n"), "") for line in file]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.source: the list {path} can't be read ({error}): write a path of each line.") from error
    files = []
    for name, label in rows:
        if not name.strip():
            continue
        place = PurePosixPath(name)
        require(
            not place.is_absolute() and ".." not in place.parts and "\0" not in name,
            f"data.source: the list {path} names {name}, which leads out of the folder: write paths below data.folder.",
        )
        label = label or place.parent.name
        require(
            bool(label),
            f"data.source: the list {path} has {name} without a class: write <class>/{name}, or a CSV with the columns "
            "path and label.",
        )
        files.append((str(place), label))
    require(bool(files), f"data.source: the list {path} has no files: write a path on each line.")
    seen: set[str] = set()
    for name, _label in files:
        require(name not in seen, f"data.source: the list {path} has {name} twice: leave one out.")
        seen.add(name)
    return tuple(files)


def _rows(file: Any, path: Path) -> list[tuple[str, str]]:
    reader = csv.DictReader(file, skipinitialspace=True)
    columns = [name.strip() for name in reader.fieldnames or ()]
    require(
        columns in (["path"], ["path", "label"], ["label", "path"]),
        f"data.source: the list {path} has the columns {', '.join(columns)}. Name them path, or path and label.",
    )
    reader.fieldnames = columns
    rows = []
    for row in reader:
        name, label = (str(row.get(column) or "").strip() for column in ("path", "label"))
        require(
            bool(label) or "label" not in columns,
            f"data.source: the list {path} has no label in line {reader.line_num}: give each file one.",
        )
        rows.append((name, label))
    return rows
