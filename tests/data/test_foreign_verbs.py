"""Commands on a run of a plain LightningDataModule work, or name the data facts that they need."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.test_foreign import OWN
from lightning.pytorch import LightningDataModule
from support.own_parts import Table
from support.runs import ROOT, config
from torch.utils.data import DataLoader

from lathe import trust
from lathe.errors import UserError
from lathe.runs import rundir
from lathe.runs.export_model import open_export_model
from lathe.runs.rundir import RunDir
from lathe.training.train import train

IMAGES = {"channels": 1, "image_size": 4, "mean": [0.5], "std": [0.5], "num_classes": 2}
Call = Callable[..., tuple[int, str, str]]


class Staged(Table):
    """Opens each split in its stage, as in Lightning's tutorials, and accepts facts that it does not use."""

    def __init__(
        self, num_classes: int = 2, channels: int = 1, image_size: int = 4, mean: Any = None, std: Any = None
    ) -> None:
        super().__init__()

    def setup(self, stage: str) -> None:
        for name in {"fit": ("train", "val"), "test": ("test",)}.get(stage, ()):
            setattr(self, name, self.held_out)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 16, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 10)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test, 10)


class Untested(Table):
    test_dataloader: Any = LightningDataModule.test_dataloader


class Untrained(Table):
    train_dataloader: Any = LightningDataModule.train_dataloader


@pytest.mark.parametrize(("name", "loader"), [("Untested", "test_dataloader"), ("Untrained", "train_dataloader")])
def test_a_missing_loader_is_refused_before_training(tmp_path: Path, name: str, loader: str) -> None:
    cfg = config(*OWN, f"paths.log_dir={tmp_path}")
    cfg["data"] = {"_target_": f"data.test_foreign_verbs.{name}"}
    cfg["optimizer"]["batch_size"] = None
    run = rundir.create(tmp_path, cfg, [])
    with pytest.raises(UserError, match=f"data: {name} has no {loader}: write one"):
        train(cfg)
    assert not (run.path / "metrics.csv").exists()


def made(folder: Path, **facts: Any) -> RunDir:
    cfg = config(*OWN, "trainer.max_epochs=1", f"paths.log_dir={folder}")
    cfg["data"] = {"_target_": "data.test_foreign_verbs.Staged", **facts}
    cfg["optimizer"]["batch_size"] = None
    rundir.create(folder, cfg, [])
    trust.allow({"trusted": ["data"]})
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return made(tmp_path_factory.mktemp("logs"))


@pytest.fixture(autouse=True)
def _trusted() -> None:
    trust.allow({"trusted": ["data"]})


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a script's main in this process: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "images.npy", np.zeros((3, 4, 4), np.uint8))

    def call(script: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script, *words, "trusted=[data]"])
        code = 0
        try:
            runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capfd.readouterr()

    return call


def test_each_split_is_evaluated_in_whichever_stage_it_is_opened(verb: Call, run: RunDir) -> None:
    for split in ("train", "val", "test"):
        code, _, errors = verb("evaluate", f"run={run.path}", f"split={split}", f"output={split}.json")
        assert code == 0, errors
        found = json.loads(Path(f"{split}.json").read_text())
        assert {name.partition("/")[0] for name in found} == {split}
        if split != "train":
            assert found[f"{split}/loss"] == pytest.approx(run.result[f"{split}/loss"], rel=1e-6)


def test_verbs_that_need_facts_name_them(run: RunDir, verb: Call) -> None:
    for script, words in {"export": ["target=onnx"], "predict": ["input=images.npy", "output=out.csv"]}.items():
        code, _, errors = verb(script, f"run={run.path}", *words)
        assert (code, errors.count("\n")) == (1, 1), errors
        assert "its data declare neither channels, image_size, mean, std, num_classes" in errors


def test_with_its_facts_it_ships_and_predicts(tmp_path: Path, verb: Call) -> None:
    run = made(tmp_path / "logs", **IMAGES)
    ready = open_export_model(run.path)
    pixels = torch.randint(0, 256, (2, 1, 4, 4), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.allclose(ready.net(pixels), ready.trained((pixels / 255 - 0.5) / 0.5), atol=1e-5)
    code, _, errors = verb(
        "predict", f"run={run.path}", "input=images.npy", "output=out.csv", "trainer.accelerator=cpu"
    )
    assert code == 0, errors
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 4
