"""The usual way to read data: one sample at a time with a torch DataLoader. The baseline of suite=loaders."""

import io
from collections.abc import Sequence
from pathlib import Path
from random import random as uniform  # the cheapest source of single numbers
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

Images = np.ndarray[Any, np.dtype[Any]]
PADDING = 4  # pixels on each side, before the crop
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Usual(Dataset[tuple[Tensor, int]]):
    """Images with the usual transforms: pad, crop, flip, to a tensor, normalise."""

    def __init__(self, labels: Sequence[int]) -> None:
        self.labels = labels
        self.mean, self.std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, sample: int) -> Image.Image:
        """Return an image as PIL has it."""
        raise NotImplementedError

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        image = self.open(sample)
        width, height = image.size
        left, top = (int(torch.randint(0, 2 * PADDING + 1, ())) for _ in range(2))
        image = ImageOps.expand(image, PADDING).crop((left, top, left + width, top + height))
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else image
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return tensor.sub_(self.mean).div_(self.std), self.labels[sample]


class InMemory(Usual):
    """uint8 images [n, channels, height, width]."""

    def __init__(self, images: Images, labels: Images) -> None:
        super().__init__(labels.tolist())
        self.images = images.transpose(0, 2, 3, 1).copy()

    def open(self, sample: int) -> Image.Image:
        return Image.fromarray(self.images[sample])


class Files(Usual):
    """Class folders, scaled and cropped to `size` pixels."""

    def __init__(self, folder: Path, size: int) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        pairs = [(file, label) for label, path in enumerate(classes) for file in sorted(path.iterdir())]
        super().__init__([label for _, label in pairs])
        self.files, self.size = [file for file, _ in pairs], size

    def open(self, sample: int) -> Image.Image:
        with Image.open(self.files[sample]) as file:
            return ImageOps.fit(file.convert("RGB"), (self.size, self.size), Image.Resampling.BILINEAR)


class Tuned(Dataset[tuple[Images, int]]):
    """The same as InMemory, optimised: PIL images made once, a crop that pads, and normalisation in place."""

    def __init__(self, images: Images, labels: Images) -> None:
        self.images = [Image.fromarray(image) for image in images.transpose(0, 2, 3, 1).copy()]
        self.labels = labels.tolist()
        self.scale = (1 / (255 * np.array(STD))).astype(np.float32)[:, None, None]
        self.shift = (-np.array(MEAN) / np.array(STD)).astype(np.float32)[:, None, None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, sample: int) -> tuple[Images, int]:
        image = self.images[sample]
        left, top = (int(uniform() * (2 * PADDING + 1)) - PADDING for _ in range(2))  # noqa: S311 (no secret)
        image = image.crop((left, top, left + image.width, top + image.height))
        if uniform() < 0.5:  # noqa: S311
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        array = np.asarray(image).transpose(2, 0, 1).astype(np.float32, order="C")
        array *= self.scale
        array += self.shift
        return array, self.labels[sample]


def stack(samples: list[tuple[Images, int]]) -> tuple[Tensor, Tensor]:
    """Stack samples into a contiguous batch with one copy."""
    arrays, labels = zip(*samples, strict=True)
    batch = np.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
    return torch.from_numpy(np.stack(arrays, out=batch)), torch.tensor(labels)


def write_files(folder: Path, classes: Sequence[str], count: int) -> None:
    """Write `count` JPEG files of 160 to 320 pixels a side, as smooth as photographs."""
    rng = np.random.default_rng(0)
    for number in range(count):
        home = folder / classes[number % len(classes)]
        home.mkdir(parents=True, exist_ok=True)
        width, height = (int(side) for side in rng.integers(160, 321, 2))
        coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(home / f"{number:05}.jpg", quality=90)


class Table(Dataset[Any]):
    """Float images of 3 x 32 x 32 in memory with classes: the cheapest sample, which shows a loader's overhead most."""

    def __init__(self, n: int) -> None:
        self.images, self.targets = torch.rand(n, 3, 32, 32), [i % 10 for i in range(n)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row], self.targets[row]


class Drawing(Table):
    """The same with noise, which must be seeded by sample."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row] + 0.1 * torch.randn(3, 32, 32), self.targets[row]


class Encoded(Table):
    """PNG files in memory, as most data sets are files."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.files = []
        for image in (255 * self.images).byte().permute(0, 2, 3, 1).numpy():
            file = io.BytesIO()
            Image.fromarray(image).save(file, "png")
            self.files.append(file.getvalue())

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        pixels = np.asarray(Image.open(io.BytesIO(self.files[row])))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255, self.targets[row]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a memory-mapped file of tokens: `length` tokens, and the same shifted by one as targets."""

    def __init__(self, file: Path, length: int) -> None:
        self.ids, self.length = np.load(file, mmap_mode="r"), length

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, window: int) -> tuple[Tensor, Tensor]:
        start = window * self.length
        ids = torch.from_numpy(self.ids[start : start + self.length + 1].astype(np.int64))
        return ids[:-1], ids[1:]
