"""Samples/s of data=dataset over a plain DataLoader with the same workers, for datasets that draw and that don't.

    python benchmarks/bench_dataset.py [--rounds 15] [--workers 2] [--json figures.json]

Datasets: "table" has float32 images of 3 x 32 x 32 in memory and a class number, the cheapest sample that there is, so
that what a loader adds shows most; "drawing" adds noise to each, which has to be seeded by sample; "encoded" decodes
each from a PNG. Both sides shuffle, stack and drop the last batch, one thread, and take turns within one process;
figures are medians over rounds.
"""

import argparse
import io
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lathe.data import DatasetDataModule

BAR = 1.0  # samples/s over the plain DataLoader's


class Table(Dataset[Any]):
    """Images in memory."""

    def __init__(self, n: int) -> None:
        self.images, self.targets = torch.rand(n, 3, 32, 32), [i % 10 for i in range(n)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row], self.targets[row]


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


class Drawing(Table):
    """The same with noise."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row] + 0.1 * torch.randn(3, 32, 32), self.targets[row]


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def rate(batches: Iterator[Any], count: int, size: int) -> float:
    """Samples/s over `count` batches, after some that were read ahead."""
    for _ in range(8):
        next(batches)
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count * size / (time.perf_counter() - start)


def main() -> None:
    """Prints both sides of each dataset, and the ratio against the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each side, taken in turns")
    parser.add_argument("--samples", type=int, default=20000, help="of each dataset")
    parser.add_argument("--batch-size", type=int, default=128, help="samples in a batch")
    parser.add_argument("--workers", type=int, default=0, help="reading processes of either side")
    parser.add_argument("--json", metavar="FILE", help="also write all figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size, keep = args.batch_size, args.workers > 0
    figures: dict[str, list[float]] = {}
    for name, dataset in (
        ("table", Table(args.samples)),
        ("drawing", Drawing(args.samples)),
        ("encoded", Encoded(args.samples)),
    ):
        data = DatasetDataModule(
            dataset, batch_size=size, num_classes=10, num_workers=args.workers, persistent_workers=keep
        )
        data.setup()
        plain: DataLoader[Any] = DataLoader(
            dataset, size, shuffle=True, drop_last=True, num_workers=args.workers, persistent_workers=keep
        )
        sides = {"data=dataset": endless(data.train_dataloader()), "DataLoader": endless(plain)}
        count = max(1, args.samples // size // 4)
        for _ in range(args.rounds):
            for side, batches in sides.items():
                figures.setdefault(f"{name}, {side}", []).append(rate(batches, count, size))
        median = {side: statistics.median(figures[f"{name}, {side}"]) for side in sides}
        ratio = median["data=dataset"] / median["DataLoader"]
        print(
            f"{name}, {args.workers} workers: {median['data=dataset']:,.0f} over {median['DataLoader']:,.0f} samples/s"
            f", {ratio:.2f} x (bar {BAR:.2f} x): {'reached' if ratio >= BAR else 'missed'}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "torch": torch.__version__, "samples_per_s": figures}, file, indent=1)


if __name__ == "__main__":
    main()
