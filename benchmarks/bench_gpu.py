"""The project's bars for one NVIDIA GPU: what `performance=fast` is worth, whole-step graphs, and the Trainer's tax.

    python benchmarks/bench_gpu.py [--rounds 3] [--json FILE]
    python benchmarks/bench_gpu.py --accelerator cpu --tiny      # its logic alone: nets of a few layers on a CPU

Cases are training runs of the real configuration, each in a fresh process, all in turns. `performance=fast` beside
`precision.matmul=high` (TF32), for ResNet-50 on images of 224 x 224 and GPT-2 small: a step at least 3 times as fast,
at most 0.65 of the memory. ResNet-20 in batches of 64, whose kernels are shorter than their launches:
`compile=reduce-overhead compile.scope=step` at least 3 times as fast as eager, and eager at most 1.05 of a hand-written
loop over the same net. docs/results.md has what an H200 gave.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from torch.nn import functional as F

from lathe.benchmark import crew
from lathe.benchmark.cases import GPU_NETS, Case
from lathe.benchmark.spread import Results, Spread, ratio, table
from lathe.benchmark.suites import overrides_of
from lathe.config.resolve import resolve
from lathe.configs import FOLDER
from lathe.measure import describe_gpu
from lathe.runs.build import make_task

SHORT = (
    "model=resnet20",
    "data=synthetic",
    "data.channels=3",
    "data.image_size=32",
    "data.mean=[0.5,0.5,0.5]",
    "data.std=[0.25,0.25,0.25]",
    "data.batch_size=64",
    "data.source.train_size=2048",
    "optimizer=sgd",
    "optimizer.lr=0.01",
    "precision.matmul=high",
)
NETS: dict[str, tuple[str, ...]] = {
    "resnet50": (*GPU_NETS["resnet50"], "data.image_size=224"),
    "gpt2_small": GPU_NETS["gpt2_small"],
    "resnet20": SHORT,
}
# Sizes of --tiny, for the same kinds of nets.
TINY: dict[str, tuple[str, ...]] = {
    "resnet50": ("model=resnet18", "data.image_size=16", "data.batch_size=2", "data.source.train_size=32"),
    "gpt2_small": (
        "model.net.depth=1",
        "model.net.width=16",
        "model.net.heads=2",
        "data.vocab_size=32",
        "data.length=16",
    ),
    "resnet20": ("model.net.depth=8", "model.net.width=4", "data.image_size=8", "data.source.train_size=512"),
}
REFERENCE, FAST = ("precision.matmul=high",), ("performance=fast",)
GRAPHS = ("compile=reduce-overhead", "compile.scope=step")
HAND = "resnet20, hand-written loop"


class Bar(NamedTuple):
    """A limit on the ratio of two cases' figures; `inverse` is base over case, as of a speed-up."""

    sentence: str
    case: str
    base: str
    figure: str
    at_least: float | None = None
    at_most: float | None = None


BARS = [
    *(
        Bar(f"{net}: step of performance=fast, times as fast as TF32", f"{net}, fast", f"{net}, TF32", "step_ms", 3.0)
        for net in ("resnet50", "gpt2_small")
    ),
    *(
        Bar(f"{net}: its peak of memory over TF32's", f"{net}, fast", f"{net}, TF32", "peak", at_most=0.65)
        for net in ("resnet50", "gpt2_small")
    ),
    Bar(
        "resnet20, batch 64: a step in one graph, times as fast as eager",
        "resnet20, graphs",
        "resnet20, eager",
        "step_ms",
        3.0,
    ),
    Bar("resnet20, batch 64: eager over a hand-written loop", "resnet20, eager", HAND, "step_ms", at_most=1.05),
]


def cases(tiny: bool) -> list[Case]:
    sides: list[tuple[str, str, tuple[str, ...]]] = [
        (net, name, words)
        for net in ("resnet50", "gpt2_small")
        for name, words in (("TF32", REFERENCE), ("fast", FAST))
    ]
    sides += [("resnet20", "eager", ()), ("resnet20", "graphs", GRAPHS)]
    return [
        Case(f"{net}, {name}", (*NETS[net], *(TINY[net] if tiny else ()), *words), 1, alone=True)
        for net, name, words in sides
    ]


def composed(case: Case, request: dict[str, Any]) -> dict[str, Any]:
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return resolve(compose("train", overrides=overrides_of(case, request)))


def hand(cfg: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
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


def measured(tiny: bool, request: dict[str, Any]) -> Results:
    """Return the figures of every case, round by round; each round begins with another case."""
    every = cases(tiny)
    configurations = {case.name: composed(case, request) for case in every}
    torch.set_float32_matmul_precision("high")  # as in the cases that the loop is compared with
    torch.backends.cudnn.allow_tf32 = True
    results: Results = {name: [] for name in [*configurations, HAND]}
    for number in range(request["rounds"]):
        for case in [*every[number % len(every) :], *every[: number % len(every)]]:
            found = crew.run([case], configurations, {**request, "rounds": 1}, lambda line: print(line, flush=True))
            results[case.name] += found[case.name]
            if case.name == "resnet20, eager":
                results[HAND].append(hand(configurations[case.name], request))
    return results


def held(bar: Bar, results: Results) -> list[str]:
    """Return the bar's sentence with its limit, the measured value, and whether the median meets it."""
    limit = f"at least {bar.at_least:.2f}" if bar.at_least is not None else f"at most {bar.at_most:.2f}"
    sides = (bar.base, bar.case) if bar.at_least is not None else (bar.case, bar.base)
    told = all(bar.figure in result for side in sides for result in results[side])
    spread: Spread | None = ratio(results, *sides, lambda result: float(result[bar.figure])) if told else None
    if spread is None:
        errors = [str(result["error"]) for side in sides for result in results[side] if "error" in result]
        return [f"{bar.sentence}, {limit}", errors[0] if errors else "not measured", "-"]
    met = (bar.at_least or 0.0) <= spread.median <= (bar.at_most or float("inf"))
    return [f"{bar.sentence}, {limit}", str(spread), "met" if met else "missed"]


def main(words: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of every case (default 3)")
    parser.add_argument("--steps", type=int, default=50, help="steps measured in a turn (default 50)")
    parser.add_argument("--warmup", type=int, default=20, help="steps before them (default 20)")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu", help="cpu: the logic alone")
    parser.add_argument("--tiny", action="store_true", help="nets of a few layers")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(words)
    if options.accelerator == "gpu" and not torch.cuda.is_available():
        parser.error("no NVIDIA GPU is visible here: --accelerator cpu --tiny proves the logic alone.")
    request = {
        "rounds": options.rounds,
        "steps": options.steps,
        "warmup": options.warmup,
        "accelerator": options.accelerator,
        "threads": 1,
        "timeout": 600,
        "overrides": [],
    }
    results = measured(options.tiny, request)
    gpu = describe_gpu(torch.device("cuda")) if options.accelerator == "gpu" else None
    where = f"{gpu['name']}, CUDA {gpu['cuda']}" if gpu else "a CPU: of no meaning but that it runs"
    print(f"{where}, torch {torch.__version__}; medians (lowest to highest) of n = {options.rounds} rounds in turns")
    print(table(["bar", "measured", ""], [held(bar, results) for bar in BARS]), end="")
    if options.json:
        facts = {"gpu": gpu, "torch": torch.__version__, "request": request, "results": results}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
