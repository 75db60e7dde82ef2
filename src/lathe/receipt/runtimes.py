"""The comparison of a run's runtimes, which a benchmark adds to its receipt: the fastest in each cell, if any is.

A comparison is plain data: `rows` of `forms.time_forms`, each with `arithmetic`, `samples_per_s`, and `bytes` (None
for the module); `left_out`, `notes`, `hardware`, `versions`, the `checkpoint` that was measured, and the time.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from lathe.measure import Latency, verdict
from lathe.measure.plot import beside, lines
from lathe.receipt.forms import told_verdict

Row = Mapping[str, Any]
HEADER = (
    *("runtime", "arithmetic", "batch", "threads", "ms (p10 to p90)", "n"),
    *("samples/s", "of eager", "of compiled bf16", "bytes"),
)


def times(row: Row) -> str:
    """Return the median of a row with its percentiles."""
    return f"{row['median_ms']:.3f} ({row['p10_ms']:.3f} to {row['p90_ms']:.3f})"


def relative(row: Row, key: str) -> str:
    """Return a row's time over that of form `key` with the verdict; empty without it."""
    return "" if row[f"over_{key}"] is None else f"{row[f'over_{key}']:.3f} {told_verdict(row, key)}".strip()


def table(rows: Iterable[Row]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return the header and the rows, the fastest of each cell first."""
    return HEADER, [
        (
            *(row["backend"], row["arithmetic"], str(row["batch"]), str(row["threads"]), times(row), str(row["n"])),
            *(f"{row['samples_per_s']:,.0f}", relative(row, "eager"), relative(row, "bf16")),
            "" if row["bytes"] is None else f"{row['bytes']:,}",
        )
        for row in sorted(rows, key=lambda row: (*_cell(row), row["median_ms"]))
    ]


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
        names = [f"{row['backend']} ({row['median_ms']:.3f} ms)" for row in (best, *same)]
        text = f"Batch {batch}, {threads} thread{'s' * (threads > 1)}: "
        text += f"no winner, {' and '.join(names)} are the same within noise" if same else f"{names[0]} is the fastest"
        if best["over_eager"] is not None and best["backend"] != "eager":
            text += f", {best['over_eager']:.2f} of eager's time"
        if file is not None and file is not best and file not in same:
            text += f"; of the files, {file['backend']} is the fastest with {file['median_ms']:.3f} ms"
        found.append(
            {
                **{"batch": batch, "threads": threads, "fastest": best["backend"]},
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
    plots = []
    for threads in sorted({row["threads"] for row in rows}):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in sorted(rows, key=_cell):
            if row["threads"] == threads and row["over_eager"]:
                series.setdefault(row["backend"], []).append((float(row["batch"]), 1 / row["over_eager"]))
        title = f"Speed over eager's, {threads} thread{'s' * (threads > 1)}"
        plots.append(lines(title, "batch", "times eager", series))
    return beside(plots)


def _cell(row: Row) -> tuple[int, int]:
    return row["batch"], row["threads"]


def _latency(row: Row) -> Latency:
    return Latency(row["median_ms"], row["p10_ms"], row["p90_ms"], row["n"])
