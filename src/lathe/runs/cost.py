"""What a run costs, by its receipt. Imports no torch."""

from collections.abc import Mapping
from typing import Any

COSTS = ("bytes", "macs", "latency_ms")


def cost_of(receipt: Mapping[str, Any]) -> dict[str, float | None]:
    """`bytes` of the file that ships, `macs` of one sample, and `latency_ms`, the median of the smallest batch on one
    thread; None for what the receipt, which may be empty, does not say.
    """
    files = [row for row in _own(receipt, "files") if row["target"] == receipt.get("ships")]
    return {
        "bytes": min((row["bytes"] for row in files), default=None),
        "macs": receipt["size"]["macs"] if "size" in receipt else None,
        "latency_ms": _latency(receipt),
    }


def _latency(receipt: Mapping[str, Any]) -> float | None:
    rows = [row for row in _own(receipt, "latency") if row["threads"] == 1]
    least = min((row["batch"] for row in rows), default=None)
    rows = [row for row in rows if row["batch"] == least]
    ships = [row for row in rows if row["backend"] == receipt["ships"]]
    return min((row["median_ms"] for row in ships or rows), default=None)


def _own(receipt: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of the run itself, without those of its dense model."""
    return [row for row in receipt.get(name, ()) if row["of"] == "this"]
