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


def test_both_names_are_the_same_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if not k.startswith("pytorch_lightning")})
    (tmp_path / "older.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    alias_pytorch_lightning()
    older = importlib.import_module("older")
    assert issubclass(older.Data, lightning.pytorch.LightningDataModule)
    assert older.EarlyStopping is lightning.pytorch.callbacks.EarlyStopping
