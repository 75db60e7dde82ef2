"""The example of docs/data.md trains as printed."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from support.runs import ROOT, SMALL, new_run

from lathe.training.train import train


def test_the_dataset_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "data.md").read_text().split("## A dataset of torch or Hugging Face")[1]
    code = re.findall(r"^```python\n# src/(\S+)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)[0]
    (tmp_path / code[0]).parent.mkdir()
    (tmp_path / code[0]).write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    command = re.findall(r"^python train.py (data=dataset .*)$", page, flags=re.MULTILINE)[0]
    small = [word for word in SMALL if word != "model=mlp"]
    try:
        assert train(new_run(tmp_path, *shlex.split(command), *small))["test/accuracy"] > 0.9
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == Path(code[0]).parts[0]]:
            del sys.modules[name]  # other tests have packages of the same name
