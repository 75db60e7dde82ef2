"""The index of a set of shards: index.json with facts, sizes and hashes, and a table per split.

Shards are uncompressed tar files in WebDataset's format, with members `<key>.png` (or .npy, .jpg) and `<key>.cls` for
each sample. The table has the place of each image's bytes, so that any sample can be read directly.
"""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lathe.data.checks import check_class_names
from lathe.errors import UserError
from lathe.images.pictures import COLOURS, as_seen

FORMAT, VERSION = "lathe shards", 1
INDEX = "index.json"
SPLITS = ("train", "val", "test")
HOW = "python scripts/make_shards.py"
PARTS = ("png", "npy", "jpg", "jpeg")  # suffixes of images

Table = NDArray[np.int64]  # [samples, 4]: shard, first byte, bytes, label


def decode(data: bytes, channels: int | None = None) -> NDArray[np.uint8]:
    """Decode an image: uint8 [channels, height, width], as for predictions (`lathe.images.pictures`).

    Does not unpickle. `channels` applies to PNG and JPEG; None keeps theirs, 1 or 3. With other numbers of channels,
    pixels are not converted.

    Raises:
        ValueError, OSError: the bytes are not such an image.
    """
    if data[:6] == b"\x93NUMPY":
        pixels: NDArray[np.uint8] = np.load(io.BytesIO(data), allow_pickle=False)
    else:
        try:
            image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
            if channels is None:
                channels = 1 if image.mode[0] in "1LI" else 3
            if channels in COLOURS:
                return as_seen(image, channels)
            pixels = np.asarray(image)
        except SyntaxError as error:  # Pillow raises it for a damaged PNG
            raise ValueError(str(error)) from error
        pixels = np.moveaxis(pixels, -1, 0) if pixels.ndim == 3 else pixels[None]
    if pixels.dtype != np.uint8 or pixels.ndim != 3:
        raise ValueError(f"{pixels.dtype} {list(pixels.shape)} is no image of uint8 [channels, height, width]")
    return pixels


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def describe(path: Path) -> dict[str, Any]:
    """Return a file's entry in the index: {"file", "bytes", "sha256"}."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path)}


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


def write_index(folder: Path, shards: dict[str, list[Path]], facts: dict[str, Any]) -> dict[str, Any]:
    """Write the tables and then index.json for the shards in `folder`; return the index."""
    splits = {}
    for name, paths in shards.items():
        tables = [scan(path, number) for number, path in enumerate(paths)]
        table = folder / f"{name}.index.npy"
        np.save(table, np.concatenate(tables))
        splits[name] = {
            "table": describe(table),
            "shards": [describe(path) | {"samples": len(rows)} for path, rows in zip(paths, tables, strict=True)],
        }
    index = {"format": FORMAT, "version": VERSION, **facts, "splits": splits}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return index


def read_index(folder: Path, key: str) -> dict[str, Any]:
    """Return the contents of index.json; `key` is the configuration's key of the folder."""
    path = folder / INDEX
    if not path.is_file():
        raise UserError(
            f"{key}={folder} holds no shards, as it has no {INDEX}: write them with {HOW} output={folder.name}."
        )
    try:
        index = json.loads(path.read_bytes())
        known = index["format"] == FORMAT and index["version"] == VERSION
        counts = [shard["samples"] for name in SPLITS for shard in index["splits"][name]["shards"]]
        known = known and all(isinstance(n, int) for n in (*counts, *index["image"], index["num_classes"]))
        if "class_names" in index:
            check_class_names(index["class_names"], index["num_classes"])
        entries = [entry for split in index["splits"].values() for entry in (split["table"], *split["shards"])]
        known = known and all(
            Path(entry["file"]).name == entry["file"] != "" and isinstance(entry["bytes"], int) for entry in entries
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError):
        known = False
    if not known:
        raise UserError(
            f"{path} is not version {VERSION} of what {HOW} writes, or is damaged: write the shards again with it."
        )
    return dict(index)


def check_files(folder: Path, index: dict[str, Any], verify: bool) -> None:
    """Compare all files' names and sizes with the index; `verify` also reads and hashes them."""
    again = f"copy it again, or write the shards again with {HOW}"
    entries = [entry for split in index["splits"].values() for entry in (split["table"], *split["shards"])]
    for entry in entries:
        path = folder / entry["file"]
        if not path.is_file():
            raise UserError(f"{path} is missing, but {INDEX} names it: {again}.")
        if path.stat().st_size != entry["bytes"]:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes and {INDEX} says {entry['bytes']}: it was cut or changed; "
                f"{again}."
            )
        if verify and file_hash(path) != entry["sha256"]:
            raise UserError(f"{path} differs from its SHA-256 in {INDEX}: {again}.")
    foreign = sorted({path.name for path in folder.glob("*.tar")} - {entry["file"] for entry in entries})
    if foreign:
        raise UserError(
            f"{folder / foreign[0]} is not in {INDEX}: move it away, or index the folder again with {HOW} "
            f"tars.folder={folder}."
        )
