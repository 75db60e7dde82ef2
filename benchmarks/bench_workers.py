"""What `data.num_workers=auto` gives: an epoch's seconds with none, with as many as there are cores, and with what auto
takes, for samples that cost little to read and for samples that cost much.

    python benchmarks/bench_workers.py --rounds 5

Each side is `python train.py data=dataset` with a small net, and they take turns. Photos are JPEG files of 320 x 240
that PIL decodes and scales to 32 x 32; drawings are tensors that are there. An epoch is told by the run itself, the
median of all but the first. The bar: auto takes at most 1.1 x the seconds of the faster of the two.
"""

import argparse
import io
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

ROOT = Path(__file__).resolve().parent.parent
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


def epoch(kind: str, workers: str) -> tuple[float, str]:
    """Return the seconds of an epoch, and the number of workers chosen by auto."""
    with tempfile.TemporaryDirectory() as folder:
        train = f"data.train={{_target_: bench_workers.{kind}, n: {SAMPLES[kind]}}}"
        line = [sys.executable, str(ROOT / "train.py"), *WORDS, train, f"data.num_workers={workers}"]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(line, cwd=folder, check=True, capture_output=True, text=True, env=environment)  # noqa: S603
        (result,) = Path(folder).glob("logs/train/*/result.json")
        taken = re.search(r"num_workers=auto took (\d+)", done.stdout)
        return json.loads(result.read_text())["epoch_s"], taken[1] if taken else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side (default 5)")
    rounds = parser.parse_args().rounds
    cores = str(os.cpu_count())
    versions = {package: metadata.version(package) for package in ("torch", "lightning")}
    print(f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, {versions}, n={rounds}")
    for kind in SAMPLES:
        found: dict[str, list[float]] = {"0": [], cores: [], "auto": []}
        taken = set()
        for _ in range(rounds):
            for workers, seconds in found.items():
                one, took = epoch(kind, workers)
                seconds.append(one)
                taken |= {took} if took else set()
        ratios = [auto / min(one, more) for one, more, auto in zip(*found.values(), strict=True)]
        for workers, seconds in found.items():
            print(f"{kind}, {workers}: {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
        low, high = min(ratios), max(ratios)
        print(f"{kind}, auto (took {', '.join(sorted(taken)) or 'none unasked'}) over the faster: ", end="")
        print(f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}; bar 1.1)")


if __name__ == "__main__":
    main()
