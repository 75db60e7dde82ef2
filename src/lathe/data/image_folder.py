"""Images of any size in a folder per class."""

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from lathe.config.class_names import SPLITS, class_names
from lathe.config.types import Count, Name, NonNegativeInt, OpenShare, Seed, SomeNames
from lathe.config.validation import validated
from lathe.data.checks import first_few, warn_missing_classes
from lathe.data.image_cache import ImageCache, check_bad
from lathe.data.image_files import ImageFiles, find_files, warn_once
from lathe.data.splits import Images, Labels, Split, Splits
from lathe.errors import UserError, require
from lathe.images.files import read_image
from lathe.images.pictures import scaled


class ImageFolder:
    """Image files `<folder>/<class>/*`, `<folder>/<split>/<class>/*` (train, val, test), or from lists.

    They are decoded and scaled once, as predictions and requests are (`lathe.images`), and cached as an array.

    Args:
        folder: see above.
        data_dir: the cache is in its folder `image_folder_cache`.
        classes: names in the order of the labels; None for those found, sorted.
        train: folder of class folders, or list of files (.txt, .csv), in `folder`; None for `<folder>/train`, or
            without splits for all images.
        val: the same for validation; None for `<folder>/val`, or `val_share` of train.
        test: the same for the test; None for `<folder>/test`, or `test_share` of train.
        channels: 1 for grey, 3 for RGB.
        image_size: side in pixels of the scaled square.
        resize: "crop" scales the largest central square, "squash" the whole image.
        val_share: of train, stratified, for a missing validation split.
        test_share: of train, stratified, for a missing test split.
        split_seed: of both; independent of the run's seed.
        skip_bad: number of unreadable images that may be left out.
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
        found = class_names(folder, train)
        self.class_names = list(classes or found)
        new = [name for name in found if name not in set(self.class_names)]
        gone = [name for name in self.class_names if name not in set(found)]
        differs = [f"{first_few(names)} {what}" for names, what in ((new, "more"), (gone, "less")) if names]
        require(
            not differs,
            f"data.folder={folder} has other classes than data.source.classes, {' and '.join(differs)}: give the "
            "folder that has these, or train a new run.",
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
            warn_once(
                f"data.folder={self.folder} has one class, {self.class_names[0]}, as which any net names every image "
                "rightly: a folder for each class has to lie in it, beside this one."
            )
        made = self._cache.make(self._read, self.skip_bad)
        splits = self.load()
        if made:
            print(f"data.folder={self.folder}: {self._told(splits)}", flush=True)

    def load(self) -> Splits:
        """Return images uint8 [n, channels, image_size, image_size], memory-mapped."""
        opened = self._cache.open()
        if opened is None:
            raise UserError(f"data.folder={self.folder} has not been read yet: call prepare() of its source first.")
        images, bad = opened
        if bad:
            check_bad(bad, self._cache.files, self.skip_bad)
            told = first_few([f"{self._cache.files[row]} {why}" for row, why in bad.items()])
            warn_once(f"data.source.skip_bad={self.skip_bad} leaves out {told}.")
        rows = self._divided(np.array(sorted(bad), dtype=np.int64))
        ways = "add images, raise data.source.val_share or test_share, or name the splits"
        warn_missing_classes(f"data.folder={self.folder}", self._files.labels, rows, self.class_names, ways)
        return Splits(**{split: Split(images, self._files.labels, rows[split], self._files.names) for split in SPLITS})

    @cached_property
    def _files(self) -> ImageFiles:
        return find_files(self.folder, self.class_names, self.given)

    @cached_property
    def _cache(self) -> ImageCache:
        files, options = self._files, [str(self.folder.resolve()), self.given, self.shape, self.resize]
        called = re.sub(r"\W", "_", self.folder.resolve().name)[:40]
        name = f"{called}-{hashlib.sha256(json.dumps(options).encode()).hexdigest()[:8]}"
        home = self.data_dir / "image_folder_cache"
        return ImageCache(home, name, files.digest, [self.folder / file for file in files.names], self.shape)

    def _read(self, path: Path) -> Images:
        return scaled(read_image(path, self.shape[0]), self.shape[1:], self.resize == "squash")

    def _divided(self, bad: Labels) -> dict[str, Labels]:
        """Return the rows of each split; splits that are not given are cut out of train."""
        rows = {split: np.setdiff1d(own, bad) for split, own in self._files.rows.items()}
        train, labels = rows["train"], self._files.labels
        sizes = {split: max(1, round(len(train) * share)) for split, share in self.shares.items() if split not in rows}
        if sizes:
            require(
                sum(sizes.values()) < len(train),
                f"data.folder={self.folder} has {len(train)} images to train on, of which "
                f"{' and '.join(f'data.source.{split}_share={self.shares[split]}' for split in sizes)} leave none: add "
                "images, or choose less.",
            )
            order = self._in_turn(train)
            for split, size in sizes.items():
                rows[split], order = np.sort(order[:size]), order[size:]
            rows["train"] = np.sort(order)
        counts = np.bincount(labels[rows["train"]], minlength=self.num_classes)
        if not counts.all():
            raise UserError(
                f"data.folder={self.folder}: no image of class {self.class_names[int(counts.argmin())]} is left to "
                "train on: add images of it, or name the splits (data.source.train, val, test)."
            )
        return rows

    def _in_turn(self, rows: Labels) -> Labels:
        """Return the rows in an order whose every beginning has the classes' shares.

        Within a class they are ordered by a hash of the file names, so that adding or removing a file moves at most one
        or two others to another split.
        """
        names = [self._files.names[row] for row in rows]
        drawn = [
            hashlib.sha256(f"{self.split_seed} {name}".encode(errors="surrogateescape")).digest() for name in names
        ]
        labels = self._files.labels[rows]
        place = np.zeros(len(rows))
        for label in range(self.num_classes):
            own = sorted((labels == label).nonzero()[0].tolist(), key=drawn.__getitem__)
            place[own] = (np.arange(len(own)) + 0.5) / max(len(own), 1)
        return rows[sorted(range(len(rows)), key=lambda at: (place[at], drawn[at]))]

    def _told(self, splits: Splits) -> str:
        """Return the split sizes, and the mean and standard deviation of the training images, as a message."""
        counts = ", ".join(f"{len(getattr(splits, split))} {split}" for split in SPLITS)
        rows, sums = splits.train.rows, np.zeros((2, self.shape[0]))
        for start in range(0, len(rows), 256):
            block = splits.train.images[rows[start : start + 256]].astype(np.float64) / 255
            sums += [block.mean((2, 3)).sum(0), (block**2).mean((2, 3)).sum(0)]
        mean, squares = sums / len(rows)
        std = np.sqrt(np.maximum(squares - mean**2, 0))
        measured = " ".join(
            f"data.{name}={json.dumps([round(float(v), 4) for v in values])}".replace(" ", "")
            for name, values in (("mean", mean), ("std", std))
        )
        return f"{counts} images of {self.num_classes} classes, read once; the training images have {measured}."
