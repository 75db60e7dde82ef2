"""Writes shards of a source or of a folder of images, or an index for existing tar files."""

import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lathe.config.class_names import class_names
from lathe.data.checks import check_class_names, check_members, using
from lathe.data.image_folder import find_files
from lathe.data.shards import FORMAT, INDEX, VERSION, Table, decode
from lathe.data.splits import SPLITS, Source, Statistics, load_splits, stratified_split
from lathe.errors import UserError, require
from lathe.files import sha256, whole
from lathe.images.files import read_image
from lathe.images.pictures import PictureError, scaled

PARTS = ("png", "npy", "jpg", "jpeg")  # suffixes of images

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
        UserError: a class is empty, splits differ in classes, nothing is left to train on, or a file is not an image.
    """

    def __init__(
        self, folder: str, channels: int, image_size: int | None, val_size: int, test_size: int, split_seed: int = 0
    ) -> None:
        self.folder, self.channels, self.image_size = Path(folder), channels, image_size
        try:
            self.classes = class_names(folder)
            self.files = find_files(self.folder, self.classes, {})
        except UserError as error:
            raise UserError(str(error).replace("data.folder", "images.folder")) from error
        self.num_classes = len(self.classes)
        self.rows = dict(self.files.rows)
        sizes = {name: size for name, size in (("val", val_size), ("test", test_size)) if name not in self.rows}
        if sizes:
            train = self.rows["train"]
            cut = stratified_split(self.files.labels[train], sizes, split_seed)
            self.rows |= {name: train[rows] for name, rows in cut.items()}

    def samples(self, split: str) -> Iterator[Sample]:
        """Yield the images of a split, one by one."""
        for row in self.rows[split]:
            path = self.folder / self.files.names[row]
            try:
                pixels = read_image(path, self.channels)
            except (PictureError, OSError) as error:
                raise UserError(f"{path} cannot be read as an image ({error}): mend it or remove it.") from error
            size = self.image_size
            yield (pixels if size is None else scaled(pixels, (size, size))), int(self.files.labels[row])


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
        options = {"maxcount": shard_size, "maxsize": 2**62, "verbose": 0, "mtime": 0, "user": "", "group": ""}
        for name, samples in splits.items():
            written, count, stats = list[str](), 0, Statistics()
            with ShardWriter(f"{partial}/{name}-%06d.tar", post=written.append, **options) as writer:
                for count, (image, label) in enumerate(samples, 1):
                    shape = shape or image.shape
                    _check(image, shape, label, num_classes, encoding, f"image {count - 1} of {name}")
                    stats.add(image[None])
                    writer.write({"__key__": f"{count - 1:09d}", encoding: _encodable(image, encoding), "cls": label})
            require(count > 0, f"the {name} split has no images: shards need some in each of {', '.join(SPLITS)}.")
            paths[name] = [Path(path) for path in written]
            facts |= stats.facts() if name == "train" else {}
        assert shape is not None
        return write_index(partial, paths, facts | {"image": list(shape)})


def write_index(folder: Path, shards: dict[str, list[Path]], facts: dict[str, Any]) -> dict[str, Any]:
    """Write the tables and then index.json for the shards in `folder`; return the index."""
    splits = {}
    for name, paths in shards.items():
        tables = [scan(path, number) for number, path in enumerate(paths)]
        table = folder / f"{name}.index.npy"
        np.save(table, np.concatenate(tables))
        splits[name] = {
            "table": _entry(table),
            "shards": [_entry(path) | {"samples": len(rows)} for path, rows in zip(paths, tables, strict=True)],
        }
    index = {"format": FORMAT, "version": VERSION, **facts, "splits": splits}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return index


def _entry(path: Path) -> dict[str, Any]:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def scan(path: Path, number: int) -> Table:
    """Return the table rows of shard `number`, in the order of the tar file."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, _, part = name.partition(".")
                key = f"{folder}/{stem}"
                if part in PARTS:
                    images[key] = (member.offset_data, member.size)
                elif part == "cls":
                    file = tar.extractfile(member)
                    assert file is not None
                    labels[key] = int(file.read())
    except (tarfile.TarError, ValueError, AssertionError) as error:
        raise UserError(f"{path} is not an uncompressed tar file of images and classes: {error}.") from error
    if not images or images.keys() != labels.keys():
        odd = sorted(images.keys() ^ labels.keys())
        what = f"sample {odd[0].strip('/')} of it has not both" if odd else "there is none in it"
        raise UserError(
            f"{path} has to hold an image (.{' or .'.join(PARTS)}) and a class (.cls) of every sample: {what}."
        )
    return np.array([(number, *images[key], labels[key]) for key in images], dtype=np.int64)


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
