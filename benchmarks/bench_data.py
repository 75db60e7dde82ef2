"""Images/s of the resident loader over per-sample PIL pipelines; one thread, 32 x 32 colour images, crop 4 and flip.

    python benchmarks/bench_data.py [--rounds 15] [--json figures.json]

Two baselines, each behind a DataLoader with the best of 0, 1 and 2 workers, all yielding contiguous normalised float32:

- "PIL": the recipe that image transforms are written down as: expand, crop, flip, to tensor, normalise, default
  collate.
- "PIL tuned": the same work as fast as we could write it per sample: PIL images made once, one crop that reaches over
  the border, an array laid out and normalised in place, one stacking step. It has a uint8 form too.

All sides take turns within one process, so that a busy moment of the machine meets them alike; figures are medians over
rounds, and workers are running before the first.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from random import random as uniform  # the cheapest source of single numbers
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lathe.data.augment import Augment
from lathe.data.loader import ResidentLoader
from lathe.data.normalize import Normalizer

Images = np.ndarray[Any, np.dtype[Any]]
SIDE, PADDING = 32, 4
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
WARM = 8  # batches before each measurement
# images/s of each form over a baseline
BARS = {"resident uint8": 40.0, "resident float32": 15.0}
BASELINES = {"PIL": "PIL,", "PIL tuned": "PIL tuned,", "PIL tuned uint8": "PIL tuned uint8,"}


class PilRecipe(Dataset[tuple[Tensor, int]]):
    """The usual chain of transforms on one image."""

    def __init__(self, images: Images, labels: Images) -> None:
        self.images, self.labels = images.transpose(0, 2, 3, 1).copy(), labels
        self.mean, self.std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        image = ImageOps.expand(Image.fromarray(self.images[sample]), PADDING)
        left, top = (int(torch.randint(0, 2 * PADDING + 1, ())) for _ in range(2))
        image = image.crop((left, top, left + SIDE, top + SIDE))
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return tensor.sub_(self.mean).div_(self.std), int(self.labels[sample])


class PilTuned(Dataset[tuple[Images, int]]):
    """The same with nothing to spare; float32 and normalised, or uint8."""

    def __init__(self, images: Images, labels: Images, normalise: bool) -> None:
        self.images = [Image.fromarray(image) for image in images.transpose(0, 2, 3, 1).copy()]
        self.labels = labels.tolist()
        self.normalise = normalise
        self.scale = (1 / (255 * np.array(STD))).astype(np.float32)[:, None, None]
        self.shift = (-np.array(MEAN) / np.array(STD)).astype(np.float32)[:, None, None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, sample: int) -> tuple[Images, int]:
        left, top = (int(uniform() * (2 * PADDING + 1)) - PADDING for _ in range(2))  # noqa: S311 (no secret)
        image = self.images[sample].crop((left, top, left + SIDE, top + SIDE))
        if uniform() < 0.5:  # noqa: S311
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        array = np.asarray(image).transpose(2, 0, 1)
        if self.normalise:
            array = array.astype(np.float32, order="C")
            array *= self.scale
            array += self.shift
        return array, self.labels[sample]


def stack(samples: list[tuple[Images, int]]) -> tuple[Tensor, Tensor]:
    """A contiguous batch in one copy."""
    arrays, labels = zip(*samples, strict=True)
    batch = np.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
    return torch.from_numpy(np.stack(arrays, out=batch)), torch.tensor(labels)


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def rate(batches: Iterator[tuple[Tensor, Tensor]], count: int, batch_size: int) -> float:
    """Images/s over `count` batches, after some that warm the caches and use up what workers read ahead meanwhile."""
    for _ in range(WARM):
        next(batches)
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count * batch_size / (time.perf_counter() - start)


def sides(n: int, batch_size: int) -> dict[str, tuple[Iterator[Any], int]]:
    """Each side's batches, and the batches it is timed over in a round."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, 3, SIDE, SIDE), dtype=np.uint8)
    labels = rng.integers(0, 10, n)
    augment = Augment(crop=PADDING, flip="random")

    def resident(normalize: str | None) -> ResidentLoader:
        return ResidentLoader(
            torch.from_numpy(images),
            torch.from_numpy(labels),
            normalize="folded" if normalize == "folded" else "batch",
            normalizer=None if normalize is None else Normalizer(MEAN, STD, 3),
            num_classes=10,
            augment=augment,
            device=torch.device("cpu"),
            batch_size=batch_size,
            train=True,
        )

    def behind_workers(data: Dataset[Any], collate: Callable[..., Any] | None, workers: int) -> DataLoader[Any]:
        keep = workers > 0
        return DataLoader(
            data,
            batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=keep,
            collate_fn=collate,
        )

    epoch = n // batch_size
    found: dict[str, tuple[Iterator[Any], int]] = {
        # whole epochs, so that what is prepared once for each is counted
        "resident uint8": (endless(resident(None)), 2 * epoch),
        "resident float32": (endless(resident("batch")), epoch),
        "resident float32 folded": (endless(resident("folded")), epoch),
    }
    baselines: list[tuple[str, Dataset[Any], Callable[..., Any] | None]] = [
        (BASELINES["PIL"], PilRecipe(images, labels), None),
        (BASELINES["PIL tuned"], PilTuned(images, labels, normalise=True), stack),
        (BASELINES["PIL tuned uint8"], PilTuned(images, labels, normalise=False), stack),
    ]
    for name, data, collate in baselines:
        for workers in (0, 1, 2):
            found[f"{name} {workers} workers"] = (
                endless(behind_workers(data, collate, workers)),
                max(1, 8192 // batch_size),
            )
    return found


def main() -> None:
    """Prints all figures, and each bar against both baselines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each side, taken in turns")
    parser.add_argument("--images", type=int, default=45000, help="in the data set")
    parser.add_argument("--batch-size", type=int, default=512, help="images in a batch")
    parser.add_argument("--json", metavar="FILE", help="also write all figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)

    running = sides(args.images, args.batch_size)
    for batches, count in running.values():
        rate(batches, count, args.batch_size)  # warm-up: starts workers, draws the first epoch's tables
    rates: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(args.rounds):
        for name, (batches, count) in running.items():
            rates[name].append(rate(batches, count, args.batch_size))

    median = {name: statistics.median(values) for name, values in rates.items()}
    best = {
        name: max(value for side, value in median.items() if side.startswith(start))
        for name, start in BASELINES.items()
    }
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, pillow "
        f"{PIL.__version__}"
    )
    print(
        f"{processor()}, {os.cpu_count()} cores; batch {args.batch_size}, {args.images} images, n = {args.rounds} "
        "rounds\n"
    )
    print(f"{'':28}{'images/s':>12}{'lowest':>12}{'highest':>12}" + "".join(f"{'x ' + name:>18}" for name in BASELINES))
    for side, values in rates.items():
        ratios = "".join(f"{median[side] / best[name]:18.1f}" for name in BASELINES)
        print(f"{side:28}{median[side]:12,.0f}{min(values):12,.0f}{max(values):12,.0f}{ratios}")
    print()
    for side, bar in BARS.items():
        for name in ("PIL", "PIL tuned"):
            ratio = median[side] / best[name]
            print(f"{side}: {ratio:.1f} x {name} (bar {bar:.0f} x): {'reached' if ratio >= bar else 'missed'}")
    if args.json:
        about = {"arguments": vars(args), "processor": processor(), "cores": os.cpu_count(), "torch": torch.__version__}
        with open(args.json, "w") as file:
            json.dump(
                about | {"numpy": np.__version__, "pillow": PIL.__version__, "images_per_s": rates}, file, indent=1
            )


def processor() -> str:
    """The CPU's name."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
