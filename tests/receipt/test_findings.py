"""The findings of a receipt, good and bad."""

from typing import Any

from lathe.receipt.page import findings


def row(of: str, backend: str, median: float, **changes: Any) -> dict[str, Any]:
    made = {"of": of, "backend": backend, "device": "cpu", "batch": 1, "threads": 1, "n": 9}
    made |= dict.fromkeys(("median_ms", "p10_ms", "p90_ms"), median)
    for key in ("eager", "bf16", "twin"):
        made |= {f"over_{key}": 1.0, f"beside_{key}": "same"}
    return {**made, **changes}


def told(**changes: Any) -> str:
    given = {
        **{"chosen": {"by": "val/accuracy", "step": 7}, "split": "test", "metric": "accuracy"},
        **{"figures": [], "files": [], "latency": [], "structure": [], "size": {"sparsity": 0.0}},
        "compression": {"qat": "quantization"},
        "energy": {"this": {}, "dense": {}},
    }
    return "\n".join(findings({**given, **changes}))


def test_integers_that_lose_against_bf16_are_reported() -> None:
    slow = row("this", "onnx_int8", 2.0, over_bf16=1.4, beside_bf16="slower", over_eager=0.5, beside_eager="faster")
    text = told(structure=["quantization"], latency=[row("this", "eager", 9.0), slow])
    assert "onnx_int8 is 1.4x slower than the dense net compiled in bf16, which needs no quantization" in text
    assert "saves bytes, not time" in text
    fast = row("this", "onnx_int8", 2.0, over_bf16=0.4, beside_bf16="faster")
    assert "saves bytes" not in told(structure=["quantization"], latency=[fast])


def test_the_verdict_is_one_sentence_in_factors() -> None:
    quick = {"over_eager": 1 / 2.6, "beside_eager": "faster", "over_twin": 1.9, "beside_twin": "slower"}
    rows = [row("this", "onnx_int8", 2.0, **quick), row("this", "onnx_int8", 9.0, batch=32, over_eager=0.1)]
    file = {"of": "this", "target": "onnx_int8", "bytes": 270, "gzipped": 150, "ratio": 0.25, "gzipped_ratio": 0.15}
    assert told(latency=rows, files=[file]).splitlines()[0] == (
        "Verdict: onnx_int8 at batch 1 is 2.6x faster than PyTorch eager, 1.9x slower than the dense ONNX file; "
        "the onnx_int8 file is 4.0x smaller."
    )
