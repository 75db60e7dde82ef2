"""What a receipt looks at before anything is measured: where it goes, and what its baseline was trained on."""

import shutil
from pathlib import Path

import pytest
from support.runs import SMALL, new_run

from lathe.receipt import measured, write
from lathe.runs.rundir import RunDir
from lathe.training.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL)
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


def test_its_places_are_looked_at_before_it_is_measured(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = RunDir(shutil.copytree(run.path, tmp_path / "copied"))
    (copied.path / "receipt.md").unlink(missing_ok=True)
    (copied.path / "receipt.md").mkdir()
    monkeypatch.setattr("lathe.receipt.measured._Receipt", lambda *_: pytest.fail("too late"))
    with pytest.raises(OSError, match=r"receipt\.md is a folder"):
        write(copied, copied.config, None, "quick")


def test_a_baseline_of_other_data_is_reported_and_another_loader_is_not(run: RunDir, tmp_path: Path) -> None:
    other = shutil.copytree(run.path, tmp_path / "other")
    for change, told in (
        ({"batch_size": 7, "num_workers": 3}, []),
        ({"share": 0.5}, ["The baseline was trained on other data (share: 1.0 -> 0.5)."]),
    ):
        asked = object.__new__(measured._Receipt)
        asked.run, asked.cfg = run, {**run.config, "data": {**run.config["data"], **change}}
        assert asked._open_dense(other)[1] == told
