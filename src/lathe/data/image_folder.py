"""Images of any size in a folder per class, decoded and scaled once, and then kept as one memory-mapped array."""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from filelock import FileLock

from lathe.config.class_names import SPLITS, class_names, is_list, read_list, splits_of, subfolders
from lathe.config.types import Count, Name, NonNegativeInt, OpenShare, Seed, SomeNames
from lathe.config.validation import validated
from lathe.data.checks import first_few, warn_missing_classes, warn_once
from lathe.data.splits import Images, Labels, Split, Splits, Statistics
from lathe.errors import UserError, require
from lathe.files import whole
from lathe.images import SUFFIXES, PictureError, read_image, scaled

BLOCK = 256  # images that are read before they are written


@dataclass(frozen=True)
class ImageFiles:
    """`names` of n files, `labels` [n], `rows` of given splits, `digest` of names, sizes and times."""

    names: list[str]
    labels: Labels
    rows: dict[str, Labels]
    digest: str


def find_files(folder: Path, classes: Sequence[str], split_names: Mapping[str, str | None]) -> ImageFiles:
    """Return the image files of `folder` by split.

    `split_names` name a folder or a list of files in it. Without any, the subfolders train, val and test are taken if
    they exist, else all files are "train".

    Raises:
        UserError: a split has other classes than train, a class is empty, or a file is missing or in two splits.
    """
    named = {split: name for split, name in split_names.items() if name is not None}
    sources = named or splits_of(folder) or {"train": ""}
    require("train" in sources, "data.source.val and test need data.source.train: name the training images too.")
    entries: dict[str, list[tuple[str, str]]] = {}
    for split, name in sources.items():
        inside = is_list(name) or not (Path(name).is_absolute() or ".." in Path(name).parts)
        require(inside, f"data.source.{split}={name} leads out of data.folder={folder}: name what lies in it.")
        if is_list(name):
            files = entries[split] = list(read_list(folder / name))
            is_image = [(folder / path).is_file() and Path(path).suffix.lower() in SUFFIXES for path, _ in files]
            wrong = [path for (path, _), fits in zip(files, is_image, strict=True) if not fits]
            require(
                not wrong,
                f"data.source.{split}={name} lists {first_few(wrong)}, which are no images ({', '.join(SUFFIXES)}) in "
                f"data.folder={folder}: mend it.",
            )
        else:
            entries[split] = _in_folders(folder / name, folder)
        differ = set(classes) ^ {label for _, label in entries[split]}
        require(
            not differ,
            f"data.folder={folder}: {split} and data.source.classes ({first_few(list(classes))}) differ in "
            f"{first_few(sorted(differ))}.",
        )
    names = [name for files in entries.values() for name, _ in files]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        both = " and ".join(split for split, files in entries.items() if twice in dict(files))
        raise UserError(f"data.folder={folder}: {twice} is in {both}: leave it out of one.")
    number = {name: index for index, name in enumerate(classes)}
    labels = np.array([number[label] for files in entries.values() for _, label in files], dtype=np.int64)
    parts = np.split(np.arange(len(names)), np.cumsum([len(files) for files in entries.values()])[:-1])
    digest = hashlib.sha256()
    for name in names:
        try:
            file = os.stat(folder / name)
            line = f"{name}\0{file.st_size}\0{file.st_mtime_ns}\n"
        except OSError:  # a broken link; reading the image reports it
            line = f"{name}\0\n"
        digest.update(line.encode(errors="surrogateescape"))
    return ImageFiles(names, labels, dict(zip(entries, parts, strict=True)), digest.hexdigest())


def _in_folders(parent: Path, folder: Path) -> list[tuple[str, str]]:
    require(parent.is_dir(), f"data.folder={folder}: {parent} is no folder: name one, or a list of files (.txt, .csv).")
    images: list[tuple[str, str]] = []
    others: list[str] = []
    for label in subfolders(parent):
        count = len(images)
        for name in sorted(name for name in os.listdir(parent / label) if not name.startswith(".")):
            path = str((parent / label / name).relative_to(folder))
            if os.path.splitext(name)[1].lower() in SUFFIXES:
                images.append((path, label))
            else:
                others.append(path)
        require(
            len(images) > count,
            f"data.folder={folder}: {parent / label} has no image ({', '.join(SUFFIXES)}), and its folders are not "
            "read: remove it, or name it as a split (data.source.train, val, test).",
        )
    if others:
        warn_once(
            f"data.folder={folder}: {len(others)} entries of class folders are no images ({', '.join(SUFFIXES)}) and "
            f"are left out: {first_few(others)}. A list of files (data.source.train=x.csv) can name deeper ones."
        )
    return images


class ImageFolder:
    """Image files `<folder>/<class>/*`, `<folder>/<split>/<class>/*` (train, val, test), or from lists.

    They are decoded and scaled once, as predictions and requests are (`lathe.images`), and cached as an array.

    The arguments are those of `source` in configs/data/image_folder.yaml, which describes them.
    """

    @validated
    def __init__(
        self,
        folder: Name,
        data_dir: Name,
        classes: SomeNames | None = None,
        train: Name | None = None,
        val: Name | None = None,
        test: Name | None = None,
        channels: Literal[1] | Literal[3] = 3,
        image_size: Count = 64,
        resize: Literal["crop", "squash"] = "crop",
        val_share: OpenShare = 0.1,
        test_share: OpenShare = 0.1,
        split_seed: Seed = 0,
        skip_bad: NonNegativeInt = 0,
    ) -> None:
        labels = class_names(folder, train)
        self.class_names = list(classes or labels)
        differs = [
            f"{first_few(sorted(names))} {what}"
            for what, names in (("more", {*labels} - {*self.class_names}), ("less", {*self.class_names} - {*labels}))
            if names
        ]
        require(
            not differs,
            f"data.folder={folder} has other classes than data.source.classes, {' and '.join(differs)}: give their "
            "folder, or train a new run.",
        )
        self.folder, self.data_dir = Path(folder), Path(data_dir)
        self.given = {"train": train, "val": val, "test": test}
        self.shape = (channels, image_size, image_size)
        self.resize = resize
        self.shares = {"val": val_share, "test": test_share}
        self.split_seed, self.skip_bad = split_seed, skip_bad

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def prepare(self) -> None:
        """Read all images, unless they are cached and unchanged."""
        self._divided(np.zeros(0, np.int64))  # checked before the images are read, which may take long
        if self.num_classes == 1:
            warn_once(f"data.folder={self.folder} has one class, {self.class_names[0]}: expected a folder for each.")
        is_new = self._open() is None and self._make()
        splits = self.load()
        if not is_new:
            return
        counts = ", ".join(f"{len(getattr(splits, split))} {split}" for split in SPLITS)
        rows, statistics = splits.train.rows, Statistics()
        for start in range(0, len(rows), BLOCK):
            statistics.add(splits.train.images[rows[start : start + BLOCK]])
        facts = {name: json.dumps(values).replace(" ", "") for name, values in statistics.facts().items()}
        print(
            f"data.folder={self.folder}: {counts} images of {self.num_classes} classes, read once; the training images "
            f"have {' '.join(f'data.{name}={values}' for name, values in facts.items())}.",
            flush=True,
        )

    def load(self) -> Splits:
        """Return images uint8 [n, channels, image_size, image_size], memory-mapped."""
        opened = self._open()
        if opened is None:
            raise UserError(f"data.folder={self.folder} has not been read yet: call prepare() of its source first.")
        images, bad = opened
        if bad:
            warn_once(f"data.source.skip_bad={self.skip_bad} leaves out {self._check_bad(bad)}.")
        rows = self._divided(np.array(sorted(bad), dtype=np.int64))
        ways = "add images, raise data.source.val_share or test_share, or name the splits"
        warn_missing_classes(f"data.folder={self.folder}", self._files.labels, rows, self.class_names, ways)
        return Splits(**{split: Split(images, self._files.labels, rows[split], self._files.names) for split in SPLITS})

    @cached_property
    def _files(self) -> ImageFiles:
        return find_files(self.folder, self.class_names, self.given)

    @cached_property
    def _place(self) -> Path:
        """The folder of `images.npy`, uint8 [files, *shape], and `bad.json`, rows and reasons of unreadable files.

        Its name has the folder's, a hash of the options, and a digest of the files: a new digest replaces the folder.
        """
        options = [str(self.folder.resolve()), self.given, self.shape, self.resize]
        called = re.sub(r"\W", "_", self.folder.resolve().name)[:40]
        name = f"{called}-{hashlib.sha256(json.dumps(options).encode()).hexdigest()[:8]}"
        return self.data_dir / "image_folder_cache" / f"{name}-{self._files.digest[:16]}"

    def _open(self) -> tuple[Images, dict[int, str]] | None:
        """Return the images, and the reasons of unreadable rows; None if they are missing or incomplete."""
        try:
            images = np.load(self._place / "images.npy", mmap_mode="r", allow_pickle=False)
            bad = {int(row): str(why) for row, why in json.loads((self._place / "bad.json").read_text()).items()}
        except (OSError, ValueError, EOFError, AttributeError):
            return None
        fits = images.dtype == np.uint8 and images.shape == (len(self._files.names), *self.shape)
        return (images, bad) if fits else None

    def _make(self) -> bool:
        """Read all images, in one process while others wait; return False if another has done it."""
        cache_root, cache = self._place.parent, self._place
        cache_root.mkdir(parents=True, exist_ok=True)
        name = cache.name.rpartition("-")[0]
        with FileLock(cache_root / f".{name}.lock"):
            if self._open() is not None:
                return False
            with whole(cache, replace_folder=True) as partial:
                partial.mkdir()
                bad = self._write(partial / "images.npy", name)
                (partial / "bad.json").write_text(json.dumps(bad))
            for older in cache_root.glob(f"{name}-*"):
                if older != cache:
                    shutil.rmtree(older, ignore_errors=True)
        return True

    def _write(self, path: Path, name: str) -> dict[int, str]:
        """Read all files in threads into one array; images of unreadable ones are black."""
        from rich.progress import track

        def read(file: str) -> Images | str:
            try:
                pixels = read_image(self.folder / file, self.shape[0])
                return scaled(pixels, self.shape[1:], self.resize == "squash")
            except PictureError as error:
                return str(error)
            except OSError as error:
                return f"can't be read ({error.strerror or error})"

        bad: dict[int, str] = {}
        files = self._files.names
        with open(path, "wb") as file, ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(files), *self.shape)}
            np.lib.format.write_array_header_1_0(file, header)
            for start in track(range(0, len(files), BLOCK), name):
                block = files[start : start + BLOCK]
                images = np.zeros((len(block), *self.shape), dtype=np.uint8)
                for row, result in enumerate(threads.map(read, block)):
                    if isinstance(result, str):
                        bad[start + row] = result
                    else:
                        images[row] = result
                self._check_bad(bad)
                file.write(images.tobytes())
        return bad

    def _check_bad(self, bad: dict[int, str]) -> str:
        """Name unreadable files; raise UserError if there are more than `skip_bad`."""
        reasons = first_few([f"{self.folder / self._files.names[row]} {why}" for row, why in bad.items()])
        ways = "mend or remove it, or set data.source.skip_bad to how many may be left out"
        require(len(bad) <= self.skip_bad, f"data.source.skip_bad={self.skip_bad}: {reasons}: {ways}.")
        return reasons

    def _divided(self, bad: Labels) -> dict[str, Labels]:
        """Return the rows of each split; splits that are not given are cut out of train."""
        rows = {split: np.setdiff1d(members, bad) for split, members in self._files.rows.items()}
        train, labels = rows["train"], self._files.labels
        sizes = {split: max(1, round(len(train) * share)) for split, share in self.shares.items() if split not in rows}
        if sizes:
            shares = " and ".join(f"data.source.{split}_share={self.shares[split]}" for split in sizes)
            message = f"data.folder={self.folder} has {len(train)} images, of which {shares} leave none to train on."
            require(sum(sizes.values()) < len(train), message)
            # in an order whose every beginning has the classes' shares; within a class by a hash of the file names, so
            # that adding or removing a file moves at most one or two others to another split
            texts = [f"{self.split_seed} {self._files.names[row]}" for row in train]
            drawn = [hashlib.sha256(text.encode(errors="surrogateescape")).digest() for text in texts]
            position = np.zeros(len(train))
            for label in range(self.num_classes):
                members = sorted((labels[train] == label).nonzero()[0].tolist(), key=drawn.__getitem__)
                position[members] = (np.arange(len(members)) + 0.5) / max(len(members), 1)
            order = train[sorted(range(len(train)), key=lambda at: (position[at], drawn[at]))]
            for split, size in sizes.items():
                rows[split], order = np.sort(order[:size]), order[size:]
            rows["train"] = np.sort(order)
        counts = np.bincount(labels[rows["train"]], minlength=self.num_classes)
        if not counts.all():
            raise UserError(
                f"data.folder={self.folder}: no image of class {self.class_names[int(counts.argmin())]} is left to "
                "train on: add some, or name the splits (data.source.train, val, test)."
            )
        return rows
