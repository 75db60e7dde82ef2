"""The winner of a comparison of runtimes, and where there is none."""

from typing import Any

from lathe.receipt.page import winners


def row(backend: str, median: float, batch: int = 1, spread: float = 0.0, size: int | None = None) -> dict[str, Any]:
    times = {"median_ms": median, "p10_ms": median - spread, "p90_ms": median + spread, "n": 9}
    return {"backend": backend, "batch": batch, "threads": 2, **times, "over_eager": median / 2, "bytes": size}


def test_overlapping_ranges_have_no_winner() -> None:
    rows = [row("eager", 2.0), row("onnx", 1.0, spread=0.1, size=9), row("torchscript", 1.1, spread=0.1, size=9)]
    (found,) = winners(rows)
    assert (found["winner"], found["fastest"], found["same"]) == (None, "onnx", ["torchscript"])


def test_the_fastest_file_is_named_where_a_module_wins() -> None:
    rows = [row("compiled_bf16", 0.5, 8), row("onnx", 1.0, 8, size=9), row("eager", 2.0, 8), row("eager", 2.0)]
    assert [(cell["batch"], cell["winner"], cell["file"]) for cell in winners(rows)] == [
        (1, "eager", None),
        (8, "compiled_bf16", "onnx"),
    ]
