"""Writes shards of a source or of a folder of images, or an index for existing tar files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lathe.config.class_names import splits_of, subfolders
from lathe.data.checks import check_class_names, check_number
from lathe.data.shard_index import INDEX, SPLITS, decode, scan, write_index
from lathe.data.source import check_members, load_splits, using
from lathe.data.splits import Source, stratified_split
from lathe.errors import ArgumentError, UserError
from lathe.files import whole
from lathe.images.files import read_image
from lathe.images.pictures import COLOURS, SUFFIXES, PictureError, scaled

Sample = tuple[NDArray[np.uint8], int]  # image [channels, height, width] and class


class FolderSamples:
    """Image files `<folder>/<class>/*`, or `<folder>/<split>/<class>/*`, read one at a time.

    Splits are train, val and test, or training, valid, validation and testing. Classes are numbered in the order of
    their folders' names. Splits without a folder are drawn from train, stratified.

    Args:
        folder: see above.
        channels: 1 for grey, 3 for RGB.
        image_size: side in pixels of the scaled central square, as for predictions (`lathe.images.pictures`); None for
            images that have one size.
        val_size: validation images, if the folder has no such split.
        test_size: test images, if the folder has no such split.
        split_seed: of the split.

    Raises:
        ArgumentError: there is no such folder, splits differ in classes, or nothing is left to train on.
        UserError: a class is empty, or a file is not an image.
    """

    def __init__(
        self, folder: str, channels: int, image_size: int | None, val_size: int, test_size: int, split_seed: int = 0
    ) -> None:
        self.folder, self.channels, self.image_size = Path(folder), channels, image_size
        if channels not in COLOURS:
            raise ArgumentError(f"channels={channels}: expected 1, which makes images grey, or 3, RGB.")
        if image_size is not None:
            check_number("image_size", image_size, 1)
        if not self.folder.is_dir():
            raise ArgumentError(f"folder={folder} is no folder: give one that has a folder of images for each class.")
        divided = splits_of(self.folder)
        train = self.folder / divided.pop("train", ".")
        self.classes = subfolders(train)
        files = self._list(train)
        sizes = {name: size for name, size in (("val", val_size), ("test", test_size)) if name not in divided}
        labels = np.array([label for _, label in files])
        rows = stratified_split(labels, sizes, split_seed) if sizes else {"train": np.arange(len(files))}
        self.files = {split: [files[row] for row in rows[split]] for split in rows}
        self.files |= {split: self._list(self.folder / name) for split, name in divided.items()}
        self.num_classes = len(self.classes)

    def _list(self, folder: Path) -> list[tuple[Path, int]]:
        found = subfolders(folder)
        if not found or found != self.classes:
            raise ArgumentError(
                f"folder={self.folder}: {folder} has the classes {found} and not {self.classes}: one folder "
                "for each class."
            )
        files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        empty = set(range(len(self.classes))) - {label for _, label in files}
        if empty:
            raise UserError(
                f"{folder / self.classes[min(empty)]} has no image ({', '.join(SUFFIXES)}): put some there, or "
                "remove it."
            )
        return files

    def samples(self, split: str) -> Iterator[Sample]:
        """Yield the images of a split, one by one."""
        for path, label in self.files[split]:
            try:
                pixels = read_image(path, self.channels)
            except (PictureError, OSError) as error:
                raise UserError(f"{path} cannot be read as an image ({error}): mend it or remove it.") from error
            yield (pixels if self.image_size is None else scaled(pixels, (self.image_size, self.image_size))), label


def source_samples(source: Source) -> dict[str, Iterator[Sample]]:
    """Return iterators over the splits of a source, image by image in stored order."""
    check_members(source, "num_classes", "prepare", "load")
    with using(source, "prepared"):
        source.prepare()
    splits = load_splits(source)

    def walk(name: str) -> Iterator[Sample]:
        split = getattr(splits, name)
        for row in split.rows:
            yield split.images[row], int(split.labels[row])

    return {name: walk(name) for name in SPLITS}


def write_shards(
    output: Path,
    splits: Mapping[str, Iterable[Sample]],
    num_classes: int,
    shard_size: int,
    encoding: Literal["png", "npy"] = "png",
    overwrite: bool = False,
    class_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Write `output`/<split>-<number>.tar and their index, all or nothing; return the index.

    One image is in memory at a time. Equal input gives equal bytes.

    Args:
        output: the folder.
        splits: images and classes of "train", "val" and "test".
        num_classes: of all splits.
        shard_size: samples of a shard; the last of a split may have fewer.
        encoding: "png" (lossless; 1 or 3 channels) or "npy" (raw pixels: larger, and faster to read).
        overwrite: whether to replace existing shards.
        class_names: in the order of the classes, for training; None for none.

    Raises:
        UserError: `output` exists, webdataset is missing, images differ in shape or can't be encoded, or a split is
            empty.
    """
    check_number("shard_size", shard_size, 1)
    if encoding not in ("png", "npy"):
        raise UserError(f"encoding={encoding} is unknown: choose one of png, npy.")
    if output.exists() and not (overwrite and (output / INDEX).is_file()):
        way = (
            "it holds no shards: name another folder"
            if overwrite
            else "name another folder, or replace it with overwrite=true"
        )
        raise UserError(f"output={output} is there already: {way}.")
    try:
        from webdataset import ShardWriter
    except ImportError as error:
        raise UserError("writing shards needs webdataset: install it with pip install -e '.[shards]'.") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole(output, replace_folder=True) as partial:
        partial.mkdir()
        paths: dict[str, list[Path]] = {}
        facts: dict[str, Any] = {"num_classes": num_classes, "encoding": encoding}
        if class_names is not None:
            facts["class_names"] = check_class_names(class_names, num_classes)
        shape: tuple[int, ...] | None = None
        for name, samples in splits.items():
            written: list[str] = []
            pattern = f"{partial}/{name}-%06d.tar"
            count = 0
            stats = Statistics()
            with (
                ShardWriter(
                    pattern,
                    maxcount=shard_size,
                    maxsize=2**62,
                    verbose=0,
                    post=written.append,
                    mtime=0,
                    user="",
                    group="",
                ) as writer,
            ):
                for count, (image, label) in enumerate(samples, 1):
                    shape = shape or image.shape
                    _check(image, shape, label, num_classes, encoding, f"image {count - 1} of {name}")
                    stats.add(image)
                    writer.write({"__key__": f"{count - 1:09d}", encoding: _encodable(image, encoding), "cls": label})
            if not count:
                raise UserError(f"the {name} split has no images: shards need some in each of {', '.join(SPLITS)}.")
            paths[name] = [Path(path) for path in written]
            facts |= stats.facts() if name == "train" else {}
        assert shape is not None
        index = write_index(partial, paths, facts | {"image": list(shape)})
    return index


class Statistics:
    """Mean and standard deviation of each channel, pixels on a scale from 0 to 1."""

    def __init__(self) -> None:
        self.n, self.total, self.squares = 0, np.zeros(0), np.zeros(0)

    def add(self, image: NDArray[np.uint8]) -> None:
        """Add the pixels of an image [channels, height, width]."""
        pixels = image.reshape(len(image), -1).astype(np.float64) / 255
        self.n += pixels.shape[1]
        self.total = pixels.sum(1) + (self.total if len(self.total) else 0)
        self.squares = (pixels**2).sum(1) + (self.squares if len(self.squares) else 0)

    def facts(self) -> dict[str, list[float]]:
        """Return {"mean", "std"} of each channel, rounded to four digits."""
        mean = self.total / self.n
        std = np.sqrt(np.maximum(self.squares / self.n - mean**2, 0))
        return {"mean": mean.round(4).tolist(), "std": std.round(4).tolist()}


def _encodable(image: NDArray[np.uint8], encoding: str) -> NDArray[np.uint8]:
    if encoding == "npy":
        return np.ascontiguousarray(image)
    return image[0] if len(image) == 1 else np.ascontiguousarray(np.moveaxis(image, 0, -1))


def _check(
    image: NDArray[np.uint8], shape: tuple[int, ...], label: int, classes: int, encoding: str, what: str
) -> None:
    if image.shape != shape:
        raise UserError(
            f"{what} has the shape {list(image.shape)} and the first one {list(shape)}: set images.image_size to "
            "make them equal."
        )
    if encoding == "png" and len(image) not in (1, 3):
        raise UserError(f"encoding=png takes 1 or 3 channels and the images have {len(image)}: use encoding=npy.")
    if not 0 <= label < classes:
        raise UserError(f"{what} has the class {label}, but there are {classes}.")


def index_tars(folder: Path, num_classes: int) -> dict[str, Any]:
    """Write the index for existing tar files `<split>-*.tar` in WebDataset's format."""
    if not folder.is_dir():
        raise UserError(
            f"tars.folder={folder} is no folder: give the one where train-*.tar, val-*.tar and test-*.tar lie."
        )
    paths = {name: sorted(folder.glob(f"{name}-*.tar")) for name in SPLITS}
    shape: tuple[int, ...] = ()
    for name, found in paths.items():
        if not found:
            raise UserError(
                f"tars.folder={folder} has no {name}-*.tar: each of {', '.join(SPLITS)} needs at least one."
            )
        for path in found:
            table = scan(path, 0)
            shape = shape or _first(path, *table[0, 1:3].tolist()).shape
            if table[:, 3].min() < 0 or table[:, 3].max() >= num_classes:
                raise UserError(
                    f"{path} has classes up to {table[:, 3].max()}, but tars.num_classes={num_classes}: set as many "
                    "as there are."
                )
    return write_index(folder, paths, {"num_classes": num_classes, "image": list(shape), "encoding": "any"})


def _first(path: Path, start: int, size: int) -> NDArray[np.uint8]:
    with open(path, "rb") as file:
        file.seek(start)
        try:
            return decode(file.read(size))
        except (ValueError, OSError) as error:
            raise UserError(
                f"{path} starts with what is no image ({error}): leave it out, or write it again."
            ) from error
