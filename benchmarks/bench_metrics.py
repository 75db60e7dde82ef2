"""Time of a training step with torchmetrics updated at every batch, compared with sums on the device.

    python benchmarks/bench_metrics.py --rounds 9

Two sides in turns in one process on one thread: a ResNet-20 on batches of 128 grey images of 28 x 28, forward,
backward, optimizer step and metrics, as `ClassificationTask.training_loss` has them. One side sums loss and accuracy,
the other one also updates torchmetrics of accuracy, F1 and AUROC. Times are CPU time of the process. The bar: 1.1.
"""

import time
from collections.abc import Callable

import torch
from common import describe_machine, divide, parser, verdict
from suites.results import Spread
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


def step_ms(step: Callable[[], None], steps: int) -> float:
    """Return the CPU milliseconds of a step."""
    began = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - began) / steps * 1e3


def main() -> None:
    """Print each side's time, and the ratio."""
    made = parser(__doc__, rounds=9)
    made.add_argument("--steps", type=int, default=5, help="of each measurement (default 5)")
    options = made.parse_args()
    torch.set_num_threads(1)
    metrics = {"acc": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES), "auroc": MulticlassAUROC(CLASSES)}
    sides = {"sums": make_step(None), "torchmetrics": make_step({"accuracy": "accuracy", **metrics})}
    for step in sides.values():
        step_ms(step, 2)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, step in sides.items():
            times[name].append(step_ms(step, options.steps))
    print(f"{describe_machine('torch', 'torchmetrics')}; n = {options.rounds}")
    for name, values in times.items():
        print(f"{name:14} {Spread(values):.1f} ms a step")
    ratio = divide(times["torchmetrics"], times["sums"])
    print(f"ratio {ratio}: at most {BAR} {verdict(ratio.median <= BAR)}")


if __name__ == "__main__":
    main()
