"""Where trainer.accelerator=auto chose, one line at the start says what it took; where the user chose, none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import SMALL, new_run

from lathe.training.train import train
from lathe.training.trainer_setup import describe_device


def trainer_on(device: str, processes: int = 1) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), world_size=processes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
def test_a_run_says_what_auto_took(accelerator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(new_run(tmp_path, *SMALL, f"trainer.accelerator={accelerator}", "trainer.max_steps=2"))
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainer.accelerator=")]
    assert len(told) == (1 if accelerator == "auto" else 0)
    assert all(line.startswith(f"trainer.accelerator=auto took the CPU: torch {torch.__version__} ") for line in told)


def test_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Model {device.index}")
    assert describe_device(trainer_on("cuda:1")) == "trainer.accelerator=auto took cuda:1, Model 1."
    assert describe_device(trainer_on("cuda:0", 4)) == "trainer.accelerator=auto took 4 x Model 0."
    assert describe_device(trainer_on("mps")) == "trainer.accelerator=auto took mps, Apple's GPU."
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert describe_device(trainer_on("cpu")).endswith(" is built without GPU support.")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert describe_device(trainer_on("cpu")).endswith(" sees no GPU.")
