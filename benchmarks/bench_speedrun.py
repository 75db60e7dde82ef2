"""Seconds to a test accuracy on Fashion-MNIST: `experiment=fashion_speedrun` compared with the usual training.

    python benchmarks/bench_speedrun.py --seeds 1 2 3 4 5 6 7 8 9 10 --folder <the four IDX files>

The usual side is written out here as most projects have it: a torch DataLoader over PIL images, one at a time; a net of
the same layers and widths with torch's initial weights, batch norm with a learned scale and a learned first layer; SGD
with Nesterov's momentum, a one-cycle schedule, label smoothing, weight decay; a hand-written loop. Its batch size,
learning rate, epochs and workers are options. Both sides train on the same images, and predict by the mean of an image
and its mirror image; neither chooses an epoch.

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
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import numpy as np
import torch
from bench_fashion import accuracy
from common import cpu_seconds, parser, verdict
from PIL import Image
from scipy import stats
from suites.dataloader_baseline import stack
from suites.results import Spread
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lathe
import lathe.training.train  # imports heavy packages before the clock starts, for both sides
from lathe.config.resolve import resolve
from lathe.runs.build import make_data

TARGET = 0.94
BAR = 8.0  # the usual side's median seconds over the experiment's
ENOUGH = 10  # trainings of each side
CHANCE = 0.01  # p value of the mean, if the true one was the target
OWN = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


class Drawn(Dataset[tuple[Any, int]]):
    """Grey images uint8 [n, 1, height, width] as PIL images; samples are float32 [1, height, width].

    Each is cropped at random after padding with `crop` black pixels, flipped with probability 0.5, and normalised.
    """

    def __init__(self, images: Any, labels: Any, crop: int, mean: float, std: float) -> None:
        self.images, self.labels = [Image.fromarray(image) for image in images[:, 0]], labels.tolist()
        self.crop, self.scale, self.shift = crop, np.float32(1 / (255 * std)), np.float32(mean / std)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, sample: int) -> tuple[Any, int]:
        image, (top, left, flip) = self.images[sample], torch.rand(3).tolist()
        top, left = (int(u * (2 * self.crop + 1)) - self.crop for u in (top, left))
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


def words(seed: int, args: argparse.Namespace, folder: str) -> list[str]:
    """Return the experiment's overrides, with all output in `folder`."""
    found = ["experiment=fashion_speedrun", f"seed={seed}", "test=false", "trainer.enable_progress_bar=false"]
    found += ["trainer.enable_model_summary=false", f"paths.log_dir={folder}/logs", f"paths.data_dir={folder}/data"]
    found += [] if args.folder is None else [f"data.source.folder={args.folder}"]
    found += [] if args.epochs is None else [f"trainer.max_epochs={args.epochs}"]
    return [*found, *args.override]


def by_lathe(seed: int, args: argparse.Namespace, folder: str) -> tuple[nn.Module, Any]:
    """Return the experiment's net and data module."""
    run = lathe.train(words(seed, args, folder))
    return run.net, run.datamodule


def by_hand(seed: int, args: argparse.Namespace, folder: str) -> tuple[nn.Module, Any]:
    """Return the usual net after training, and the data module that tests it."""
    cfg = resolve(lathe.compose(words(seed, args, folder)))
    datamodule = make_data(cfg)
    datamodule.prepare_data()
    images, labels = datamodule.open()["train"].read()
    samples = Drawn(images, labels, args.crop, cfg["data"]["mean"][0], cfg["data"]["std"][0])
    options: dict[str, Any] = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    batches = DataLoader(samples, args.batch_size, shuffle=True, drop_last=True, collate_fn=stack, **options)
    torch.manual_seed(seed)
    net = Usual(cfg["model"]["net"]["width"], cfg["model"]["net"]["growth"], cfg["data"]["num_classes"])
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    epochs = args.usual_epochs if args.epochs is None else args.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=epochs * len(batches), pct_start=0.2, cycle_momentum=False
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
    """Train a side in this process; return `accuracy`, `seconds`, `compile_s` (included in them) and `cpu_s`."""
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="speedrun_") as folder:
        cpu, began = cpu_seconds(*OWN), time.perf_counter()
        net, datamodule = SIDES[side](seed, args, folder)
        seconds, spent = time.perf_counter() - began, cpu_seconds(*OWN) - cpu
        compiling = float(torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))
        datamodule.setup("test")
        score = accuracy(net, datamodule.test_dataloader())
    return {"accuracy": score, "seconds": seconds, "compile_s": compiling, "cpu_s": spent}


def summary(results: dict[str, list[dict[str, float]]], target: float) -> list[str]:
    """Return a line for each side, and the verdicts."""
    lines, reached = [], {}
    for side, trainings in results.items():
        scores = [one["accuracy"] for one in trainings]
        test = stats.ttest_1samp(scores, target, alternative="greater") if len(set(scores)) > 1 else None
        p, n = math.nan if test is None else float(test.pvalue), len(scores)
        reached[side] = mean(scores) >= target
        wall, cpu, compiling = (Spread([one[key] for one in trainings]) for key in ("seconds", "cpu_s", "compile_s"))
        lines.append(
            f"{side}: mean test accuracy {mean(scores):.4f} ({min(scores):.4f} to {max(scores):.4f}), n = {n}, "
            f"above {target}: p = {p:.3g}; seconds {wall:.2f}, of which compiling {compiling:.2f}; CPU seconds "
            f"{cpu:.2f}"
        )
        shown = n >= ENOUGH and mean(scores) > target and p < CHANCE
        few = f"n = {n} of at least {ENOUGH}, " if n < ENOUGH else ""
        lines.append(f"{side}: {target} with p < {CHANCE}: {'shown' if shown else f'not shown ({few}p = {p:.3g})'}")
    if len(results) == len(SIDES):
        for key, name in (("seconds", "seconds"), ("cpu_s", "CPU seconds")):
            medians = {side: Spread([one[key] for one in found]).median for side, found in results.items()}
            ratio = medians["usual"] / medians["lathe"]
            judged = verdict(ratio >= BAR)
            if not all(reached.values()):
                late = " and ".join(side for side, done in reached.items() if not done)
                judged = f"not to the same accuracy: the mean of {late} is below {target}"
            lines.append(f"{name}, usual over lathe: {ratio:.2f}, at least {BAR}: {judged}")
    return lines


def main(argv: Sequence[str] | None = None) -> dict[str, list[dict[str, float]]]:
    """Print the figures of each training and of the sides; return the trainings of each side."""
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)), help="a training of each side each")
    made.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="what is trained")
    made.add_argument("--target", type=float, default=TARGET, help="the test accuracy")
    made.add_argument("--folder", help="with the four IDX files; by default each training downloads them")
    made.add_argument("--threads", type=int, default=0, help="of torch; 0 is torch's own choice")
    made.add_argument("--epochs", type=int, help="of both sides, for a short try; each has its own by default")
    made.add_argument("--override", nargs="+", default=[], help="of the experiment, such as optimizer.lr=0.1")
    usual = made.add_argument_group("the usual side")
    usual.add_argument("--usual-epochs", type=int, default=12, help="its epochs")
    usual.add_argument("--batch-size", type=int, default=256, help="samples of a step")
    usual.add_argument("--lr", type=float, default=0.2, help="learning rate at the peak of its schedule")
    usual.add_argument("--crop", type=int, default=1, help="pixels of padding")
    usual.add_argument("--workers", type=int, default=2, help="reading processes; 0 reads in the training process")
    made.add_argument("--one", nargs=2, metavar=("SIDE", "SEED"), help=argparse.SUPPRESS)
    words = list(sys.argv[1:] if argv is None else argv)
    args = made.parse_args(words)
    if args.one:
        print("\n" + json.dumps(trained(args.one[0], int(args.one[1]), args)))
        return {}
    results: dict[str, list[dict[str, float]]] = {side: [] for side in args.sides}
    for seed in args.seeds:
        for side in args.sides:
            line = [sys.executable, __file__, *words, "--one", side, str(seed)]
            done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 (this file)
            found = json.loads(done.stdout.splitlines()[-1])
            results[side].append(found)
            seconds = f"{found['seconds']:.0f} s, of which compiling {found['compile_s']:.0f} s"
            print(f"seed {seed}, {side}: test accuracy {found['accuracy']:.4f}; {seconds}; ", end="")
            print(f"CPU {found['cpu_s']:.0f} s", flush=True)
    print("\n".join(summary(results, args.target)))
    return results


if __name__ == "__main__":
    main()
