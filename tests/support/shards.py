"""A small set of images, and shards of it, for the tests of shards."""

from pathlib import Path
from typing import Any

import numpy as np

from lathe.data.shard_write import write_shards

SIZES = {"train": 50, "val": 9, "test": 7}


def pixels(shape: tuple[int, ...] = (3, 8, 8)) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        name: (rng.integers(0, 256, (n, *shape), dtype=np.uint8), rng.integers(0, 5, n)) for name, n in SIZES.items()
    }


def write(path: Path, shape: tuple[int, ...] = (3, 8, 8), **settings: Any) -> Path:
    splits = {name: zip(images, labels.tolist(), strict=True) for name, (images, labels) in pixels(shape).items()}
    write_shards(path, splits, **({"num_classes": 5, "shard_size": 8} | settings))
    return path
