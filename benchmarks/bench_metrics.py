"""Time of a training step with torchmetrics updated at every batch, over that of the sums on the device.

    python benchmarks/bench_metrics.py --rounds 9

Sides, run in turns in one process on one thread: a ResNet-20 on batches of 128 grey images of 28 x 28, forward,
backward, optimizer step and metrics, as `ClassificationTask.training_loss` has them; with loss and accuracy as sums,
and with torchmetrics of accuracy, F1 and AUROC beside them. Times are process CPU time. The bar: 1.1.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lathe.nets import CifarResNet
from lathe.tasks import ClassificationTask

BATCH, SIDE, CLASSES = 128, 28, 10
BAR = 1.1


def make_step(metrics: dict[str, object] | None) -> Callable[[], None]:
    """Return a training step of a task with these metrics."""
    torch.manual_seed(0)
    net = CifarResNet(depth=20, in_channels=1, num_classes=CLASSES)
    task = ClassificationTask(net, metrics=metrics)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    batch = (torch.randn(BATCH, 1, SIDE, SIDE), torch.randint(0, CLASSES, (BATCH,)))

    def step() -> None:
        loss = task.training_loss(task.net(batch[0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """Return the CPU seconds of a step."""
    began = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - began) / steps


def main() -> None:
    """Print each side's time, and the ratio of the medians with its range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each side, taken in turns")
    parser.add_argument("--steps", type=int, default=5, help="of each measurement")
    args = parser.parse_args()
    torch.set_num_threads(1)
    metrics = {"acc": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES), "auroc": MulticlassAUROC(CLASSES)}
    sides = {"sums": make_step(None), "torchmetrics": make_step({"accuracy": "accuracy", **metrics})}
    for step in sides.values():
        seconds(step, 2)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, step in sides.items():
            times[name].append(seconds(step, args.steps))
    print(f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, n = {args.rounds}")
    for name, values in times.items():
        spread = f"from {1000 * min(values):.1f} to {1000 * max(values):.1f}"
        print(f"{name:14}{1000 * statistics.median(values):9.1f} ms a step, {spread}")
    ratios = [one / other for one, other in zip(times["torchmetrics"], times["sums"], strict=True)]
    ratio = statistics.median(ratios)
    verdict = "met" if ratio <= BAR else "missed"
    print(f"ratio {ratio:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}: at most {BAR} {verdict}")


if __name__ == "__main__":
    main()
