"""Input and output files of predictions: bad files, names, full disks."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.predicting import request, rows, save
from support.runs import SMALL, new_run

from lathe.errors import UserError
from lathe.runs.instantiate import instantiate
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.predict import predict


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL, "trainer.max_epochs=1")
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


@pytest.fixture(scope="module")
def images(run: RunDir) -> np.ndarray:
    """The test split as the run reads it: uint8 [297, 1, 8, 8]."""
    data = instantiate(run.config["data"], "data")
    data.setup()
    pixels: np.ndarray = data.open()["test"].read()[0]
    return pixels


def test_an_output_takes_the_place_of_nothing_that_is_read(run: RunDir, images: np.ndarray, tmp_path: Path) -> None:
    source = save(tmp_path, images[:2])
    (tmp_path / "link.csv").symlink_to(source)
    (run.path / "exports").mkdir()
    Image.fromarray(images[0, 0]).save(tmp_path / "seven.png")
    own = [
        run.path / "config.yaml",
        run.path / "checkpoints" / "best.ckpt",
        run.path / "result.json",
        run.path / "exports" / "x.csv",
    ]
    before = {path: path.read_bytes() for path in (source, tmp_path / "seven.png", *own[:3])}
    for given, output in [
        (source, source),
        (source, tmp_path / "link.csv"),
        (tmp_path, tmp_path / "seven.png"),
        (tmp_path, tmp_path / "new.npy"),
        *[(source, path) for path in own],
    ]:
        with pytest.raises(UserError, match=r"^output=.* would take the place of .*: name another file\.$"):
            predict(request(run, given, output))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a pipe"):
        predict(request(run, source, tmp_path / "pipe"))
    assert {path: path.read_bytes() for path in before} == before
    predict(request(run, source, tmp_path / "out.csv"))
    predict(request(run, source, run.path / "predictions.csv"))  # next to the run's own files


def test_a_damaged_image_far_back_leaves_no_output(run: RunDir, tmp_path: Path) -> None:
    folder = tmp_path / "png"
    folder.mkdir()
    for number in range(9):
        Image.fromarray(np.full((8, 8), 9, np.uint8)).save(folder / f"{number}.png")
    path = folder / "8.png"
    path.write_bytes(path.read_bytes()[:50])  # the header is whole
    with pytest.raises(
        UserError, match=r"8\.png can't be read as a PNG image.*, or set skip_bad to how many may be left"
    ):
        predict(request(run, folder, tmp_path / "out.csv", "batch_size=2"))
    assert [path.name for path in tmp_path.iterdir()] == ["png"]


def test_bad_files_of_a_folder_are_left_out_and_named(run: RunDir, images: np.ndarray, tmp_path: Path) -> None:
    folder, output = tmp_path / "png", tmp_path / "out.csv"
    folder.mkdir()
    for number in range(7):
        Image.fromarray(images[number, 0]).save(folder / f"{number}.png")
    predict(request(run, folder, output, "batch_size=2"))
    whole = rows(output)
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:50])  # the header is whole
    (folder / "4.png").write_bytes(b"none")
    (folder / "5.npy").write_bytes(b"none")
    with pytest.warns(UserWarning, match=r"^skip_bad=3 leaves out 4\.png, 5\.npy, 1\.png\.$"):
        assert predict(request(run, folder, output, "batch_size=2", "skip_bad=3")) == 5
    assert rows(output) == [row for row in whole if row[0] not in ("1.png", "4.png")]
    for most in (0, 1, 2):
        with pytest.raises(UserError, match=r"[145]\.(png|npy) .* or set skip_bad to how many may be left out\.$"):
            predict(request(run, folder, output, "batch_size=2", f"skip_bad={most}"))
    assert len(rows(output)) == 6
    for path in sorted(folder.iterdir()):
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=r"^skip_bad=9: .*can be read: mend it\.$"):
        predict(request(run, folder, tmp_path / "none.csv", "skip_bad=9"))
    assert not (tmp_path / "none.csv").exists()
