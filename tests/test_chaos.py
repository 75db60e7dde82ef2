"""scripts/chaos.py: killed runs equal uninterrupted ones, and differences are detected."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import environment
from support.runs import ROOT

pytestmark = pytest.mark.law3

chaos = runpy.run_path(str(ROOT / "scripts" / "chaos.py"), run_name="chaos")


@pytest.mark.slow
def test_a_case(tmp_path: Path) -> None:
    words = ["--n", "1", "--variants", "async", "--seed", "3"]
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^seed 3: 1 of 1 equal after [1-9] deaths; torch ", done.stdout, flags=re.MULTILINE)


def test_a_name_that_is_no_variant_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--variants", "mlp,nosuch"])
    with pytest.raises(SystemExit):
        chaos["main"]()
    assert "--variants nosuch: choose from mlp, resnet" in capsys.readouterr().err
