"""A small set of images, and shards of it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lathe.data.augment import Augment, Normalizer
from lathe.data.shards import ShardLoader, Shards, write_shards
from lathe.data.splits import Split

EVERYTHING = Augment(crop=2, crop_fill="reflect", flip="alternating", cutout=3, mixup=0.4, cutmix=1.0)
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


def split(path: Path, max_open: int = 16) -> Split:
    return Shards("", str(path), max_open=max_open).load().train


def loader(path: Path, window: int = 3, **settings: Any) -> ShardLoader:
    train = split(path)
    normalizer = Normalizer((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 3)
    defaults = {
        "num_classes": 5,
        "normalizer": normalizer,
        "augment": EVERYTHING,
        "device": torch.device("cpu"),
        "train": True,
    }
    return ShardLoader(train, train.images.sizes, window, **(defaults | {"batch_size": 12} | settings))  # type: ignore[attr-defined]
