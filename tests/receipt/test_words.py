"""The sentences of a receipt, good news and bad."""

from typing import Any

from lathe.receipt.timing import told_verdict
from lathe.receipt.words import findings, method


def row(of: str, backend: str, median: float, **changes: Any) -> dict[str, Any]:
    made = {
        "of": of,
        "backend": backend,
        "device": "cpu",
        "batch": 1,
        "threads": 1,
        "median_ms": median,
        "p10_ms": median,
        "p90_ms": median,
        "n": 9,
    }
    for key in ("eager", "bf16", "twin"):
        made |= {f"over_{key}": 1.0, f"beside_{key}": "same"}
    return {**made, **changes}


def told(**changes: Any) -> str:
    given = {
        "chosen": {"by": "val/accuracy", "step": 7},
        "split": "test",
        "metric": "accuracy",
        "figures": [],
        "files": [],
        "latency": [],
        "structure": [],
        "size": {"sparsity": 0.0},
        "compression": {"qat": "quantization"},
        "energy": {"this": {}, "dense": {}},
    }
    return "\n".join(findings({**given, **changes}))


def test_integers_that_lose_against_bf16_are_told() -> None:
    slow = row("this", "onnx_int8", 2.0, over_bf16=1.4, beside_bf16="slower", over_eager=0.5, beside_eager="faster")
    text = told(structure=["quantization"], latency=[row("this", "eager", 9.0), slow])
    assert "onnx_int8 is this net's fastest, 2.000 ms, 0.50 of the time of the dense net in eager fp32 (faster)" in text
    assert "the integers of onnx_int8 are slower than the dense net compiled in bf16 (1.40 of its time)" in text
    assert "buy bytes, not time" in text
    fast = row("this", "onnx_int8", 2.0, over_bf16=0.4, beside_bf16="faster")
    assert "buy bytes" not in told(structure=["quantization"], latency=[fast])


def test_energy_is_told_where_it_was_counted() -> None:
    assert "Training took" not in told()
    counted = {"this": {"energy_gpu_j": 9000.0, "energy_cpu_j": 360.0}, "dense": {"energy_gpu_j": 18000.0}}
    lines = [line for line in told(energy=counted).splitlines() if line.startswith("Training")]
    assert lines == [
        "Training took 2.5 Wh of its GPUs, that of the dense net 5 Wh.",
        "Training took 0.1 Wh of the processors of its machines.",
    ]


def test_medians_that_differ_within_noise_are_not_called_the_same() -> None:
    noisy = row("this", "eager", 2.0, over_eager=1.4, over_twin=1.02)
    text = told(latency=[noisy])
    assert "1.40 of the time of the dense net in eager fp32 (not told apart)" in text
    assert "1.02 of the time of the dense net in the same runtime (same)" in text
    assert told_verdict({"over_bf16": None, "beside_bf16": None}, "bf16") == ""


def test_what_zeros_do_not_buy_is_told() -> None:
    rows = [row("this", "eager", 2.04), row("dense", "eager", 2.0), row("this", "onnx", 1.0)]
    files = [{"of": "this", "target": "onnx", "bytes": 900, "gzipped": 250, "ratio": 1.0, "gzipped_ratio": 0.3}]
    text = told(size={"sparsity": 0.8}, latency=rows, files=files, compression={"prune": "masks"})
    assert "80.0% of the layers' weights are zero, which buys no time by itself" in text
    assert "(eager 2.040 ms beside the dense 2.000 ms at batch 1)" in text
    assert "0.300 of the gzipped bytes" in text


def test_weights_packed_into_few_bits_are_told_where_they_are_the_smaller_file() -> None:
    file = {"of": "this", "ratio": 0.27, "gzipped_ratio": 0.15, "gzipped": 150}
    onnx, weights = {**file, "target": "onnx_int8", "bytes": 270}, {**file, "target": "weights", "bytes": 140}
    assert "The file that ships (onnx_int8) has 270 bytes" in told(files=[onnx, weights])
    assert "packed into their bits for torch (weights), have 140 bytes" in told(files=[onnx, weights])
    assert "packed" not in told(files=[onnx, {**weights, "bytes": 265}])
    assert "packed" not in told(files=[weights])


def test_a_busy_machine_distillation_and_missing_files_are_told() -> None:
    assert "The machine was busy: the dense net's own calls differ by a factor of 2.0" in told(
        latency=[row("dense", "eager", 2.0, p90_ms=4.0)]
    )
    assert "busy" not in told(latency=[row("dense", "eager", 2.0, p90_ms=2.5)])
    assert "Distillation alone changes weights" in told(compression={"distill": "distillation"})
    assert "No file could be exported" in told()
    assert any("by more than 3%" in line for line in method({"baseline": None, "structure": []}, 5))
