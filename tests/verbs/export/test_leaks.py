"""No file contains training data or a path of the machine that wrote it."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.exports import contents, needles, request, targets
from support.runs import ROOT

from lathe.runs.export_model import open_export_model
from lathe.runs.rundir import RunDir
from lathe.verbs.export import ship

QUICK = ("onnx_int8", "torch_export")  # calibrated on training data, and an archive


@pytest.fixture(scope="module")
def haystack(mlp: RunDir, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("haystack") / "run"
    shutil.copytree(mlp.path, folder, ignore=shutil.ignore_patterns("exports"))
    return RunDir(folder)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in targets()]
)
def test_no_file_holds_training_data_or_paths(
    haystack: RunDir, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes integer targets, whose ranges come from training data."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a recognisable name, unlike /tmp
    ship(request(haystack, f"target={name}", "target.samples=3"))
    wanted = needles(open_export_model(haystack.path).data)
    places = {str(place).encode() for place in (Path.home(), Path.cwd(), ROOT, haystack.path, sys.prefix, tmp_path)}
    for path in (haystack.path / "exports" / name).iterdir():
        for text in contents(path):
            assert [what for what, needle in wanted.items() if needle in text] == [], path
            assert [place for place in places if len(place) > 5 and place in text] == [], path


def test_what_is_looked_for_would_be_found(haystack: RunDir, tmp_path: Path) -> None:
    data = open_export_model(haystack.path).data
    x, _ = next(iter(data.eval_loader("train")))
    torch.save({"view": x[3:4]}, tmp_path / "leak.pt")  # a view, whose whole storage is written
    found = [
        what for what, needle in needles(data).items() if any(needle in text for text in contents(tmp_path / "leak.pt"))
    ]
    assert "float32 image 0" in found
