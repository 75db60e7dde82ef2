"""The files of an image folder for each split, and their classes."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.config.class_names import is_list, read_list, splits_of, subfolders
from lathe.data.checks import first_few
from lathe.data.splits import Labels
from lathe.errors import UserError, require
from lathe.images.pictures import SUFFIXES


@dataclass(frozen=True)
class ImageFiles:
    """`names` of n files, `labels` [n], `rows` of given splits, `digest` of names, sizes and times."""

    names: list[str]
    labels: Labels
    rows: dict[str, Labels]
    digest: str


def find_files(folder: Path, classes: Sequence[str], given: Mapping[str, str | None]) -> ImageFiles:
    """Return the image files of `folder` by split.

    `given` splits name a folder or a list of files in it. Without any, the subfolders train, val and test are taken if
    they exist, else all files are "train".

    Raises:
        UserError: a split has other classes than train, a class is empty, or a file is missing or in two splits.
    """
    named = {split: name for split, name in given.items() if name is not None}
    if not named:
        named = splits_of(folder)
    elif "train" not in named:
        key, name = next(iter(named.items()))
        raise UserError(f"data.source.{key}={name} needs data.source.train: say which images the net is trained on.")
    for split, name in named.items():
        inside = is_list(name) or not (Path(name).is_absolute() or ".." in Path(name).parts)
        require(
            inside,
            f"data.source.{split}={name} leads out of data.folder={folder}: name a folder or a list of files in it.",
        )
    found = {
        split: _listed(folder, name, split) if is_list(name) else _in_folders(folder / name, folder)
        for split, name in (named or {"train": ""}).items()
    }
    for split, files in found.items():
        _check_classes(folder, split, files, classes)
    names = [name for files in found.values() for name, _ in files]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        both = " and ".join(split for split, files in found.items() if twice in dict(files))
        raise UserError(f"data.folder={folder}: {twice} is in {both}, expected it in one split: leave it out of one.")
    number = {name: index for index, name in enumerate(classes)}
    labels = np.array([number[label] for files in found.values() for _, label in files], dtype=np.int64)
    ends = np.cumsum([len(files) for files in found.values()])
    rows = {
        split: np.arange(end - len(files), end)
        for end, (split, files) in zip(ends.tolist(), found.items(), strict=True)
    }
    return ImageFiles(names, labels, rows, _digest(folder, names))


@cache
def warn_once(sentence: str) -> None:
    """Warn on rank 0, once per process for the same sentence."""
    rank_zero_warn(sentence)


def _below(folder: Path) -> Iterator[str]:
    """Yield the names of all files in a folder, recursively."""
    for _, _, files in os.walk(folder):
        yield from files


def _in_folders(place: Path, folder: Path) -> list[tuple[str, str]]:
    require(place.is_dir(), f"data.folder={folder}: {place} is no folder: name one, or a list of files (.txt, .csv).")
    found: list[tuple[str, str]] = []
    other: list[str] = []
    deeper: list[str] = []
    for label in subfolders(place):
        home, inside = place / label, []
        try:
            inside = sorted(name for name in os.listdir(home) if not name.startswith("."))
        except OSError as error:
            raise UserError(f"data.folder={folder}: {home} can't be read: {error.strerror}.") from error
        images = [name for name in inside if os.path.splitext(name)[1].lower() in SUFFIXES]
        folders = subfolders(home)
        other += [str((home / name).relative_to(folder)) for name in inside if name not in {*images, *folders}]
        deeper += [str((home / name).relative_to(folder)) for name in folders]
        inner = folders if not images else []
        below = f", and the folders in it are not read: {first_few(inner)}" if inner else ""
        way = ", or name it as a split (data.source.train, val, test)" if inner else ""
        require(
            bool(images),
            f"data.folder={folder}: {home} has no image ({', '.join(SUFFIXES)}){below}: put some there, or remove it"
            f"{way}.",
        )
        stems = Counter(os.path.splitext(name)[0] for name in images)
        same = [name for name in images if stems[os.path.splitext(name)[0]] > 1]
        if same:
            warn_once(
                f"data.folder={folder}: {home} has {first_few(same)}, which differ in their suffix alone: if they are "
                "copies, they may lie on both sides of a split."
            )
        found += [(str((home / name).relative_to(folder)), label) for name in images]
    if other:
        warn_once(
            f"data.folder={folder}: {len(other)} files in it are no images ({', '.join(SUFFIXES)}) and are left out: "
            f"{first_few(other)}."
        )
    if deeper:
        within = sum(os.path.splitext(file)[1].lower() in SUFFIXES for name in deeper for file in _below(folder / name))
        warn_once(
            f"data.folder={folder}: {len(deeper)} folders in those of the classes are not read, with {within} images: "
            f"{first_few(deeper)}. A list of files (data.source.train=<name>.csv) can name what lies deeper."
        )
    return found


def _listed(folder: Path, name: str, split: str) -> list[tuple[str, str]]:
    found = list(read_list(folder / name))
    gone = [path for path, _ in found if not (folder / path).is_file()]
    require(
        not gone, f"data.source.{split}={name} lists {first_few(gone)}, not there in data.folder={folder}: mend it."
    )
    out = [path for path, _ in found if os.path.splitext(path)[1].lower() not in SUFFIXES]
    require(
        not out, f"data.source.{split}={name} lists {first_few(out)}, expected images ({', '.join(SUFFIXES)}): mend it."
    )
    return found


def _check_classes(folder: Path, split: str, files: list[tuple[str, str]], classes: Sequence[str]) -> None:
    has = {label for _, label in files}
    surplus, lacking = sorted(has - set(classes)), [name for name in classes if name not in has]
    where = f"data.folder={folder}: {split} has"
    require(
        not surplus,
        f"{where} the class {first_few(surplus)}, not one of data.source.classes ({first_few(list(classes))}).",
    )
    require(
        not lacking,
        f"{where} no class {first_few(lacking)}, one of data.source.classes ({first_few(list(classes))}).",
    )


def _digest(folder: Path, names: Sequence[str]) -> str:
    found = hashlib.sha256()
    for name in names:
        try:
            told = os.stat(folder / name)
            line = f"{name}\0{told.st_size}\0{told.st_mtime_ns}\n"
        except OSError:  # a broken link; reading the image reports it
            line = f"{name}\0\n"
        found.update(line.encode(errors="surrogateescape"))
    return found.hexdigest()
