"""Every reader of data gets the batches of training, after all hooks of loaders and modules."""

import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from data.test_foreign import OWN
from lightning.pytorch import LightningModule
from support.marked_data import ALL, SEEN, MarkedData
from support.runs import ROOT, config

from lathe import export, trust
from lathe.data import ImageDataModule
from lathe.data.digits import Digits
from lathe.data.external import share
from lathe.data.transfer import train_batches
from lathe.receipt import measured
from lathe.runs import rundir
from lathe.runs.rundir import RunDir
from lathe.training.train import train

WORDS = (*OWN, "model.net._target_=support.marked_data.Recording", "model.net.depth=2", "trainer.max_epochs=1")
pytestmark = [
    pytest.mark.filterwarnings("ignore:data. train_dataloader stays as it is"),
    pytest.mark.filterwarnings("ignore:.*is no better than its student"),
]
CHANNELS = ("min_channels=1", "round_to=1")


def trained(folder: Path, *words: str) -> RunDir:
    cfg = config(*WORDS, *words, f"paths.log_dir={folder}")
    cfg["data"] = {"_target_": "support.marked_data.MarkedData"}
    cfg["optimizer"]["batch_size"] = None
    rundir.create(folder, cfg, [])
    trust.allow({"trusted": ["support"]})
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained(tmp_path_factory.mktemp("logs"))


@pytest.fixture(autouse=True)
def _fresh(run: RunDir) -> None:
    trust.allow({"trusted": ["support"]})
    SEEN.clear()


METHODS = {
    "prune_channels": [
        f"compression.prune_channels.{word}" for word in (*CHANNELS, "importance=taylor", "mode=one_shot")
    ],
    "ptq_static": [],
    "distill": ["compression.distill.teacher={run}"],
}


@pytest.mark.parametrize("method", METHODS)
def test_training_with_a_method_sees_every_hook(tmp_path: Path, run: RunDir, method: str) -> None:
    words = (word.format(run=run.path) for word in METHODS[method])
    trained(tmp_path, f"compression={method}", "compression.receipt=none", *words)
    assert set(SEEN) == {ALL}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("evaluate", ["split=train"]),
        ("sensitivity", []),
        ("profile", ["steps=2", "warmup=1"]),
        ("receipt", ["effort=quick"]),
        ("compress", ["compression=ptq_static", "compression.receipt=none"]),
    ],
)
def test_a_command_sees_every_hook(
    tmp_path: Path, run: RunDir, script: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(measured.EFFORTS, "quick", measured.Effort(repeats=5, warmup=1, seconds=1.0))
    monkeypatch.setattr(
        type(export.get("onnx")),
        "available",
        lambda self: None if self.integers else "left out here, where it takes most of the time",
    )
    monkeypatch.chdir(tmp_path)
    options = [f"run={run.path}", "trusted=[support]", "trainer.accelerator=cpu", *words]
    monkeypatch.setattr(sys, "argv", [script, *options])
    with torch.compiler.set_stance("force_eager"), suppress(SystemExit):
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
    assert set(SEEN) == {ALL}


class Hooked(LightningModule):
    """A module whose first hook is not called, as the data module overrides it."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        raise AssertionError("the data module's is called")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0] + 100 * self.trainer.training, "trainer": self.trainer}


class Images(ImageDataModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 0, batch[1]


def test_hooks_of_both_modules_know_the_stage_and_keep_no_trainer() -> None:
    data = Images(Digits(), 10, 1, 8, [0.3], [0.3], batch_size=64)
    module = Hooked()
    vars(data)["reads_for"] = module
    assert next(iter(data.val_dataloader()))[0].any()
    assert {value for batch in data.eval_loader("val") for value in batch["x"].unique().tolist()} == {0.0}
    assert {value for batch in train_batches(data) for value in batch["x"].unique().tolist()} == {100.0}
    assert data.trainer is None
    assert module._trainer is None


def test_a_plain_data_module_is_read_in_its_stages() -> None:
    data: Any = MarkedData(n=16)
    share(data, seed=0)
    for split, batches in {
        "train": train_batches(data),
        "val": data.eval_loader("val"),
        "test": data.eval_loader("test"),
    }.items():
        data.stages.clear()
        assert {value for x, _ in batches for value in x.int().unique().tolist()} == {ALL}
        assert data.stages == {split}
