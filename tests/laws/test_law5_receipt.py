"""Law 5: a compressed model's receipt has the metrics of the run's files. Methods without effect are reported."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from support.commands import in_process
from support.runs import SMALL, new_run, weights

from lathe import export
from lathe.measure import count_flops
from lathe.receipt import measured
from lathe.runs import inference
from lathe.runs.instantiate import instantiate
from lathe.training.train import train

SHORT = measured.Effort(repeats=5, warmup=1, seconds=1.0)


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setitem(measured.EFFORTS, "quick", SHORT)
        yield


def trained(folder: Path, *overrides: str) -> Path:
    """Train a run through the real job, and return its directory."""
    cfg = new_run(folder, *SMALL, *overrides)
    train(cfg)
    return Path(cfg["paths"]["run_dir"])


def read(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "receipt.json").read_text()))


def batches(run_dir: Path) -> Any:
    return inference.open_data(inference.open_run_net(run_dir)[1]).eval_loader("test")


def exported(run_dir: Path, target: str, folder: Path) -> Path:
    """Export the file that the receipt measured: the net without preprocessing."""
    path = folder / "model.onnx"
    export.get(target).export(inference.open_run_net(run_dir)[0].net, torch.zeros(2, 1, 8, 8), path)
    return path


def by_onnx(path: Path, run_dir: Path) -> float:
    """Return the test accuracy of the file, run without Lathe."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # as in docs/export.md
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name, right, n = session.get_inputs()[0].name, 0, 0
    for x, y in batches(run_dir):
        predicted = torch.from_numpy(session.run(None, {name: x.numpy()})[0]).argmax(1)
        right += int((predicted == y).sum())
        n += int((y != -100).sum())
    return right / n


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("pruned"), "compression=prune", "model.net.width=64", "model.net.depth=2")


def test_every_figure_is_found_again_in_the_runs_own_files(pruned: Path, tmp_path: Path) -> None:
    receipt, result, state = read(pruned), json.loads((pruned / "result.json").read_text()), weights(pruned, "best")
    size = receipt["size"]
    assert size["parameters"] == sum(value.numel() for value in state.values()) == result["parameters"]
    assert size["non_zero"] == sum(int(value.count_nonzero()) for value in state.values())
    matrices = {name.removesuffix(".weight"): value for name, value in state.items() if value.dim() == 2}
    zeros = {name: 1 - int(value.count_nonzero()) / value.numel() for name, value in matrices.items()}
    assert {layer["name"]: layer["sparsity"] for layer in receipt["layers"]} == pytest.approx(zeros)
    hidden = [value for name, value in matrices.items() if name != "head"]
    # as configured, without the head
    assert sum(int((v == 0).sum()) for v in hidden) == round(0.8 * sum(v.numel() for v in hidden))
    task, _ = inference.open_run_net(pruned)
    assert (
        size["macs"] == count_flops(task.net, torch.zeros(1, 1, 8, 8)) // 2 == sum(v.numel() for v in matrices.values())
    )
    assert size["effective_macs"] == sum(int(v.count_nonzero()) for v in matrices.values())
    metrics = {(row["backend"], row["split"]): row["figures"] for row in receipt["figures"] if row["of"] == "this"}
    assert metrics["eager", "test"]["accuracy"] == pytest.approx(result["test/accuracy"], abs=1e-7)
    assert metrics["eager", "val"]["accuracy"] == pytest.approx(result["val/accuracy"], abs=1e-7)
    assert (receipt["chosen"]["by"], receipt["chosen"]["step"]) == ("val/accuracy", result["best_step"])
    path = exported(pruned, "onnx", tmp_path)
    assert metrics["onnx", "test"]["accuracy"] == pytest.approx(by_onnx(path, pruned), abs=1e-9)
    files = {row["target"]: row for row in receipt["files"] if row["of"] == "this"}
    assert files["onnx"]["bytes"] == path.stat().st_size
    assert files["onnx"]["gzipped"] == pytest.approx(len(gzip.compress(path.read_bytes(), 6)), abs=20)
    dense = next(row for row in receipt["files"] if (row["of"], row["target"]) == ("dense", "onnx"))
    assert (receipt["ships"], receipt["bytes_share"]) == ("onnx", files["onnx"]["gzipped"] / dense["bytes"])
    assert files["onnx"]["gzipped_ratio"] < 0.5 < 0.95 < files["onnx"]["ratio"]
    assert receipt["compression"] == {"prune": "masks"}
    assert (receipt["warnings"], receipt["left_out"]) == ([], [])


def test_the_dense_net_is_timed_beside_it_and_every_row_has_a_verdict(pruned: Path) -> None:
    rows = read(pruned)["latency"]
    for batch in (1, 32):
        cell = {(row["of"], row["backend"]): row for row in rows if row["batch"] == batch}
        assert cell.keys() >= {
            ("this", "eager"),
            ("this", "onnx"),
            ("dense", "eager"),
            ("dense", "onnx"),
            ("dense", "compiled_bf16"),
        }
        for key, other in (("eager", "eager"), ("bf16", "compiled_bf16")):
            for name, row in cell.items():
                assert row[f"over_{key}"] == pytest.approx(row["median_ms"] / cell["dense", other]["median_ms"])
                assert row[f"beside_{key}"] in ("faster", "same", "slower") or name == ("dense", other)
    hardware = read(pruned)["hardware"]
    assert hardware["cpu"]["name"]
    assert read(pruned)["versions"]["torch"].startswith(torch.__version__.split("+")[0])


@pytest.mark.slow
def test_integers(tmp_path: Path) -> None:
    run_dir = trained(tmp_path, "compression=qat", "model.net.width=256", "model.net.depth=2")
    receipt, result = read(run_dir), json.loads((run_dir / "result.json").read_text())
    assert receipt["left_out"] == []
    metrics = {(row["backend"], row["split"]): row["figures"] for row in receipt["figures"] if row["of"] == "this"}
    assert metrics["eager", "test"]["accuracy"] == pytest.approx(result["test/accuracy"], abs=1e-7)
    path = exported(run_dir, "onnx_int8", tmp_path)
    assert metrics["onnx_int8", "test"]["accuracy"] == pytest.approx(by_onnx(path, run_dir), abs=1e-9)
    files = {(row["of"], row["target"]): row for row in receipt["files"]}
    assert files["this", "onnx_int8"]["bytes"] == path.stat().st_size
    assert files["this", "onnx_int8"]["ratio"] == path.stat().st_size / files["dense", "onnx"]["bytes"]
    assert files["this", "weights"]["ratio"] < 0.5
    assert all(layer["integer_sparsity"] is not None for layer in receipt["layers"])


@pytest.mark.slow
def test_channels(tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith("model")]
    cfg = new_run(
        tmp_path, *words, "model=resnet20", "model.net.depth=8", "model.net.width=8", "compression=prune_channels"
    )
    train(cfg)
    run_dir = Path(cfg["paths"]["run_dir"])
    receipt, state = read(run_dir), weights(run_dir, "best")
    task, cfg = inference.open_run_net(run_dir)
    x = torch.zeros(1, 1, 8, 8)
    assert receipt["size"]["macs"] == count_flops(task.net, x) // 2
    assert receipt["dense"]["size"]["macs"] == count_flops(instantiate(cfg["model"]["net"], "model.net"), x) // 2
    assert receipt["size"]["macs"] < 0.6 * receipt["dense"]["size"]["macs"]
    assert {row["name"]: row["shape"] for row in receipt["layers"]} == {
        name.removesuffix(".weight"): list(value.shape) for name, value in state.items() if value.dim() >= 2
    }
    assert receipt["structure"] == ["channels"]


def test_a_method_that_changed_nothing_says_so_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measured.EFFORTS, "quick", measured.Effort(batches=(1,), repeats=5, warmup=1))
    sentence = "compression=prune changed nothing: none of the weights is zero."
    # of fewer than 5,000 weights: none
    cfg = new_run(tmp_path, *SMALL, "compression=prune", "compression.prune.sparsity=0.0001")
    with pytest.warns(UserWarning, match="changed nothing"):
        train(cfg)
    run_dir = Path(cfg["paths"]["run_dir"])
    assert read(run_dir)["warnings"] == [sentence]
    assert f"**Warning: {sentence}**" in (run_dir / "receipt.md").read_text()


@pytest.mark.slow
def test_the_command_measures_any_finished_run(
    pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = trained(tmp_path, "model.net.width=64", "model.net.depth=2")
    monkeypatch.chdir(tmp_path)
    words = (f"run={pruned}", f"baseline={plain}", "effort=quick", "trainer.accelerator=cpu")
    assert in_process("scripts/receipt.py", *words) == 0
    receipt = read(pruned)
    assert receipt["baseline"] == str(plain)
    assert 0 < next(row["agreement"]["share"] for row in receipt["figures"] if row["agreement"]) <= 1
    assert receipt["findings"][0] in capfd.readouterr().out
