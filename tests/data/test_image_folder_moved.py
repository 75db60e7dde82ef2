"""A run on a moved folder of images. Some commands need only the run directory, the others take the new folder."""

import csv
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from support.commands import check, in_process
from support.commands import run as command
from support.interruptions import kill_when, same
from support.pictures import pictures
from support.runs import SMALL, new_run, runs

from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs import export_parity as parity
from lathe.verbs.load import load

NAMES = ["cat", "dog", "fox"]
QUIET = ("trainer.accelerator=cpu", "trainer.enable_progress_bar=false")


def words(folder: Path) -> list[str]:
    """Overrides for data from a folder."""
    return ["data=image_folder", f"data.folder={folder}", "data.image_size=8"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose folder, `photos`, is now at `elsewhere`."""
    folder = pictures(tmp_path / "photos", dict.fromkeys(NAMES, 20))
    given = [*SMALL, *words(folder), "data.batch_size=8", f"paths.data_dir={tmp_path / 'data'}"]
    cfg = new_run(tmp_path / "logs", *given)
    train(cfg)
    folder.rename(tmp_path / "elsewhere")
    return RunDir(cfg["paths"]["run_dir"])


def test_it_predicts_without_the_folder(run: RunDir, tmp_path: Path) -> None:
    pictures(tmp_path / "new", {"some": 4}, seed=1)
    for source, count in {tmp_path / "new" / "some": 4, tmp_path / "new" / "some" / "002.png": 1}.items():
        request = [f"run={run.path}", f"input={source}", f"output={tmp_path / 'out.csv'}", "resize=true", *QUIET]
        assert in_process("scripts/predict.py", *request) == 0
        with open(tmp_path / "out.csv", newline="") as file:
            lines = list(csv.DictReader(file))
        assert [line["image"] for line in lines] == [f"{n:03}.png" for n in (range(4) if count == 4 else [2])]
        found = load(run.path).predict(source, resize=True)
        assert found.classes == [line["class"] for line in lines] == [NAMES[index] for index in found.prediction]
    assert len(load(run.path).predict(np.zeros((3, 3, 8, 8), np.uint8))) == 3


def test_commands_take_the_new_folder(run: RunDir, tmp_path: Path) -> None:
    """The same metrics as before, of the net and a compressed one; no trace of the old path in the outputs."""
    moved = f"data.folder={tmp_path / 'elsewhere'}"
    output = tmp_path / "metrics.json"
    request = [f"run={run.path}", f"output={output}", *QUIET]
    assert in_process("scripts/evaluate.py", *request, moved) == 0
    assert json.loads(output.read_text()) == pytest.approx({k: run.result[k] for k in ("test/accuracy", "test/loss")})
    found = load(run.path, folder=tmp_path / "elsewhere").datamodule
    assert len(found.test_dataloader()) == 1
    compress = ["compression=prune", "compression.receipt=none", "compression.prune.criterion=magnitude", QUIET[0]]
    assert in_process("scripts/compress.py", f"run={run.path}", moved, *compress) == 0
    smaller = runs(tmp_path / "logs")[-1]
    assert json.loads((smaller / "result.json").read_text())["source/test/loss"] == run.result["test/loss"]
    assert in_process("scripts/evaluate.py", f"run={smaller}", *QUIET) == 0


def test_a_run_continues_with_the_new_folder(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = run.result["steps"]
    longer = [f"resume={run.path}", "trainer.max_epochs=3", "data=image_folder"]
    assert in_process("train.py", *longer, f"data.folder={tmp_path / 'elsewhere'}") == 0
    assert run.result["steps"] == steps * 3 // 2
    assert run.config["data"]["folder"] == run.config["data"]["source"]["folder"] == str(tmp_path / "elsewhere")
    assert len(load(run.path).datamodule.train_dataloader()) == 6
    pictures(tmp_path / "other", dict.fromkeys(NAMES, 20), seed=2)
    capsys.readouterr()
    assert in_process("train.py", *longer, f"data.folder={tmp_path / 'other'}") == 1
    assert (
        f"the command changes data.folder: {tmp_path / 'elsewhere'} -> {tmp_path / 'other'}" in capsys.readouterr().err
    )
    (tmp_path / "elsewhere" / "fox").rename(tmp_path / "elsewhere" / "elk")
    capsys.readouterr()
    for place, said in {
        "elsewhere": "elk more and fox less",
        "nowhere": f"data.folder={tmp_path / 'nowhere'} is not a folder",
    }.items():
        assert in_process("scripts/evaluate.py", f"run={run.path}", f"data.folder={tmp_path / place}", *QUIET) == 1
        assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["resident", "workers"])
def test_a_killed_run_continues_with_the_same_bits_where_its_images_are_now(tmp_path: Path, loader: str) -> None:
    folder = pictures(tmp_path / "photos", dict.fromkeys(NAMES, 100))
    given = [*words(folder), *QUIET, "trainer.enable_model_summary=false", "model=mlp", "model.net.width=32"]
    given += [f"data.loader={loader}", "data.batch_size=8", "data.source.test_share=0.2", f"paths.data_dir={tmp_path}"]
    given += ["trainer.max_epochs=8", "trainer.log_every_n_steps=1", "callbacks.checkpoint.every_n_train_steps=4"]
    given += ["callbacks.throughput=null", "model.net.dropout=0.2", "data.augment.mixup=0.2"]
    check(command(*given, f"paths.log_dir={tmp_path / 'alone'}", cwd=tmp_path))
    # an epoch has 26 steps
    killed = kill_when(tmp_path / "killed", 34, *given, f"paths.log_dir={tmp_path / 'killed'}")
    folder.rename(tmp_path / "elsewhere")
    moved = ["data=image_folder", f"data.folder={tmp_path / 'elsewhere'}"]
    check(command(f"resume={killed}", *moved, cwd=tmp_path))
    same(runs(tmp_path / "alone")[-1], killed)


def test_it_ships_without_the_folder(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parity on noise, with a note; on the images if the new folder is given."""
    # in this process
    monkeypatch.setattr(parity, "_run", lambda line: importlib.import_module(line[2]).main(Path(line[3])))
    with pytest.warns(UserWarning, match=r"^target=.*: the file is compared .* data\.folder=.* is (no|not a) folder"):
        assert in_process("scripts/export.py", f"run={run.path}", "target=[weights,safetensors]") == 0
    assert "Exports: compared on noise only" in capsys.readouterr().out
    for name in ("weights", "safetensors"):
        report = json.loads((run.path / "exports" / name / "parity.json").read_text())
        assert (report["samples"], report["held_out"], report["figures"]) == (0, None, None)
        assert report["odd_inputs"]["relative"] < 5e-5
        assert json.loads((run.path / "exports" / name / "manifest.json").read_text())["classes"] == NAMES
    moved = f"data.folder={tmp_path / 'elsewhere'}"
    assert in_process("scripts/export.py", f"run={run.path}", "target=weights", moved) == 0
    report = json.loads((run.path / "exports" / "weights" / "parity.json").read_text())
    assert (report["samples"], report["figures"]["file"]["accuracy"]) == (6, run.result["test/accuracy"])
    assert in_process("scripts/export.py", f"run={run.path}", "target=onnx_int8") == 1  # calibrated on its data
    assert "is no folder: give" in capsys.readouterr().err
