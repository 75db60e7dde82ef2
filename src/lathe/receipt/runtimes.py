"""The comparison of runtimes as a table and in sentences: the fastest in each cell, if any is.

A comparison is plain data: `rows` of `timing.time_forms`, each with `arithmetic`, `samples_per_s`, and `bytes` (None
for the module); `left_out`, `notes`, `hardware`, `versions`, the `checkpoint` that was measured, and the time.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from lathe.measure import Latency, verdict
from lathe.measure.plot import beside, lines
from lathe.receipt.timing import told_verdict

Row = Mapping[str, Any]


def table(rows: Iterable[Row]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return the header and the rows, the fastest first."""
    header = (
        "runtime",
        "arithmetic",
        "batch",
        "threads",
        "ms (p10 to p90)",
        "n",
        "samples/s",
        "of eager",
        "of compiled bf16",
        "bytes",
    )
    found: list[Sequence[str]] = []
    for row in sorted(rows, key=lambda row: (*_cell(row), row["median_ms"])):
        times = f"{row['median_ms']:.3f} ({row['p10_ms']:.3f} to {row['p90_ms']:.3f})"
        beside = [
            f"{row[f'over_{key}']:.3f} {told_verdict(row, key)}".strip() if row[f"over_{key}"] else ""
            for key in ("eager", "bf16")
        ]
        size = "" if row["bytes"] is None else f"{row['bytes']:,}"
        found.append(
            (
                row["backend"],
                row["arithmetic"],
                str(row["batch"]),
                str(row["threads"]),
                times,
                str(row["n"]),
                f"{row['samples_per_s']:,.0f}",
                *beside,
                size,
            )
        )
    return header, found


def winners(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the `fastest` row's name for each batch size and number of threads.

    `winner` is None if others are equal within noise (`same`); `file` is the fastest exported file.
    """
    found = []
    for (batch, threads), cell in groupby(sorted(rows, key=_cell), _cell):
        some = sorted(cell, key=lambda row: float(row["median_ms"]))
        best = some[0]
        same = [row for row in some[1:] if verdict(_latency(best), _latency(row)) == "same"]
        file = next((row for row in some if row["bytes"] is not None), None)
        where = f"Batch {batch}, {threads} thread{'s' * (threads > 1)}"
        over = (
            ""
            if best["over_eager"] is None or best["backend"] == "eager"
            else f", {best['over_eager']:.2f} of eager's time"
        )
        if not same:
            text = f"{where}: {best['backend']} is the fastest with {best['median_ms']:.3f} ms{over}"
            text += "" if len(some) > 1 else "; nothing else was measured"
        else:
            names = [f"{row['backend']} ({row['median_ms']:.3f} ms)" for row in (best, *same)]
            text = f"{where}: no winner, {', '.join(names[:-1])} and {names[-1]} are the same within noise{over}"
        if file is not None and file is not best and file not in same:
            text += f"; of the files, {file['backend']} is the fastest with {file['median_ms']:.3f} ms"
        found.append(
            {
                "batch": batch,
                "threads": threads,
                "fastest": best["backend"],
                "winner": None if same else best["backend"],
                "same": [row["backend"] for row in same],
                "file": file["backend"] if file else None,
                "sentence": f"{text}.",
            }
        )
    return found


def sentences(section: Mapping[str, Any]) -> list[str]:
    """Return the winners, the notes, and what was not measured with the reason."""
    missing = [f"Not measured: {entry['form']}: {entry['reason']}" for entry in section["left_out"]]
    return [*(winner["sentence"] for winner in section["winners"]), *section["notes"], *missing]


def figure(rows: Sequence[Row]) -> str:
    """Return an SVG of the speed relative to eager by batch size, one plot for each number of threads."""
    return beside(
        [
            lines(
                f"Speed over eager's, {threads} thread{'s' * (threads > 1)}",
                "batch",
                "times eager",
                _series([row for row in rows if row["threads"] == threads]),
            )
            for threads in sorted({row["threads"] for row in rows})
        ]
    )


def _series(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=_cell):
        if row["over_eager"]:
            found.setdefault(row["backend"], []).append((float(row["batch"]), 1 / row["over_eager"]))
    return found


def _cell(row: Row) -> tuple[int, int]:
    return row["batch"], row["threads"]


def _latency(row: Row) -> Latency:
    return Latency(row["median_ms"], row["p10_ms"], row["p90_ms"], row["n"])
