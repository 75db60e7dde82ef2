"""Images/s of data=image_folder over a hand-written folder of classes with PIL transforms behind a DataLoader.

    python benchmarks/bench_image_folder.py [--rounds 9] [--workers 2] [--json figures.json]

Both sides read the same JPEG files of 160 to 320 pixels a side, bring their middle to --size, crop from 4 pixels of
padding, flip, and give normalised float32 batches in a new order for each epoch, one thread in the training process.
The first epoch of each is not counted: data=image_folder decodes before it, and the files are in the system's cache
after it. Epochs take turns; a ratio is taken within a round, figures are medians over rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lathe.data import Augment, ImageDataModule, ImageFolder

BAR = 10.0  # images/s over the DataLoader's
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CLASSES = ("ant", "bee", "cow", "dog")


class Folder(Dataset[Any]):
    """Class folders as they are read by hand: open, resize, crop, flip, to a tensor, normalise."""

    def __init__(self, root: Path, size: int) -> None:
        self.files = [(path, label) for label, name in enumerate(CLASSES) for path in sorted((root / name).iterdir())]
        self.size = size
        self.mean, self.std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        path, label = self.files[row]
        with Image.open(path) as file:
            image = ImageOps.fit(file.convert("RGB"), (self.size, self.size), Image.Resampling.BILINEAR)
        left, top = (int(torch.randint(0, 9, ())) for _ in range(2))
        image = ImageOps.expand(image, 4).crop((left, top, left + self.size, top + self.size))
        if torch.rand(()) < 0.5:
            image = ImageOps.mirror(image)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)
        return (pixels - self.mean) / self.std, label


def write(root: Path, count: int) -> None:
    """`count` JPEG files with the smoothness of photographs."""
    rng = np.random.default_rng(0)
    for number in range(count):
        folder = root / CLASSES[number % len(CLASSES)]
        folder.mkdir(parents=True, exist_ok=True)
        width, height = (int(side) for side in rng.integers(160, 321, 2))
        coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number:05}.jpg", quality=90)


def epoch(loader: Any) -> float:
    """Images/s of one pass."""
    start, images = time.perf_counter(), 0
    for pixels, _ in loader:
        assert pixels.dtype == torch.float32
        images += len(pixels)
    return images / (time.perf_counter() - start)


def main() -> None:
    """Prints both sides and the ratio against the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="epochs of each side that are counted")
    parser.add_argument("--images", type=int, default=2000, help="files in the folder")
    parser.add_argument("--size", type=int, default=64, help="side in pixels of what a net sees")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a batch")
    parser.add_argument("--workers", type=int, default=2, help="reading processes of the DataLoader")
    parser.add_argument("--json", metavar="FILE", help="also write all figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        root = Path(home) / "photos"
        write(root, args.images)
        data = ImageDataModule(
            ImageFolder(str(root), home, image_size=args.size, val_share=0.01, test_share=0.01),
            num_classes=len(CLASSES),
            channels=3,
            image_size=args.size,
            mean=MEAN,
            std=STD,
            batch_size=args.batch_size,
            augment=Augment(crop=4, flip="random"),
        )
        start = time.perf_counter()
        data.prepare_data()
        print(f"read once in {time.perf_counter() - start:.1f} s")
        data.setup()
        plain: DataLoader[Any] = DataLoader(
            Folder(root, args.size),
            args.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=args.workers,
            persistent_workers=args.workers > 0,
        )
        sides: dict[str, Any] = {"image_folder": data.train_dataloader(), "DataLoader": plain}
        figures: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(args.rounds + 1):
            for side, loader in sides.items():
                rate = epoch(loader)
                figures[side] += [rate] if number else []
    ratios = [one / other for one, other in zip(*figures.values(), strict=True)]
    for side, rates in figures.items():
        print(f"{side}: {statistics.median(rates):,.0f} images/s ({min(rates):,.0f} to {max(rates):,.0f})")
    ratio = statistics.median(ratios)
    print(
        f"{ratio:.1f} x ({min(ratios):.1f} to {max(ratios):.1f}, n = {len(ratios)}; bar {BAR:.0f} x): "
        f"{'reached' if ratio >= BAR else 'missed'}"
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "torch": torch.__version__, "images_per_s": figures}, file, indent=1)


if __name__ == "__main__":
    main()
