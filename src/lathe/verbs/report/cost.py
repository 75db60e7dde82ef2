"""What a run costs: seconds and parameters of its result, bytes, MACs and latency of its receipt."""

from collections.abc import Iterable
from typing import Any

from lathe.verbs.report.collect import Run, finite
from lathe.verbs.report.groups import Group

COSTS = ("bytes", "macs", "latency_ms")


def cost(run: Run) -> dict[str, float | None]:
    """`bytes` of the file that ships, `macs` of one sample, and `latency_ms`, the median of the smallest batch on one
    thread; None for what no receipt says."""
    receipt = run.receipt
    size = receipt.get("size")
    return {
        "bytes": _least((row.get("bytes") for row in _rows(receipt, "files") if _ships(row, receipt)), None),
        "macs": finite(size.get("macs")) if isinstance(size, dict) else None,
        "latency_ms": _latency(receipt),
    }


def mean_cost(group: Group) -> dict[str, float | None]:
    """The means of what the group's runs cost, each over those that know it."""
    told = [cost(run) for run in group.units.values()]
    known = {name: [one[name] for one in told if one[name] is not None] for name in COSTS}
    return {name: sum(filter(None, values)) / len(values) if values else None for name, values in known.items()}


def short(run: Run) -> dict[str, Any] | None:
    """The few lines of a receipt that a page shows; None where there is none."""
    if not run.receipt:
        return None
    kept = ("compression", "baseline", "ships", "bytes_share", "findings", "warnings")
    return {name: run.receipt.get(name) for name in kept}


def _ships(row: dict[str, Any], receipt: dict[str, Any]) -> bool:
    return row.get("of") == "this" and row.get("target") == receipt.get("ships")


def _latency(receipt: dict[str, Any]) -> float | None:
    rows = [row for row in _rows(receipt, "latency") if row.get("of") == "this" and row.get("threads") == 1]
    least = _least((row.get("batch") for row in rows), None)
    rows = [row for row in rows if row.get("batch") == least]
    ships = [row for row in rows if row.get("backend") == receipt.get("ships")]
    return _least((row.get("median_ms") for row in ships or rows), None)


def _rows(receipt: dict[str, Any], name: str) -> list[dict[str, Any]]:
    there = receipt.get(name)
    return [row for row in there if isinstance(row, dict)] if isinstance(there, list) else []


def _least(values: Iterable[Any], otherwise: float | None) -> float | None:
    return min((number for number in map(finite, values) if number is not None), default=otherwise)
