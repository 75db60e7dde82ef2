"""Accuracy and time of `experiment=fashion_resnet` and of the same training written by hand in plain PyTorch.

    python benchmarks/bench_fashion.py --seeds 1 2 3 --folder <the four IDX files>

Both sides train ResNet-20 on the same batches (those of the seed), take the epoch of the best validation accuracy, and
test it once. They share the data module and the net's class. Optimizer, schedule, loop and choice of the epoch are
written out here, and the initial weights have another seed, so that the sides differ as two seeds do. Sides take turns,
seed by seed.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from common import parser, verdict
from suites.results import Spread
from torch import Tensor, nn
from torch.nn import functional as F

import lathe
from lathe.config.resolve import resolve
from lathe.nets import CifarResNet
from lathe.runs.build import make_data

BAR = 0.005  # of the mean test accuracies: about two standard errors of n = 3


def overrides_of(seed: int, args: argparse.Namespace) -> list[str]:
    """Return the experiment's overrides."""
    overrides = ["experiment=fashion_resnet", f"seed={seed}", f"paths.log_dir={args.logs}"]
    overrides += ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false"] * args.cpu
    overrides += [] if args.epochs is None else [f"trainer.max_epochs={args.epochs}"]
    return [*overrides, *([] if args.folder is None else [f"data.source.folder={args.folder}"])]


def by_lathe(overrides: list[str], seed: int, device: torch.device) -> float:
    """Return the test accuracy of the experiment."""
    return float(lathe.train(overrides).result["test/accuracy"])


def by_hand(overrides: list[str], seed: int, device: torch.device) -> float:
    """Return the test accuracy of the same training, written out."""
    cfg = resolve(lathe.compose(overrides))
    datamodule, epochs = make_data(cfg), int(cfg["trainer"]["max_epochs"])
    datamodule.prepare_data()
    datamodule.setup("fit")
    datamodule.setup("test")
    torch.manual_seed(1000 + seed)
    net = CifarResNet(depth=20, in_channels=1, num_classes=10).to(device)
    decayed, plain = ([p for p in net.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9, nesterov=True)
    train = datamodule.train_dataloader()
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=epochs * len(train), pct_start=0.3, cycle_momentum=False
    )
    best, state = -1.0, net.state_dict()
    for _ in range(epochs):
        net.train()
        for x, y in train:
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        score = accuracy(net, datamodule.val_dataloader(), device)
        if score > best:
            best, state = score, {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(state)
    return accuracy(net, datamodule.test_dataloader(), device)


@torch.no_grad()
def accuracy(net: nn.Module, batches: Any, device: torch.device | None = None) -> float:
    """Return the accuracy; labels below 0 pad the last batch."""
    net.eval()
    correct = n = 0
    for x, y in batches:
        predictions: Tensor = net(x.to(device)).argmax(1).to(y.device)
        correct += int((predictions == y).sum())
        n += int((y >= 0).sum())
    return correct / n


SIDES = {"lathe": by_lathe, "hand": by_hand}


def main() -> None:
    """Print each seed's accuracies and seconds, their means, and whether they are within the bar."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="a training of each side for each")
    arguments.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="what is trained")
    arguments.add_argument("--epochs", type=int, help="of each training; by default those of the experiment")
    arguments.add_argument("--folder", help="with the four IDX files; by default they are downloaded")
    arguments.add_argument("--logs", default=tempfile.mkdtemp(prefix="fashion_"), help="where the runs go")
    arguments.add_argument("--cpu", action="store_true", help="train on the CPU where there is a GPU")
    args = arguments.parse_args()
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    scores: dict[str, list[float]] = {side: [] for side in args.sides}
    seconds: dict[str, list[float]] = {side: [] for side in args.sides}
    for seed in args.seeds:
        for side in args.sides:
            began = time.perf_counter()
            scores[side].append(SIDES[side](overrides_of(seed, args), seed, device))
            seconds[side].append(time.perf_counter() - began)
            print(f"seed {seed}, {side}: test accuracy {scores[side][-1]:.4f}, {seconds[side][-1]:.0f} s", flush=True)
    means = {side: statistics.mean(values) for side, values in scores.items()}
    for side, mean in means.items():
        spread = f"median {Spread(scores[side]):.4f}, n = {len(args.seeds)}; time {Spread(seconds[side]):.0f} s"
        print(f"{side}: mean test accuracy {mean:.4f}, {spread}")
    if len(args.sides) == len(SIDES):
        apart = abs(means["lathe"] - means["hand"])
        print(f"difference: {apart:.4f}, at most {BAR}: {verdict(apart <= BAR)}")


if __name__ == "__main__":
    main()
