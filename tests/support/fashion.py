"""A small Fashion-MNIST: the four files in the real format, with few images."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np

from lathe.data.published import IDX_FILES, IdxFile

Truth = dict[str, tuple[np.ndarray, np.ndarray]]
COUNTS = {"train": 60, "test": 20}


def idx(array: np.ndarray) -> bytes:
    """Return the array as an IDX file."""
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def write(
    folder: Path, compressed: bool = True, highest: int = 9, bars: bool = False
) -> tuple[dict[str, tuple[IdxFile, ...]], Truth]:
    """Write the files, of noise or `bars` that depend on the label; return their table and content."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    files: dict[str, tuple[IdxFile, ...]] = {}
    truth: Truth = {}
    for split, pair in IDX_FILES["fashion_mnist"].items():
        n = COUNTS[split]
        labels = (np.arange(n) % (highest + 1)).astype(np.uint8)
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        if bars:
            step = 28 // (highest + 1)
            rows = np.arange(28) // step == labels[:, None]
            images = images // 4 + 192 * rows[:, :, None].astype(np.uint8)
        truth[split] = (images, labels)
        made = []
        for file, array in zip(pair, truth[split], strict=True):
            data = idx(array)
            packed = gzip.compress(data, mtime=0)
            (folder / (file.name + ".gz" * compressed)).write_bytes(packed if compressed else data)
            made.append(
                IdxFile(file.name, hashlib.md5(packed).hexdigest(), hashlib.sha256(data).hexdigest(), array.shape)
            )
        files[split] = tuple(made)
    return files, truth
