"""A package that imports `pytorch_lightning` gets the classes of `lightning.pytorch`."""

import importlib
import sys
from pathlib import Path

import lightning.pytorch
import pytest

from lathe.runs.build import alias_pytorch_lightning

PACKAGE = """
import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping


class Data(pl.LightningDataModule):
    pass
"""


def test_both_names_are_the_same_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pytorch_lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if type(one).__name__ != "_Alias"])
    (tmp_path / "older.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    alias_pytorch_lightning()
    alias_pytorch_lightning()  # once is enough
    older = importlib.import_module("older")
    assert issubclass(older.Data, lightning.pytorch.LightningDataModule)
    assert older.EarlyStopping is lightning.pytorch.callbacks.EarlyStopping
    assert lightning.pytorch.__spec__.name == "lightning.pytorch"
    assert capsys.readouterr().out.count("pytorch_lightning is imported as lightning.pytorch") == 1
