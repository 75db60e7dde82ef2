"""scripts/gpu_check.py: its lines are real commands, and the failure of one stops none of the others."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.runs import config

from lathe.verbs import gpu_check
from lathe.verbs.gpu_check import TRAINED, Line, command_of, repeat
from lathe.verbs.reproduce import project

SMALL = (
    "model=mlp,model.net.width=8,model.net.depth=1,data.image_size=4,trainer.max_steps=2,trainer.val_check_interval=2"
)


def request(**changes: Any) -> dict[str, Any]:
    return {**config(name="gpu_check"), "accelerator": "cpu", **changes}


@pytest.mark.slow
def test_every_line_that_trains_composes() -> None:
    for name in TRAINED:
        script, *words = shlex.split(command_of(name, request(accelerator="gpu"), ""))
        assert (script, config(*words)["trainer"]["accelerator"]) == ("train.py", "gpu"), name


def test_a_line_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    started = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    script.write_text(f"{started}; time.sleep(600)\n")
    line = Line("hangs", "python hangs.py")
    repeat(line, tmp_path, tmp_path / "runs", 0.8)  # returns once no process holds its output any more
    assert (line.outcome, line.said) == ("timed out", "no end within timeout=0.8 s")


def test_a_failing_line_never_stops_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ended(line: Line, root: Path, log_dir: Path, timeout: float) -> None:
        assert root == project("gpu_check.py")
        if line.name == "float32":
            line.outcome, line.said = "failed", "RuntimeError: a | b"
            return
        line.outcome, line.said = "works", "1 samples/s"
        (log_dir / "train" / "run").mkdir(parents=True)
        (log_dir / "train" / "run" / "result.json").write_text("{}")

    monkeypatch.setattr(gpu_check, "repeat", ended)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H100")
    names = ["onnx", "float32", "ema", "ddp", "evaluate"]
    assert gpu_check.gpu_check(request(only=names, output=str(tmp_path), accelerator="gpu")) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    lines = {line["name"]: line for line in found["lines"]}
    assert [line["outcome"] for line in lines.values()] == ["left out", "failed", "works", "left out", "works"]
    assert lines["onnx"]["said"] == "no line before it has left a run"
    assert lines["ddp"]["said"] == "takes 2 devices, and 1 is here"
    assert f"run={tmp_path / 'runs' / 'ema' / 'train' / 'run'}" in lines["evaluate"]["command"]
    page = (tmp_path / "results.md").read_text()
    assert "| float32 | failed | RuntimeError: a \\| b | 0 |" in page
    assert f"{lines['ema']['command']}   # ema" in page


@pytest.mark.slow
def test_lines_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real commands: one trains, and one on its run is refused with a message."""
    monkeypatch.chdir(tmp_path)
    asked = request(only=["bf16-mixed", "tensorrt"], overrides=SMALL.split(","), output="here", timeout=200)
    assert gpu_check.gpu_check(asked) == 0
    lines = json.loads((tmp_path / "here" / "results.json").read_text())["lines"]
    assert [line["outcome"] for line in lines] == ["works", "refused"]
    assert lines[0]["said"].endswith("test loss")
    assert "tensorrt can't be imported" in lines[1]["said"]
