"""The process that knows nothing of the net."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from support.commands import environment
from torch import nn

from lathe import export
from lathe.export import manifest


def probe(job: Path, **extra: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "lathe.export.probe", str(job)]
    return subprocess.run(line, capture_output=True, text=True, env=environment(**extra))


def test_it_answers_each_input(tmp_path: Path) -> None:
    folder, job = tmp_path / "onnx", tmp_path / "job"
    folder.mkdir()
    job.mkdir()
    net = nn.Linear(3, 2).eval()
    export.get("onnx").export(net, torch.zeros(2, 3), folder / "model.onnx")
    content = {
        "target": "onnx",
        "file": "model.onnx",
        "classes": None,
        "preprocess": None,
        "input": {"dtype": "float32", "shape": []},
        "output": {"shape": []},
    }
    manifest.write(folder, content, ["model.onnx"])
    (job / "job.json").write_text(json.dumps({"folder": str(folder), "threads": 1}))
    inputs = [torch.randn(n, 3) for n in range(1, 12)]  # more than ten: names of files are no numbers
    for number, x in enumerate(inputs):
        np.save(job / f"in_{number}.npy", x.numpy())
    done = probe(job, PYTHONPROFILEIMPORTTIME="1")  # which lists what is imported
    assert done.returncode == 0, done.stderr
    assert "onnxruntime" in done.stderr
    assert "lightning" not in done.stderr  # seconds of each start
    for number, x in enumerate(inputs):
        torch.testing.assert_close(
            torch.from_numpy(np.load(job / f"out_{number}.npy")), net(x).detach(), rtol=0, atol=1e-6
        )
