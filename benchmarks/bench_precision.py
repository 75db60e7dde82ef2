"""A ResNet-18 in float32 and bfloat16, with channels first and last, on a CPU.

    python benchmarks/bench_precision.py [--rounds 7] [--threads 2]

`precision=auto` and `trainer.channels_last` choose by these figures. 64 images of 3 x 32 x 32; a training step (SGD)
and a forward pass in inference mode, the four sides in turns in one process, wall-clock time.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from common import describe_machine, divide, parser
from suites.results import Spread
from torch.nn import functional as F

from lathe.nets import ResNet
from lathe.strategies.precision import best_format

SIDES = [(dtype, last) for dtype in ("float32", "bfloat16") for last in (False, True)]
Actions = dict[str, Callable[[], Any]]


def make_side(dtype: str, last: bool) -> Actions:
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

    return {"step": train, "forward": infer}


def main() -> None:
    """Print each side's times, and the speed-up over float32 with channels first."""
    made = parser(__doc__, rounds=7)
    made.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    sides = {key: make_side(*key) for key in SIDES}
    times: dict[tuple[str, bool], dict[str, list[float]]] = {key: {"step": [], "forward": []} for key in SIDES}
    for number in range(options.rounds + 1):
        for key, actions in sides.items():
            for name, action in actions.items():
                began = time.perf_counter()
                action()
                if number:  # the first round warms up
                    times[key][name].append((time.perf_counter() - began) * 1e3)
    print(f"{describe_machine('torch')}, {options.threads} threads; auto: {best_format('cpu')}; n = {options.rounds}")
    for (dtype, last), mine in times.items():
        shown = [
            f"{name} {Spread(values).median:.0f} ms, {divide(times[SIDES[0]][name], values):.2f} x"
            for name, values in mine.items()
        ]
        print(f"{dtype:9} channels {'last' if last else 'first':5}: {'; '.join(shown)}")


if __name__ == "__main__":
    main()
