"""The project's own bars, held against what a suite has measured: python benchmarks/bars.py <folder of results>"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from lathe.benchmark import int8, loaders, trainer
from lathe.benchmark.report import forward_shares, rest, state
from lathe.benchmark.spread import Results, Spread, rate, ratio, table
from lathe.benchmark.thresholds import Threshold


def scaling(results: Results) -> list[Threshold]:
    pair, auto = "ddp, 2, weak", "auto, 1, weak"
    bars = [
        Threshold(
            f"{name}, 1 process: step time over auto's", ratio(results, f"{name}, 1, weak", auto, _time), at_most=1.05
        )
        for name in ("ddp", "fsdp")
    ]
    gain = ratio(results, pair, "ddp, 1, weak", rate)
    halves = Spread([value / 2 for value in gain.values]) if gain else None
    alone = ratio(results, pair, f"{pair}, no sync", rate)
    return [
        *bars,
        Threshold(f"{pair}: efficiency", halves, at_least=0.90),
        Threshold("the same over two processes that sum no gradients: what the machine leaves to ddp", alone),
    ]


def memory(results: Results) -> list[Threshold]:
    deep, none = "auto, 1, sqrt", "auto, 1, none"
    kept = "parameters and optimizer of a process over the dense ones,"
    return [
        *(
            Threshold(f"{name}, 2: {kept}", ratio(results, f"{name}, 2", "auto, 1", state), at_most=0.60)
            for name in ("fsdp", "deepspeed_3")
        ),
        Threshold(
            "sqrt, 64 blocks: activations kept for backward over those of none,",
            ratio(results, deep, none, itemgetter("activations")),
            at_most=0.35,
        ),
        Threshold(
            "sqrt, 64 blocks: all but parameters, gradients and optimizer at the peak, over that of none,",
            ratio(results, deep, none, rest),
            at_most=0.35,
        ),
    ]


def overhead(results: Results) -> list[Threshold]:
    shares = forward_shares(results)
    limits = {"prune": 1.03, "qat": 1.60, "distill": 1.05 + (Spread(shares).median if shares else 0.0)}
    return [
        Threshold(
            f"{name}: step over the plain one's,",
            ratio(results, name, "plain", itemgetter("mean_step_ms")),
            at_most=limit,
        )
        for name, limit in limits.items()
    ]


def claimed(suite: Any, results: Results) -> list[Threshold]:
    """Return a suite's claims as thresholds."""
    return [Threshold(sentence, measured, **limit) for sentence, measured, limit in suite.claims(results)]


SUITES: dict[str, Callable[[Results], list[Threshold]]] = {
    "scaling": scaling,
    "memory": memory,
    "overhead": overhead,
    "loaders": partial(claimed, loaders),
    "trainer": partial(claimed, trainer),
    "int8": partial(claimed, int8),
}


def _time(result: dict[str, Any]) -> float:
    return 1 / rate(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what scripts/benchmark.py has written, with results.json in it")
    written = json.loads((parser.parse_args().folder / "results.json").read_text())
    suite = written["request"]["suite"]
    if suite not in SUITES:
        parser.error(f"suite={suite} has no bars: {', '.join(SUITES)} have some.")
    results = {case["name"]: case["rounds"] for case in written["cases"]}
    print(table(["bar", "measured", ""], [bar.row() for bar in SUITES[suite](results)]), end="")


if __name__ == "__main__":
    main()
