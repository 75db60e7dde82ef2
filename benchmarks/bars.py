"""The project's own bars, held against what a suite has measured: python benchmarks/bars.py <folder of results>"""

import argparse
import json
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from lathe.benchmark.report import Results, Spread, forward_shares, rate, ratio, rest, state, table


class Bar(NamedTuple):
    """What a ratio has to be `at_most` or `at_least`; without both it is only shown."""

    sentence: str
    measured: Spread | None
    at_most: float | None = None
    at_least: float | None = None

    def row(self) -> list[str]:
        """The sentence with its limit, what was measured, and whether the median meets it."""
        if self.at_most is None and self.at_least is None:
            return [self.sentence, str(self.measured or "not measured"), ""]
        how = f"at least {self.at_least:.2f}" if self.at_most is None else f"at most {self.at_most:.2f}"
        if self.measured is None:
            return [f"{self.sentence} {how}", "not measured", "-"]
        low = self.measured.median >= (self.at_least or float("-inf"))
        met = low and self.measured.median <= (self.at_most or float("inf"))
        return [f"{self.sentence} {how}", str(self.measured), "met" if met else "missed"]


def scaling(results: Results) -> list[Bar]:
    pair, auto = "ddp, 2, weak", "auto, 1, weak"
    bars = [
        Bar(f"{name}, 1 process: step time over auto's", ratio(results, f"{name}, 1, weak", auto, _time), at_most=1.05)
        for name in ("ddp", "fsdp")
    ]
    gain = ratio(results, pair, "ddp, 1, weak", rate)
    halves = Spread([value / 2 for value in gain.values]) if gain else None
    alone = ratio(results, pair, f"{pair}, no sync", rate)
    return [
        *bars,
        Bar(f"{pair}: efficiency", halves, at_least=0.90),
        Bar("the same over two processes that sum no gradients: what the machine leaves to ddp", alone),
    ]


def memory(results: Results) -> list[Bar]:
    deep, none = "auto, 1, sqrt", "auto, 1, none"
    kept = "parameters and optimizer of a process over the dense ones,"
    return [
        *(
            Bar(f"{name}, 2: {kept}", ratio(results, f"{name}, 2", "auto, 1", state), at_most=0.60)
            for name in ("fsdp", "deepspeed_3")
        ),
        Bar(
            "sqrt, 64 blocks: activations kept for backward over those of none,",
            ratio(results, deep, none, itemgetter("activations")),
            at_most=0.35,
        ),
        Bar(
            "sqrt, 64 blocks: all but parameters, gradients and optimizer at the peak, over that of none,",
            ratio(results, deep, none, rest),
            at_most=0.35,
        ),
    ]


def overhead(results: Results) -> list[Bar]:
    shares = forward_shares(results)
    limits = {"prune": 1.03, "qat": 1.60, "distill": 1.05 + (Spread(shares).median if shares else 0.0)}
    return [
        Bar(
            f"{name}: step over the plain one's,",
            ratio(results, name, "plain", itemgetter("mean_step_ms")),
            at_most=limit,
        )
        for name, limit in limits.items()
    ]


SUITES = {"scaling": scaling, "memory": memory, "overhead": overhead}


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
