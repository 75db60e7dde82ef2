"""Runtimes of a finished run side by side. Compiled forms run eagerly, as compilers take longer than these nets."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from suites import cases, inference
from suites.inference import winners
from support.runs import SMALL, config, new_run

from lathe import export
from lathe.export.bundle import read_manifest, write_manifest
from lathe.files import sha256
from lathe.receipt import measured, write
from lathe.runs.checkpoints import KEY
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.export import make, ready_for

MODULES = {"eager", "eager_bf16", "compiled_fp32", "compiled_bf16"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(measured.EFFORTS, "quick", measured.Effort(batches=(1,), repeats=5, warmup=1, seconds=1.0))
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL)
    train(cfg)
    return Path(cfg["paths"]["run_dir"])


@pytest.fixture(scope="module")
def file(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the run to onnx."""
    folder = tmp_path_factory.mktemp("onnx")
    with torch.no_grad():
        facts = make(ready_for("onnx", {}, trained), "onnx", {}, folder)
    (folder / "parity.json").write_text(json.dumps({"arithmetic": "float32"}))
    write_manifest(folder, facts)
    return folder


@pytest.fixture
def run(trained: Path, file: Path, tmp_path: Path) -> RunDir:
    """The run with that export."""
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(file, tmp_path / "run" / "exports" / "onnx")
    return RunDir(tmp_path / "run")


def request(run: RunDir, *targets: str, **changes: Any) -> dict[str, Any]:
    overrides = (f"targets=[{','.join(targets)}]", "batches=[1,4]", "threads=1", "rounds=5", "warmup=1")
    return cases.fill({**config("suite=inference", f"run={run.path}", *overrides, name="benchmark"), **changes})


def compare(run: RunDir, *targets: str, **changes: Any) -> dict[str, Any]:
    group = config(f"run={run.path}", f"target=[{','.join(targets)}]", name="export")["target"]
    return inference.compare(request(run, *targets, **changes), group, run.path.parent / "out")


def test_an_export_is_measured_with_the_module(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.path / "exports" / "onnx" / "model.onnx"
    threads, random, before = torch.get_num_threads(), torch.get_rng_state(), sha256(file)
    found = compare(run, "onnx")
    assert (torch.get_num_threads(), torch.equal(torch.get_rng_state(), random)) == (threads, True)
    assert {(row["backend"], row["batch"], row["threads"]) for row in found["rows"]} == {
        (name, batch, 1) for name in MODULES | {"onnx"} for batch in (1, 4)
    }
    assert found["left_out"] == []
    for row in found["rows"]:
        assert row["n"] == 5
        assert row["samples_per_s"] == pytest.approx(row["batch"] / row["median_ms"] * 1e3)
        eager = next(r for r in found["rows"] if (r["backend"], r["batch"]) == ("eager", row["batch"]))
        assert row["over_eager"] == pytest.approx(row["median_ms"] / eager["median_ms"])
        shipped = ("shipped", file.stat().st_size)
        assert (row["source"], row["bytes"]) == (shipped if row["backend"] == "onnx" else ("module", None))
        assert row["arithmetic"] == ("bfloat16" if "bf16" in row["backend"] else "float32")
    assert [(cell["batch"], cell["threads"]) for cell in found["winners"]] == [(1, 1), (4, 1)]
    assert found["checkpoint"]["step"] == run.result["best_step"]
    assert found["hardware"]["cpu"]["name"]
    assert found["versions"]["torch"] in torch.__version__
    output = run.path.parent / "out"
    written = json.loads((output / "results.json").read_text())
    assert {key: written[key] for key in found} == found
    text = (output / "results.md").read_text()
    assert text in capsys.readouterr().out
    assert all(cell["sentence"] in text for cell in found["winners"])
    assert (output / "plot.svg").read_text().count("<svg") == 2
    assert sha256(file) == before
    assert not (run.path / "receipt.json").exists()


def test_stale_exports_are_made_again_and_missing_or_wrong_ones_are_listed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = "no C++ compiler was found: install g++."
    monkeypatch.setattr(type(export.get("aot_inductor")), "available", lambda self: compiler)
    stale = run.path / "exports" / "onnx"
    content = read_manifest(stale)
    content.pop("files")
    write_manifest(stale, {**content, "checkpoint": "last"})
    shutil.copytree(run.path / "exports" / "onnx", run.path / "exports" / "onnx_int8")
    (run.path / "exports" / "onnx_int8" / "model.onnx").write_bytes(b"tampered")
    group = {**config(f"run={run.path}", "target=[onnx,onnx_int8]", name="export")["target"], "aot_inductor": {}}
    found = inference.compare(request(run, "onnx", "onnx_int8"), group, run.path.parent / "out")
    sources = {row["backend"]: row["source"] for row in found["rows"]}
    assert sources == {**dict.fromkeys(MODULES, "module"), "onnx": "made"}
    reasons = {entry["form"]: entry["reason"] for entry in found["left_out"]}
    assert reasons["aot_inductor"] == compiler
    assert "is not the file that was exported, its SHA-256 differs" in reasons["onnx_int8"]
    assert "onnx was made again: exports/onnx is of last.ckpt." in found["notes"]
    assert sorted(path.name for path in (run.path / "exports").iterdir()) == ["onnx", "onnx_int8"]


def test_a_file_that_computes_something_else_is_not_timed(run: RunDir) -> None:
    """As of an earlier version, whose manifest does not name the checkpoint."""
    folder = run.path / "exports" / "onnx"
    content = read_manifest(folder)
    content.pop("files")
    write_manifest(folder, {key: value for key, value in content.items() if key != KEY})
    state = torch.load(run.best, weights_only=True)
    state["state_dict"]["head.weight"] = state["state_dict"]["head.weight"].flip(0)
    torch.save(state, run.best)
    found = compare(run, "onnx")
    assert {row["backend"] for row in found["rows"]} == MODULES
    (entry,) = found["left_out"]
    assert entry["form"] == "onnx"
    assert entry["reason"].startswith("wrong: its logits differ ")


def test_the_receipt_gets_it_and_keeps_it_while_the_weights_are_the_same(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_onnx = lambda self: None if self.integers else "target=onnx needs a package: pip install it."  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(type(export.get("onnx")), "available", found_onnx)
        before = write(run, run.config, None, "quick")
    found = compare(run, "onnx")
    after = json.loads((run.path / "receipt.json").read_text())
    assert after == {**before, "inference": found}
    page = (run.path / "receipt.md").read_text()
    assert "## Runtimes" in page
    assert found["winners"][0]["sentence"] in page
    with monkeypatch.context() as patch:
        patch.setattr(type(export.get("onnx")), "available", found_onnx)
        write(run, run.config, None, "quick")
        assert json.loads((run.path / "receipt.json").read_text())["inference"] == found
        state = torch.load(run.best, weights_only=True)
        state["state_dict"]["head.bias"] += 1
        torch.save(state, run.best)
        write(run, run.config, None, "quick")
    assert "inference" not in json.loads((run.path / "receipt.json").read_text())
    assert "## Runtimes" not in (run.path / "receipt.md").read_text()


@pytest.mark.slow
def test_integers_are_compared_with_the_net_that_simulates_them(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL, "compression=qat", "compression.receipt=none", "compression.qat.start=0")
    train(cfg)
    found = compare(RunDir(cfg["paths"]["run_dir"]), "onnx_int8")
    assert found["left_out"] == []
    assert {row["arithmetic"] for row in found["rows"] if row["backend"] == "onnx_int8"} == {"int8"}


def row(backend: str, median: float, spread: float = 0.0, size: int | None = None) -> dict[str, Any]:
    times = {"median_ms": median, "p10_ms": median - spread, "p90_ms": median + spread, "n": 9}
    return {"backend": backend, "batch": 1, "threads": 2, **times, "over_eager": median / 2, "bytes": size}


def test_overlapping_ranges_have_no_winner_and_the_fastest_file_is_named() -> None:
    rows = [row("eager", 2.0), row("onnx", 1.0, spread=0.1, size=9), row("torchscript", 1.1, spread=0.1, size=9)]
    (found,) = winners(rows)
    assert (found["winner"], found["fastest"], found["same"]) == (None, "onnx", ["torchscript"])
    (found,) = winners([row("compiled_bf16", 0.5), row("onnx", 1.0, size=9), row("eager", 2.0)])
    assert (found["winner"], found["file"]) == ("compiled_bf16", "onnx")
