"""Exports of a run on the device, their receipts, and the server."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu import CONVOLUTIONS, Acceptance
from support.runs import config
from support.server_process import BINARY, Served

from lathe import export
from lathe.export.torch_runner import DEVICES
from lathe.receipt import measured
from lathe.serving import model
from lathe.serving.batcher import Batcher, launch
from lathe.serving.options import read
from lathe.verbs.load import Run

HELD = 2e-4  # of the largest logit, with float32 on both sides


@pytest.fixture(autouse=True)
def _quick(gpu: Acceptance, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable compilation and shorten measurements on a stand-in."""
    few = measured.Effort(batches=(1,), repeats=5, warmup=1, seconds=1.0)
    monkeypatch.setitem(measured.EFFORTS, "quick", measured.EFFORTS["quick"] if gpu.real else few)
    full = replace(measured.EFFORTS["full"], batches=(8,), repeats=20, seconds=5.0)
    monkeypatch.setitem(measured.EFFORTS, "full", full)
    with nullcontext() if gpu.real else torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def run(gpu: Acceptance) -> Run:
    return gpu.train(*CONVOLUTIONS, "trainer.max_steps=8")


def pixels() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (8, 1, 8, 8), dtype=np.uint8)


def shipped(gpu: Acceptance, run: Run, target: str, *options: str) -> Path:
    """Return the folder of an export, which is made if it is missing or options are given."""
    folder = run.dir / "exports" / target
    if options or not folder.is_dir():
        assert not gpu.script("export", f"run={run.dir}", f"target={target}", *options)
    return folder


def test_onnx_on_the_cuda_provider(gpu: Acceptance, run: Run) -> None:
    import onnxruntime

    provider = "CUDAExecutionProvider" if gpu.real else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider: pip install onnxruntime-gpu in its place")
    file = shipped(gpu, run, "onnx") / "model.onnx"
    session = onnxruntime.InferenceSession(str(file), providers=[provider])
    assert session.get_providers()[0] == provider
    found = session.run(None, {"input": pixels()})[0]
    wanted = export.get("onnx").load(file)(pixels())
    np.testing.assert_allclose(found, wanted, atol=HELD * float(np.abs(wanted).max()))


@pytest.mark.stand_in(why="TensorRT builds for NVIDIA's GPUs alone")
@pytest.mark.parametrize("options", ["", "half=true", "through=torch_tensorrt"])
def test_tensorrt(gpu: Acceptance, run: Run, options: str) -> None:
    sentence = export.get("tensorrt").available()
    if sentence:
        pytest.skip(sentence)
    words = [f"target.tensorrt.{options}"] if options else []
    report = json.loads((shipped(gpu, run, "tensorrt", *words) / "parity.json").read_text())
    assert report["held_out"]["relative"] <= report["tolerance"]


@pytest.mark.stand_in(why="TensorRT builds for NVIDIA's GPUs alone")
def test_integers_in_tensorrt(gpu: Acceptance) -> None:
    sentence = export.get("tensorrt").available()
    if sentence:
        pytest.skip(sentence)
    quantized = gpu.train(*CONVOLUTIONS, "compression=qat", "compression.qat.activation_bits=7")
    report = json.loads((shipped(gpu, quantized, "tensorrt") / "parity.json").read_text())
    assert report["arithmetic"] == "int8"
    assert report["held_out"]["relative"] <= report["tolerance"]


def test_a_receipt_has_rows_of_the_device(gpu: Acceptance, run: Run) -> None:
    assert not gpu.script("receipt", f"run={run.dir}", "effort=quick", f"trainer.accelerator={gpu.accelerator}")
    found = json.loads((run.dir / "receipt.json").read_text())
    devices = {row["device"] for row in found["latency"]}
    assert gpu.device.type in {device.partition(":")[0] for device in devices}
    gpu_facts = found["hardware"]["gpu"]
    assert (gpu_facts is not None) is gpu.real
    if gpu.real:
        assert gpu_facts["name"] == torch.cuda.get_device_name()
        assert "GPU" in (run.dir / "receipt.md").read_text()


@pytest.mark.stand_in(why="tests/export compile on a CPU")
def test_aot_inductor(gpu: Acceptance, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gpu.real:
        monkeypatch.setitem(DEVICES, "cuda", gpu.device)
    sentence = export.get("aot_inductor", device="cuda").available()
    if sentence:
        pytest.skip(sentence)
    folder = shipped(gpu, run, "aot_inductor", "target.aot_inductor.device=cuda")
    report = json.loads((folder / "parity.json").read_text())
    assert report["held_out"]["relative"] <= report["tolerance"]
    made_for = json.loads((folder / "manifest.json").read_text())["compiled_for"]
    assert made_for["device"] == gpu.device.type
    if gpu.real:
        assert made_for["name"] == torch.cuda.get_device_name()
        assert made_for["compute_capability"] == "{}.{}".format(*torch.cuda.get_device_capability())
    words = ["targets=[aot_inductor]", "batches=[8]", "threads=1", "seconds=1", "rounds=5", f"output={tmp_path}"]
    assert not gpu.script("benchmark", "suite=inference", f"run={run.dir}", *words)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["device"] for row in rows if row["backend"] == "aot_inductor"] == [gpu.device.type]


@pytest.mark.stand_in(why="a receipt has no rows of a stand-in")
def test_a_receipt_times_what_is_compiled_for_the_device(gpu: Acceptance, run: Run) -> None:
    assert not gpu.script("receipt", f"run={run.dir}", "effort=full", f"trainer.accelerator={gpu.accelerator}")
    found = json.loads((run.dir / "receipt.json").read_text())
    assert ("aot_inductor", "cuda") in {(row["backend"], row["device"]) for row in found["latency"]}


def test_inference_suite(gpu: Acceptance, run: Run, tmp_path: Path) -> None:
    shipped(gpu, run, "onnx")
    words = ["targets=[onnx]", "batches=[8]", "threads=1", "seconds=1", "rounds=5", f"output={tmp_path}"]
    assert not gpu.script("benchmark", "suite=inference", f"run={run.dir}", *words)
    assert "onnx" in (tmp_path / "results.md").read_text()


@pytest.mark.stand_in(why="suite=gpu asks for a GPU")
def test_gpu_suite(gpu: Acceptance, tmp_path: Path) -> None:
    """gpt2_small and resnet50 at their full sizes in every format, for a few steps."""
    words = ["strategies=[]", "rounds=1", "steps=3", "warmup=2", "timeout=120", f"output={tmp_path}"]
    assert not gpu.script("benchmark", "suite=gpu", *words)
    cases = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert len(cases) == 8
    assert all(case["rounds"][0]["step_ms"] > 0 and case["rounds"][0]["peak"] > 0 for case in cases)


@pytest.mark.stand_in(why="tests/serving has a server on a CPU")
@pytest.mark.parametrize("target", ["module", "torch_export", "onnx"])
def test_workers_of_a_server_compute_on_devices(gpu: Acceptance, run: Run, target: str) -> None:
    """Shared batches in a process for each device, with the answers of the module on the CPU."""
    if (
        target == "onnx"
        and gpu.real
        and "CUDAExecutionProvider" not in pytest.importorskip("onnxruntime").get_available_providers()
    ):
        pytest.skip("this onnxruntime has no CUDA provider: pip install onnxruntime-gpu in its place")
    if target != "module":
        shipped(gpu, run, target)
    asked = {**config(f"run={run.dir}", "max_batch_size=8", name="serve"), "export": target}
    places = tuple(f"cuda:{index}" if gpu.real else "cpu" for index in range(gpu.count))
    options = replace(read(asked, str(run.dir)), workers=len(places), devices=places)
    facts = model.describe(options.run, target, options.checkpoint)

    async def answers() -> list[Any]:
        engine = Batcher(partial(launch, options=options, facts=facts), options)
        try:
            await engine.start()
            assert engine.ready == len(places)
            return await asyncio.gather(*(engine.predict(pixels()[index % 8 :][:1], 60) for index in range(40)))
        finally:
            await engine.stop()

    wanted = model.load(options.run, "module", options.checkpoint, 1)(pixels())
    for index, found in enumerate(asyncio.run(answers())):
        np.testing.assert_allclose(found[0], wanted[index % 8], atol=HELD * float(np.abs(wanted).max()))


@pytest.mark.stand_in(why="the real command looks for GPUs itself")
def test_a_server_on_the_gpus(gpu: Acceptance, run: Run) -> None:
    with Served(run.dir, "target=module", "trainer.accelerator=gpu") as server:
        assert "on cuda:0" in server.ready
        about = server.ask("GET", "/info").json["server"]
        assert about["devices"] == [f"cuda:{index}" for index in range(gpu.count)]
        answer = server.ask("POST", "/predict", bytes(64), content_type=BINARY, accept=BINARY)
        wanted = model.load(str(run.dir), "module", "best", 1)(np.zeros((1, 1, 8, 8), np.uint8))
        found = np.frombuffer(answer.body, "<f4")
        np.testing.assert_allclose(found, wanted[0], atol=HELD * float(np.abs(wanted).max()))
