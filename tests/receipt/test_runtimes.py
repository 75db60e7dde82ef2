"""The winner of a comparison of runtimes, and where there is none."""

from typing import Any

from lathe.receipt.page import winners


def row(
    backend: str, median: float, batch: int = 1, threads: int = 1, spread: float = 0.0, size: int | None = None
) -> dict[str, Any]:
    return {
        "of": "this",
        "backend": backend,
        "device": "cpu",
        "batch": batch,
        "threads": threads,
        "median_ms": median,
        "n": 9,
        "p10_ms": median - spread,
        "p90_ms": median + spread,
        "over_eager": median / 2,
        "beside_eager": "faster",
        "over_bf16": None,
        "beside_bf16": None,
        "arithmetic": "float32",
        "samples_per_s": 1e3 * batch / median,
        "bytes": size,
    }


def test_overlapping_ranges_have_no_winner() -> None:
    (found,) = winners(
        [row("eager", 2.0), row("onnx", 1.0, spread=0.1, size=9), row("torchscript", 1.1, spread=0.1, size=9)]
    )
    assert (found["winner"], found["fastest"], found["same"]) == (None, "onnx", ["torchscript"])


def test_the_fastest_file_is_named_where_a_module_wins() -> None:
    found = winners(
        [
            row("compiled_bf16", 0.5, 8, 2),
            row("onnx", 1.0, 8, 2, size=9),
            row("eager", 2.0, 8, 2),
            row("eager", 2.0, 1, 2),
        ]
    )
    assert [(cell["batch"], cell["winner"], cell["file"]) for cell in found] == [
        (1, "eager", None),
        (8, "compiled_bf16", "onnx"),
    ]
