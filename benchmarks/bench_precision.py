"""A ResNet-18 in float32 and bfloat16, with channels first and last: what `precision=auto` and `trainer.channels_last`
are chosen by on a CPU.

    python benchmarks/bench_precision.py [--rounds 7] [--threads 2]

64 images of 3 x 32 x 32; a training step (SGD) and a forward pass in inference mode, the four sides in turns within one
process. Figures are medians over rounds, wall-clock.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from lathe.nets import ResNet
from lathe.strategies.precision import best_format

SIDES = [(dtype, last) for dtype in ("float32", "bfloat16") for last in (False, True)]


def side(dtype: str, last: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a training step and a forward pass."""
    torch.manual_seed(0)
    net, x, y = ResNet(depth=18, num_classes=10), torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    if last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def logits() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False):
            found: torch.Tensor = net(x)
        return found.float()

    def train() -> None:
        net.train()
        optimizer.zero_grad()
        F.cross_entropy(logits(), y).backward()
        optimizer.step()

    def infer() -> None:
        net.eval()
        with torch.inference_mode():
            logits()

    return train, infer


def main() -> None:
    """Print each side's times, and their ratios to float32 with channels first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side, after one that warms up")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sides = {key: side(*key) for key in SIDES}
    times: dict[tuple[str, bool], list[list[float]]] = {key: [[], []] for key in SIDES}
    for number in range(options.rounds + 1):
        for key, actions in sides.items():
            for action, measured in zip(actions, times[key], strict=True):
                start = time.perf_counter()
                action()
                if number:
                    measured.append(time.perf_counter() - start)
    print(f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}; auto: {best_format('cpu')}")
    base = times[SIDES[0]]
    for (dtype, last), both in times.items():
        words = []
        for what, mine, first in zip(("step", "forward"), both, base, strict=True):
            ratios = [b / a for a, b in zip(mine, first, strict=True)]
            words.append(
                f"{what} {1e3 * statistics.median(mine):.0f} ms, {statistics.median(ratios):.2f} x "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        print(f"{dtype:9} channels {'last' if last else 'first':5}: {'; '.join(words)}")


if __name__ == "__main__":
    main()
