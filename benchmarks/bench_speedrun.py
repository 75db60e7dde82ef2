"""Seconds to a test accuracy on Fashion-MNIST: `experiment=fashion_speedrun` compared with the usual training.

    python benchmarks/bench_speedrun.py --seeds 1 2 3 4 5 6 7 8 9 10 --folder <the four IDX files>

The usual side is written out here as most projects have it: a torch DataLoader over PIL images, one at a time; a net of
the same layers and widths with torch's initial weights, batch norm with a learned scale and a learned first layer; SGD
with Nesterov's momentum, a one-cycle schedule, label smoothing, weight decay; a hand-written loop. Both sides train on
the same images, and predict by the mean of an image and its mirror image; neither chooses an epoch.

Sides take turns, seed by seed. Each training has a fresh process without cached images or compiled code. Seconds count
from before the first image is read to the end of training; those of the experiment include its configuration,
compiling, and its one validation. CPU seconds are those of the process and its children, for shared machines.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np
import torch
from bench_fashion import accuracy
from common import cpu_seconds, parser
from PIL import Image
from scipy import stats
from suites.dataloader_baseline import stack
from suites.results import Results, Threshold
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lathe
import lathe.training.train  # imports heavy packages before the clock starts, for both sides
from lathe.config.resolve import resolve
from lathe.runs.build import make_data

TARGET = 0.94
BAR = 8.0  # the usual side's median seconds over the experiment's
ENOUGH, CHANCE = 10, 0.01  # trainings of each side; p value of the mean, if the true one was the target
BATCH, RATE, CROP, EPOCHS = 256, 0.2, 1, 12  # of the usual side
OWN = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


class Drawn(Dataset[tuple[Any, int]]):
    """Grey images uint8 [n, 1, height, width] as PIL images; samples are float32 [1, height, width].

    Each is cropped at random after padding with CROP black pixels, flipped with probability 0.5, and normalised.
    """

    def __init__(self, images: Any, labels: Any, mean: float, std: float) -> None:
        self.images, self.labels = [Image.fromarray(image) for image in images[:, 0]], labels.tolist()
        self.scale, self.shift = np.float32(1 / (255 * std)), np.float32(mean / std)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, sample: int) -> tuple[Any, int]:
        image, (top, left, flip) = self.images[sample], torch.rand(3).tolist()
        top, left = (int(u * (2 * CROP + 1)) - CROP for u in (top, left))
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip < 0.5 else image
        image = image.crop((left, top, left + image.width, top + image.height))
        return (np.asarray(image, dtype=np.float32) * self.scale - self.shift)[None], self.labels[sample]


class Layer(nn.Sequential):
    """A convolution, max pooling by `pool`, norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, pool: int = 1, kernel: int = 3) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2 if kernel == 3 else 0, bias=False)
        pooling = [nn.MaxPool2d(pool)] if pool > 1 else []
        super().__init__(convolution, *pooling, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Usual(nn.Sequential):
    """The layers of lathe.nets.Airbench for one channel, with the usual structure and initialisation."""

    def __init__(self, width: int, growth: int, num_classes: int) -> None:
        wide = growth * width
        layers = [Layer(1, 8, kernel=2)]
        for inputs, outputs in ((8, width), (width, wide), (wide, wide)):
            layers += [Layer(inputs, outputs, pool=2), Layer(outputs, outputs)]
        super().__init__(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(wide, num_classes))


def overrides_of(seed: int, args: argparse.Namespace, folder: str) -> list[str]:
    """Return the experiment's overrides, with all output in `folder`."""
    overrides = ["experiment=fashion_speedrun", f"seed={seed}", "test=false", "trainer.enable_progress_bar=false"]
    overrides += ["trainer.enable_model_summary=false", f"paths.log_dir={folder}/logs", f"paths.data_dir={folder}/data"]
    overrides += [] if args.folder is None else [f"data.source.folder={args.folder}"]
    return overrides + ([] if args.epochs is None else [f"trainer.max_epochs={args.epochs}"])


def by_lathe(seed: int, args: argparse.Namespace, folder: str) -> tuple[nn.Module, Any]:
    """Return the experiment's net and data module."""
    run = lathe.train(overrides_of(seed, args, folder))
    return run.net, run.datamodule


def by_hand(seed: int, args: argparse.Namespace, folder: str) -> tuple[nn.Module, Any]:
    """Return the usual net after training, and the data module that tests it."""
    cfg = resolve(lathe.compose(overrides_of(seed, args, folder)))
    datamodule = make_data(cfg)
    datamodule.prepare_data()
    images, labels = datamodule.open()["train"].read()
    samples = Drawn(images, labels, cfg["data"]["mean"][0], cfg["data"]["std"][0])
    options: dict[str, Any] = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    batches = DataLoader(samples, BATCH, shuffle=True, drop_last=True, collate_fn=stack, **options)
    torch.manual_seed(seed)
    net = Usual(cfg["model"]["net"]["width"], cfg["model"]["net"]["growth"], cfg["data"]["num_classes"])
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    epochs = EPOCHS if args.epochs is None else args.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=epochs * len(batches), pct_start=0.2, cycle_momentum=False
    )
    for _ in range(epochs):
        for x, y in batches:
            logits = net(x.to(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits, y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return Mirrored(net), datamodule


class Mirrored(nn.Module):
    """The mean of a net's outputs for images and their mirror images."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        mean_of_both: Tensor = (self.net(x) + self.net(x.flip(-1))) / 2
        return mean_of_both


SIDES: dict[str, Callable[[int, argparse.Namespace, str], tuple[nn.Module, Any]]] = {
    "lathe": by_lathe,
    "usual": by_hand,
}


def trained(side: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Train a side in this process; return `accuracy`, `seconds` and `cpu_s`."""
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="speedrun_") as folder:
        cpu, began = cpu_seconds(*OWN), time.perf_counter()
        net, datamodule = SIDES[side](seed, args, folder)
        seconds, spent = time.perf_counter() - began, cpu_seconds(*OWN) - cpu
        datamodule.setup("test")
        return {"accuracy": accuracy(net, datamodule.test_dataloader()), "seconds": seconds, "cpu_s": spent}


def summary(results: Results) -> list[str]:
    """Return a line for each side, and the verdicts."""
    lines, late = [], []
    for side in results:
        scores, wall, cpu = (results.spread(side, key) for key in ("accuracy", "seconds", "cpu_s"))
        assert scores is not None
        values, n = scores.values, len(scores.values)
        p = float(stats.ttest_1samp(values, TARGET, alternative="greater").pvalue) if n > 1 else math.nan
        late += [side] if mean(values) < TARGET else []
        shown = "shown" if n >= ENOUGH and mean(values) > TARGET and p < CHANCE else f"not shown (n = {n} of {ENOUGH})"
        lines.append(
            f"{side}: mean test accuracy {mean(values):.4f} ({scores.low:.4f} to {scores.high:.4f}), n = {n}; above "
            f"{TARGET}: p = {p:.3g}, {shown}; seconds {wall:.2f}; CPU seconds {cpu:.2f}"
        )
    if len(results) == len(SIDES):
        bars = [
            Threshold(f"{key}, usual over lathe,", results.ratio("usual", "lathe", key), at_least=BAR)
            for key in ("seconds", "cpu_s")
        ]
        lines += [f"{bar.full}: {bar.measured:.2f}, {bar.verdict}" for bar in bars]
        lines += [f"Not to the same accuracy: the mean of {side} is below {TARGET}." for side in late]
    return lines


def main() -> None:
    """Print the figures of each training and of the sides."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--seeds", type=int, nargs="+", default=list(range(1, 11)), help="a training of each side each"
    )
    arguments.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="what is trained")
    arguments.add_argument("--folder", help="with the four IDX files; by default each training downloads them")
    arguments.add_argument("--threads", type=int, default=0, help="of torch; 0 is torch's own choice")
    arguments.add_argument("--epochs", type=int, help="of both sides, for a short try; each has its own by default")
    arguments.add_argument("--workers", type=int, default=2, help="reading processes of the usual side; 0: none")
    arguments.add_argument("--one", nargs=2, metavar=("SIDE", "SEED"), help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.one:
        print("\n" + json.dumps(trained(args.one[0], int(args.one[1]), args)))
        return
    results = Results({side: [] for side in args.sides})
    for seed in args.seeds:
        for side in args.sides:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", side, str(seed)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 (this file)
            results[side].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"seed {seed}, {side}: {results[side][-1]}", flush=True)
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
