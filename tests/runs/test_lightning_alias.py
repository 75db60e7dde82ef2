"""A package that imports `pytorch_lightning` gets the classes of `lightning.pytorch`."""

import subprocess
import sys
from pathlib import Path

PACKAGE = """
import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping


class Data(pl.LightningDataModule):
    pass
"""
LOOK = """
import lightning.pytorch
from lathe.runs.build import alias_pytorch_lightning

alias_pytorch_lightning()
import older

assert issubclass(older.Data, lightning.pytorch.LightningDataModule)
assert older.EarlyStopping is lightning.pytorch.callbacks.EarlyStopping
assert lightning.pytorch.__spec__.name == "lightning.pytorch"
"""


def test_both_names_are_the_same_classes(tmp_path: Path) -> None:
    (tmp_path / "older.py").write_text(PACKAGE)
    done = subprocess.run([sys.executable, "-c", LOOK], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pytorch_lightning is imported as lightning.pytorch") == 1
