"""What a run costs, by its receipt. Imports no torch."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

COSTS = ("bytes", "macs", "latency_ms")


def cost_of(receipt: Mapping[str, Any]) -> dict[str, float | None]:
    """`bytes` of the file that ships, `macs` of one sample, and `latency_ms`, the median of the smallest batch on one
    thread; None for what the receipt, which may be empty, does not say.
    """
    size = receipt.get("size")
    files = (row.get("bytes") for row in _rows(receipt, "files") if row.get("target") == receipt.get("ships"))
    return {
        "bytes": _least(files),
        "macs": _number(size.get("macs")) if isinstance(size, dict) else None,
        "latency_ms": _latency(receipt),
    }


def _latency(receipt: Mapping[str, Any]) -> float | None:
    rows = [row for row in _rows(receipt, "latency") if row.get("threads") == 1]
    least = _least(row.get("batch") for row in rows)
    rows = [row for row in rows if row.get("batch") == least]
    ships = [row for row in rows if row.get("backend") == receipt.get("ships")]
    return _least(row.get("median_ms") for row in ships or rows)


def _rows(receipt: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of the run itself."""
    there = receipt.get(name)
    rows = [row for row in there if isinstance(row, dict)] if isinstance(there, list) else []
    return [row for row in rows if row.get("of") == "this"]


def _least(values: Iterable[Any]) -> float | None:
    return min((number for number in map(_number, values) if number is not None), default=None)


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None
