"""Seconds of an epoch with `data.num_workers=auto`, compared with no worker and with one per core.

    python benchmarks/bench_workers.py --rounds 5

Each side is `python train.py data=dataset` with a small net, and they take turns. Samples are cheap or expensive to
read: drawings are tensors in memory; photos are JPEG files of 320 x 240 that PIL decodes and scales to 32 x 32. The
seconds are the run's own, the median of all epochs but the first. The bar: auto takes at most 1.1 of the seconds of the
faster of the other two.
"""

import io
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import describe_machine, divide, parser, run
from PIL import Image
from suites.results import Spread
from torch import Tensor
from torch.utils.data import Dataset

WORDS = (
    *("data=dataset", "data.num_classes=4", "data.channels=3", "data.image_size=32", "model=mlp", "test=false"),
    *("data.batch_size=64", "trainer.accelerator=cpu", "trainer.max_epochs=4", "trainer.check_val_every_n_epoch=4"),
)
SAMPLES = {"Photos": 3000, "Drawings": 40_000}


class Drawings(Dataset[tuple[Tensor, int]]):
    """Samples in memory."""

    def __init__(self, n: int) -> None:
        self.targets = [row % 4 for row in range(n)]
        self.images = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row % 16], self.targets[row]


class Photos(Drawings):
    """Files that are decoded and scaled for each sample."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 32, 3), dtype=np.uint8)
        self.files = []
        for image in pixels:
            file = io.BytesIO()
            Image.fromarray(image).resize((320, 240)).save(file, "jpeg")
            self.files.append(file.getvalue())

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        with Image.open(io.BytesIO(self.files[row % 16])) as photo:
            pixels = np.asarray(photo.convert("RGB").resize((32, 32)))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255, self.targets[row]


def train(kind: str, workers: str) -> tuple[float, str]:
    """Return the seconds of an epoch, and the number of workers chosen by auto."""
    with tempfile.TemporaryDirectory() as folder:
        data = f"data.train={{_target_: bench_workers.{kind}, n: {SAMPLES[kind]}}}"
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        done = run("train.py", *WORDS, data, f"data.num_workers={workers}", cwd=folder, PYTHONPATH=path)
        (result,) = Path(folder).glob("logs/train/*/result.json")
        chosen = re.search(r"num_workers=auto took (\d+)", done.stdout)
        return json.loads(result.read_text())["epoch_s"], chosen[1] if chosen else ""


def main() -> None:
    rounds, cores = parser(__doc__, rounds=5).parse_args().rounds, str(os.cpu_count())
    print(f"{describe_machine('torch', 'lightning')}; n = {rounds}")
    for kind in SAMPLES:
        found: dict[str, list[float]] = {"0": [], cores: [], "auto": []}
        chosen = set()
        for _ in range(rounds):
            for workers, seconds in found.items():
                epoch, number = train(kind, workers)
                seconds.append(epoch)
                chosen |= {number} if number else set()
        for workers, seconds in found.items():
            print(f"{kind}, {workers}: {Spread(seconds)} s")
        ratio = divide(found["auto"], [min(pair) for pair in zip(found["0"], found[cores], strict=True)])
        print(f"{kind}, auto (chose {', '.join(sorted(chosen)) or 'none'}) over the faster: {ratio:.2f}, bar 1.1")


if __name__ == "__main__":
    main()
