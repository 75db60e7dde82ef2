"""Speed on one NVIDIA GPU: `performance=fast`, a training step as one CUDA graph, and the cost of the Trainer.

    python benchmarks/bench_gpu.py [--rounds 3] [--json FILE]
    python benchmarks/bench_gpu.py --accelerator cpu --tiny      # tests the program itself: nets of a few layers

Cases are short runs of `python train.py`, each in a fresh process, in turns. The bars: `performance=fast` compared with
`precision.matmul=high` (TF32), for ResNet-50 on images of 224 x 224 and for GPT-2 small, a step at least 3 times as
fast with at most 0.65 of the memory. For ResNet-20 in batches of 64, whose kernels are shorter than their launches,
`compile=reduce-overhead compile.scope=step` at least 3 times as fast as eager, and eager at most 1.05 of a hand-written
loop with the same net. Results of an H200 are in docs/results.md.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import parser, write_json
from suites import runner
from suites.cases import GPU_NETS, Case, overrides_of
from suites.results import Results, Threshold, rows
from torch.nn import functional as F

from lathe.config.resolve import resolve
from lathe.launch.api import compose
from lathe.measure import describe_gpu
from lathe.runs.build import make_task

NETS: dict[str, tuple[str, ...]] = {
    "resnet50": (*GPU_NETS["resnet50"], "data.image_size=224"),
    "gpt2_small": GPU_NETS["gpt2_small"],
    "resnet20": (
        *("model=resnet20", "optimizer=sgd", "optimizer.lr=0.01", "precision.matmul=high"),
        *("data=synthetic", "data.channels=3", "data.image_size=32", "data.batch_size=64"),
        *("data.mean=[0.5,0.5,0.5]", "data.std=[0.25,0.25,0.25]", "data.source.train_size=2048"),
    ),
}
# Sizes of --tiny, for the same kinds of nets.
TINY: dict[str, tuple[str, ...]] = {
    "resnet50": ("model=resnet18", "data.image_size=16", "data.batch_size=2", "data.source.train_size=32"),
    "gpt2_small": (
        *("model.net.depth=1", "model.net.width=16", "model.net.heads=2"),
        *("data.vocab_size=32", "data.length=16"),
    ),
    "resnet20": ("model.net.depth=8", "model.net.width=4", "data.image_size=8", "data.source.train_size=512"),
}
SIDES = [
    *((net, "TF32", ("precision.matmul=high",)) for net in ("resnet50", "gpt2_small")),
    *((net, "fast", ("performance=fast",)) for net in ("resnet50", "gpt2_small")),
    ("resnet20", "eager", ()),
    ("resnet20", "graphs", ("compile=reduce-overhead", "compile.scope=step")),
]
HAND = "resnet20, hand-written loop"


def bars(results: Results) -> list[Threshold]:
    eager = "resnet20, eager"
    graph, hand = (results.ratio(eager, base, "step_ms") for base in ("resnet20, graphs", HAND))
    limits = []
    for net in ("resnet50", "gpt2_small"):
        tf32, fast = f"{net}, TF32", f"{net}, fast"
        limits.append(
            Threshold(f"{net}: step of TF32 over fast's,", results.ratio(tf32, fast, "step_ms"), at_least=3.0)
        )
        limits.append(Threshold(f"{net}: peak of fast over TF32's,", results.ratio(fast, tf32, "peak"), at_most=0.65))
    return [
        *limits,
        Threshold("resnet20: eager over a graph,", graph, at_least=3.0),
        Threshold("resnet20: eager over a hand-written loop,", hand, at_most=1.05),
    ]


def cases(tiny: bool) -> list[Case]:
    """Return a training for each side."""
    sizes = TINY if tiny else dict.fromkeys(NETS, ())
    return [Case(f"{net}, {name}", (*NETS[net], *sizes[net], *own), 1, fresh=True) for net, name, own in SIDES]


def by_hand(cfg: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Train the same net, loss and optimizer in a loop of four lines, on batches on the device."""
    device = torch.device("cuda" if request["accelerator"] == "gpu" else "cpu")
    torch.manual_seed(0)
    net = make_task(cfg).net.to(device)
    data, rate = cfg["data"], cfg["optimizer"]["lr"]
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    shape = (data["batch_size"], data["channels"], data["image_size"], data["image_size"])
    batches = [(torch.randn(shape, device=device), torch.randint(0, 10, shape[:1], device=device)) for _ in range(8)]
    began = 0.0
    for number in range(request["warmup"] + request["steps"]):
        if number == request["warmup"]:
            _wait(device)
            began = time.perf_counter()
        x, y = batches[number % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    _wait(device)
    return {"step_ms": (time.perf_counter() - began) / request["steps"] * 1e3}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(tiny: bool, request: dict[str, Any]) -> Results:
    """Return the figures of every case, round by round; each round begins with another case."""
    sides = cases(tiny)
    configurations = {case.name: resolve(compose(overrides_of(case, request))) for case in sides}
    torch.set_float32_matmul_precision("high")  # as in the cases that the loop is compared with
    torch.backends.cudnn.allow_tf32 = True
    results = Results({name: [] for name in [*configurations, HAND]})
    for number in range(request["rounds"]):
        for case in runner.rotate(sides, number):
            results[case.name] += runner.run([case], configurations, {**request, "rounds": 1})[case.name]
            if case.name == "resnet20, eager":
                results[HAND].append(by_hand(configurations[case.name], request))
    return results


def main(argv: Sequence[str] | None = None) -> Results:
    arguments = parser(__doc__, rounds=3)
    arguments.add_argument("--steps", type=int, default=50, help="steps measured in a turn (default 50)")
    arguments.add_argument("--warmup", type=int, default=20, help="steps before them (default 20)")
    arguments.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu", help="cpu tests the program itself")
    arguments.add_argument("--tiny", action="store_true", help="nets of a few layers")
    arguments.add_argument("--json", type=Path, help="also write the figures to this file")
    options = arguments.parse_args(argv)
    if options.accelerator == "gpu" and not torch.cuda.is_available():
        arguments.error("no NVIDIA GPU is visible: --accelerator cpu --tiny tests the program itself.")
    request = {key: getattr(options, key) for key in ("rounds", "steps", "warmup", "accelerator")}
    request |= {"threads": 1, "timeout": 600, "overrides": []}
    results = measure(options.tiny, request)
    gpu = describe_gpu(torch.device("cuda")) if options.accelerator == "gpu" else None
    where = f"{gpu['name']}, CUDA {gpu['cuda']}" if gpu else "a CPU (the figures mean nothing)"
    print(f"{where}, torch {torch.__version__}; medians (lowest to highest) of n = {options.rounds} rounds in turns")
    print(rows(bars(results), "bar"), end="")
    for name in results:
        if error := results.error(name):
            print(f"{name}: {error}")
    write_json(options.json, {"gpu": gpu, "torch": torch.__version__, "request": request, "results": results})
    return results


if __name__ == "__main__":
    main()
