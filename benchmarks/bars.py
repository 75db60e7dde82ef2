"""Compare what a suite has measured with this project's own bars.

python benchmarks/bars.py logs/benchmark/scaling_2026-11-28_10-00-00
"""

import argparse
import json
from importlib import import_module
from pathlib import Path

from suites.cases import SIDES
from suites.results import BARS, Results, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output of scripts/benchmark.py, with results.json in it")
    written = json.loads((parser.parse_args().folder / "results.json").read_text())
    suite = written["request"]["suite"]
    if suite not in BARS and suite not in SIDES:
        parser.error(f"suite={suite} has no bars: {', '.join([*BARS, *SIDES])} have some.")
    bars = BARS[suite] if suite in BARS else import_module(f"suites.{suite}").claims
    results = Results({case["name"]: case["rounds"] for case in written["cases"]})
    print(rows(bars(results), "bar"), end="")


if __name__ == "__main__":
    main()
