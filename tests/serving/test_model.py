"""An export that is served: of these weights and this checkpoint; its receipt; a device's answers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lathe.errors import UserError
from lathe.runs.checkpoints import KEY, checkpoint_hash
from lathe.serving.model import describe, load


def test_an_export_of_earlier_weights_is_refused(served_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(served_run, run)
    path = run / "exports/onnx/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, KEY: checkpoint_hash(run / "checkpoints/best.ckpt")}))
    assert describe(str(run), "onnx", "best")["target"] == "onnx"
    with (run / "checkpoints/best.ckpt").open("ab") as file:
        file.write(b"of a later epoch")
    with pytest.raises(UserError, match=r"^target=onnx: exports/onnx is of an earlier best\.ckpt: export"):
        describe(str(run), "onnx", "best")


def test_a_checkpoint_that_the_export_is_not_of_is_refused(served_run: Path) -> None:
    with pytest.raises(UserError, match=r"^checkpoint=last: target=onnx was exported from best\.ckpt"):
        describe(str(served_run), "onnx", "last")


def test_an_export_that_is_not_there_is_refused(served_run: Path) -> None:
    for target in ("onnx_int8", "../checkpoints", "..", "."):
        with pytest.raises(UserError, match=r"make it with python scripts/export\.py"):
            describe(str(served_run), target, "best")


@pytest.mark.parametrize("target", ["module", "onnx"])
def test_answers_of_a_device_are_those_without_one(served_run: Path, digits: np.ndarray, target: str) -> None:
    plain, placed = (load(str(served_run), target, "best", 1, device) for device in (None, "cpu"))
    for rows in (1, 32, 5):
        np.testing.assert_allclose(placed(digits[:rows]), plain(digits[:rows]), rtol=1e-5, atol=1e-5)
