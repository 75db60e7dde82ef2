"""Write the GPU columns of README.md and the table of docs/gpu.md from docs/gpu_results.json.

python scripts/gpu_column.py (with --check it lists the stale files and exits with code 1)
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "gpu_results.json"
# Beginnings of the rows of README's feature table, and the file of tests/gpu for each, or None.
ROWS: dict[str, str | None] = {
    "`strategy=`": "test_gpu_strategies.py",
    "`precision=`": "test_gpu_precision.py",
    "`compile=`": "test_gpu_compile.py",
    "`compression=`": "test_gpu_methods.py",
    "`target=`": "test_gpu_targets.py",
    "several machines": None,
}
AREAS = {
    "test_gpu_strategies.py": "strategies, on one GPU and on two",
    "test_gpu_precision.py": "number formats, the scaler, TF32, channels last",
    "test_gpu_compile.py": "compilation, CUDA graphs",
    "test_gpu_data.py": "data on the device, pinned, prefetched",
    "test_gpu_methods.py": "compression, EMA, 2:4 kernels",
    "test_gpu_runs.py": "checkpoints, kill and resume, measurements, optimizers",
    "test_gpu_targets.py": "export, receipts, suites, server",
}
BEGIN, END = "<!-- what ran, by `python scripts/gpu_column.py` -->\n", "<!-- end of what ran -->\n"


def main() -> None:
    facts = json.loads(RESULTS.read_text())
    stale = []
    for path, written in ((ROOT / "README.md", readme), (ROOT / "docs" / "gpu.md", page)):
        old = path.read_text(encoding="utf-8")
        new = written(old, facts)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv[1:]:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'stale' if '--check' in sys.argv[1:] else 'written'}: {', '.join(stale)}")
        sys.exit(int("--check" in sys.argv[1:]))


def tests_of(file: str | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tests of a file of tests/gpu by name."""
    return {name.partition("::")[2]: test for name, test in facts["tests"].items() if name.partition("::")[0] == file}


def where(facts: Mapping[str, Any]) -> str:
    """Return the hardware and versions of a record."""
    names = [f"{facts['gpus'].count(name)} x {name}" for name in dict.fromkeys(facts["gpus"])]
    return f"{', '.join(names)}, torch {facts['torch']}, {facts['day']}"


def cells(file: str | None, facts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tests of a file that ran on a GPU, and the number of those that could not."""
    tests = tests_of(file, facts)
    ran = {name: test for name, test in tests.items() if test["outcome"] != "skipped"}
    if not ran:
        return "no", "all of it"
    failed = [name for name, test in ran.items() if test["outcome"] != "passed"]
    text = f"{len(ran) - len(failed)} of {len(ran)} tests passed"
    left = len(tests) - len(ran)
    return text + "".join(f"; failed: `{name}`" for name in failed), f"{left} tests" if left else ""


def readme(text: str, facts: Mapping[str, Any]) -> str:
    """Return README with the record's GPU columns; raise ValueError if the table's rows have changed."""
    lines, starts = text.splitlines(keepends=True), []
    for number, line in enumerate(lines):
        row = [part.strip() for part in line.strip().split("|")[1:-1]]
        start = next((start for start in ROWS if row and row[0].startswith(start)), None)
        if row[:2] == ["", "runs on CPU"]:
            row[2] = f"ran on GPU ({where(facts)})"
        elif start is not None and len(row) == 4:
            starts.append(start)
            row[2:] = cells(ROWS[start], facts)
        else:
            continue
        lines[number] = f"| {' | '.join(row)} |\n"
    if starts != list(ROWS):
        raise ValueError(f"README's table of features has the rows {starts}, expected {list(ROWS)}")
    return "".join(lines)


def page(text: str, facts: Mapping[str, Any]) -> str:
    """Return docs/gpu.md with the record's table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{table(facts)}{END}{rest.split(END)[1]}"


def table(facts: Mapping[str, Any]) -> str:
    lines = [
        f"{where(facts)}; driver {facts['driver']}, CUDA {facts['cuda']}, Python {facts['python']}, commit "
        f"{str(facts['commit'])[:12]}; {facts['seconds']} s in all.",
        "",
        "| what | passed | failed | could not run | measured |",
        "| --- | --- | --- | --- | --- |",
    ]
    for file, area in AREAS.items():
        tests = tests_of(file, facts)
        counts = [
            str(sum(test["outcome"] == outcome for test in tests.values()))
            for outcome in ("passed", "failed", "skipped")
        ]
        figures = {name: value for test in tests.values() for name, value in test.get("figures", {}).items()}
        measured = "; ".join(f"{name}: {value:.3g}" for name, value in figures.items())
        lines.append(f"| {area} | {' | '.join(counts)} | {measured} |")
    reasons: dict[str, list[str]] = {}
    for name, test in facts["tests"].items():
        if test["outcome"] != "passed":
            sentence = re.sub(r"[|]", "/", test.get("sentence", ""))
            reasons.setdefault(f"{test['outcome']}: {sentence}", []).append(f"`{name.partition('::')[2]}`")
    listed = [
        f"- {reason} ({names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)})"
        for reason, names in reasons.items()
    ]
    return "\n".join([*lines, *(["", *listed] if listed else [])]) + "\n"


if __name__ == "__main__":
    main()
