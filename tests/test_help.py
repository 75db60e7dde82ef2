"""--help, --cfg job and a bad override answer without importing torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import environment, run
from support.runs import ROOT

from lathe import help as help_page


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--cfg", "job"), ("optimizer.lrr=1",), ("model=resnet21",), ("optimizer.lr=fast",)], ids=str
)
def test_torch_is_not_imported(arguments: tuple[str, ...], tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *arguments]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "hydra" in imported, "the list of imports has to be there"
    assert not imported & {"torch", "lightning", "numpy", "lightning.pytorch"}


@pytest.mark.parametrize("script", ["train.py", "scripts/evaluate.py", "scripts/predict.py"])
def test_help_lists_the_choices_and_keys(script: str, tmp_path: Path) -> None:
    done = run("--help", script=script, cwd=tmp_path)
    assert done.returncode == 0
    assert "32-true, 64-true" in done.stdout
    assert ("resnet18, resnet20" in done.stdout) == (script == "train.py")
    assert ("run: ???" in done.stdout) == (script != "train.py")
    assert list(tmp_path.iterdir()) == []


def test_root_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py")])
    assert {"model", "optimizer", "seed", "resume"} <= set(help_page.root_names())
    monkeypatch.setattr(sys, "argv", ["/nowhere/at/train.py"])  # as where a wheel is installed
    assert {"model", "optimizer", "seed", "resume"} <= set(help_page.root_names())
    monkeypatch.setattr(sys, "argv", ["/nowhere/at/all.py"])
    assert help_page.root_names() == {}
