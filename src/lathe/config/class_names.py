"""Class names of a folder of images: from its folders, or from a list of its files. Imports no NumPy."""

import csv
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from lathe.config.values import is_valid, problem
from lathe.errors import UserError, require

SPLITS = ("train", "val", "test")
SPLIT_FOLDERS = {"training": "train", "valid": "val", "validation": "val", "testing": "test"} | {
    name: name for name in SPLITS
}
LISTS = (".txt", ".csv")  # suffixes of lists of files
_NAME = {"type": "string", "minLength": 1}


def class_names(folder: Any, train: Any = None) -> list[str]:
    """Return the sorted classes of `folder`.

    They are the folders in it, in its train split, or in `train`; or the labels of the list of files `train`. Raises
    UserError if there are none, or a name that a configuration can't have.
    """
    for key, value, kinds in (("data.folder", folder, "string"), ("data.source.train", train, ["string", "null"])):
        message = problem(key, value, {**_NAME, "type": kinds})
        require(message is None, message or "")
    root = Path(folder)
    require(root.is_dir(), f"data.folder={folder} is no folder: give one that has a folder of images for each class.")
    if train is not None and is_list(train):
        path = root / train
        return _checked({label for _, label in read_list(path)}, path)
    path = root / (train or splits_of(root).get("train", ""))
    key = f"data.folder={folder}" if train is None else f"data.source.train={train}"
    require(path.is_dir(), f"{key}: {path} is no folder: name one in data.folder, or a list of files (.txt, .csv).")
    names = subfolders(path)
    require(bool(names), f"{key}: {path} has no folder in it, expected one for each class, such as {path / 'cat'}.")
    return _checked(names, path)


def _checked(names: Iterable[str], path: Path) -> list[str]:
    """Refuse names with an interpolation: foreign data could read environment variables by one."""
    for name in sorted(names):
        is_printable = is_valid(name, _NAME) and "${" not in name
        problem = f"data.folder: {path} has a class named {name!r}, expected printable characters without ${{"
        require(is_printable, f"{problem}. Rename it.")
    return sorted(names)


def is_list(name: str) -> bool:
    """True for a list of files, False for a folder."""
    return name.lower().endswith(LISTS)


def splits_of(folder: Path) -> dict[str, str]:
    """Return the folders that are splits by their names, by split; empty if the folders are classes.

    Either all folders are splits, or train, val and test are among them. Raises UserError for two of the same split.
    """
    names = subfolders(folder)
    if set(SPLITS) <= set(names):
        return dict(zip(SPLITS, SPLITS, strict=True))
    named = [(SPLIT_FOLDERS[name.lower()], name) for name in names if name.lower() in SPLIT_FOLDERS]
    splits = dict(reversed(named))
    if "train" not in splits or (len(named) < len(names) and len(splits) < len(SPLITS)):
        return {}
    for split, name in named:
        message = f"data.folder={folder}: {splits[split]} and {name} are both {split}. Set data.source.{split}."
        require(splits[split] == name, message)
    return {split: splits[split] for split in SPLITS if split in splits}


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in it, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and _is_folder(entry))
    except OSError as error:
        raise UserError(f"data.folder: {folder} can't be read ({error.strerror}): give one that can.") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # a link that leads to itself
        return entry.name != "__MACOSX" and entry.is_dir()  # left by an archive
    return False


def read_list(path: Path) -> tuple[tuple[str, str], ...]:
    """Return the files and classes of a list; files are relative to the data's folder.

    A text file has a path on each line, whose folder is the class. A CSV file has a column `path`, and `label` where
    folders are not the classes. Raises UserError if it can't be read, or has a file twice or outside the folder.
    """
    where = f"data.source: the list {path}"
    require(not path.exists() or path.is_file(), f"{where} is no file: give one with a path on each line.")
    try:
        stat = path.stat()
        return _read_list(path, where, (stat.st_mtime_ns, stat.st_size))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{where} can't be read ({error}): give one with a path on each line.") from error


@lru_cache(maxsize=8)
def _read_list(path: Path, where: str, _: tuple[int, int]) -> tuple[tuple[str, str], ...]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        if path.suffix.lower() == ".csv":
            reader = csv.DictReader(file, skipinitialspace=True)
            reader.fieldnames = columns = [name.strip() for name in reader.fieldnames or ()]
            is_known = {"path"} <= set(columns) <= {"path", "label"}
            require(is_known, f"{where} has the columns {', '.join(columns)}. Name them path, or path and label.")
            rows = [(str(row["path"] or "").strip(), str(row.get("label") or "").strip()) for row in reader]
            is_labelled = "label" not in columns or all(label for _, label in rows)
            require(is_labelled, f"{where} has a line without a label: give each file one.")
        else:
            rows = [(line.strip("\r\n"), "") for line in file]
    files: dict[str, str] = {}
    for name, label in [row for row in rows if row[0].strip()]:
        relative = PurePosixPath(name)
        label = label or relative.parent.name
        is_inside = not relative.is_absolute() and ".." not in relative.parts and "\0" not in name
        require(is_inside, f"{where} names {name}, which leads out of the folder: write paths below data.folder.")
        require(bool(label), f"{where} has {name} without a class: write <class>/{name}, or a CSV with path and label.")
        require(str(relative) not in files, f"{where} has {relative} twice: leave one out.")
        files[str(relative)] = label
    require(bool(files), f"{where} has no files: write a path on each line.")
    return tuple(files.items())
