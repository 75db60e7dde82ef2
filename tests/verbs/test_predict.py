"""Predictions for images outside any data set; bad files, names, full disks."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import runs
from support.runs import SMALL, new_run

import lathe
from lathe import export
from lathe.errors import UserError
from lathe.export.bundle import MANIFEST, write_manifest
from lathe.runs.export_model import open_export_model
from lathe.runs.instantiate import instantiate
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.predict import predict


def request(run: RunDir, source: Path, output: Path, *overrides: str) -> dict[str, Any]:
    words = (f"input={source}", f"output={output}", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false")
    return runs.request(run, "predict", *words, *overrides)


def rows(output: Path) -> list[list[str]]:
    with open(output, newline="") as file:
        return list(csv.reader(file))


def save(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "images.npy", array)
    return folder / "images.npy"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL)
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


@pytest.fixture(scope="module")
def images(run: RunDir) -> tuple[np.ndarray, np.ndarray]:
    """The test split as the run reads it: uint8 [297, 1, 8, 8] and labels."""
    data = instantiate(run.config["data"], "data")
    data.setup()
    pixels, labels = data.open()["test"].read()
    return pixels, np.asarray(labels)


@pytest.fixture
def pixels(images: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return images[0]


def test_predictions_agree_with_the_runs_own_evaluation(run: RunDir, images: Any, tmp_path: Path) -> None:
    pixels, labels = images
    assert predict(request(run, save(tmp_path, pixels), tmp_path / "out.csv")) == 297
    header, *lines = rows(tmp_path / "out.csv")
    assert header == ["image", "prediction", "probability"]
    assert [line[0] for line in lines] == [str(i) for i in range(297)]
    accuracy = np.mean([int(line[1]) == label for line, label in zip(lines, labels, strict=True)])
    assert accuracy == pytest.approx(run.result["test/accuracy"], abs=1e-6)
    assert all(0.1 <= float(line[2]) <= 1 for line in lines)  # the largest of ten probabilities
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images.npy", "out.csv"]


def test_layouts_and_batches_change_nothing(run: RunDir, images: Any, tmp_path: Path) -> None:
    few = images[0][:10]
    results = []
    for number, array in enumerate((few, few[:, 0], few.transpose(0, 2, 3, 1))):
        predict(request(run, save(tmp_path, array), tmp_path / f"{number}.csv", f"batch_size={(3, 10, 64)[number]}"))
        results.append([line[:2] for line in rows(tmp_path / f"{number}.csv")])
    assert results[0] == results[1] == results[2]


def test_another_size_is_refused_or_scaled(run: RunDir, images: Any, tmp_path: Path) -> None:
    large = np.kron(images[0][:20], np.ones((1, 1, 4, 4), dtype=np.uint8))
    source = save(tmp_path, large)
    with pytest.raises(
        UserError,
        match=r"^input=.*images\.npy has 32 x 32 pixels, but the net takes 8 x 8: resize=true scales images\.$",
    ):
        predict(request(run, source, tmp_path / "out.csv"))
    assert not (tmp_path / "out.csv").exists()
    predict(request(run, source, tmp_path / "out.csv", "resize=true"))
    scaled = [line[1] for line in rows(tmp_path / "out.csv")]
    predict(request(run, save(tmp_path, images[0][:20]), tmp_path / "out.csv"))
    assert sum(a == b for a, b in zip(scaled, [line[1] for line in rows(tmp_path / "out.csv")], strict=True)) >= 19


def test_a_folder_is_read_by_name_and_scaled(run: RunDir, images: Any, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number, (name, image) in enumerate(zip(("a.png", "b.JPG", "c.jpeg"), images[0][:, 0], strict=False)):
        large = Image.fromarray(image).resize((8 + 8 * number, 16), Image.Resampling.NEAREST)
        large.save(folder / name, quality=100)
    np.save(folder / "d.npy", images[0][3, 0])
    np.save(folder / "e.npy", images[0][4:7])
    (folder / ".hidden.png").write_text("left by a file system")
    (folder / "notes.txt").write_text("not an image")
    (folder / "deeper").mkdir()
    with pytest.warns(UserWarning, match=r"many: 2 files or folders in it are no images .*: deeper, notes"):
        assert predict(request(run, folder, tmp_path / "many.csv", "resize=true", "batch_size=2")) == 7
    predict(request(run, save(tmp_path, images[0][:7]), tmp_path / "npy.csv"))
    found, expected = rows(tmp_path / "many.csv")[1:], rows(tmp_path / "npy.csv")[1:]
    assert [line[0] for line in found] == ["a.png", "b.JPG", "c.jpeg", "d.npy", "e.npy[0]", "e.npy[1]", "e.npy[2]"]
    assert found[3][1:] == expected[3][1:]
    assert [line[1:] for line in found[4:]] == [line[1:] for line in expected[4:]]
    assert sum(a[1] == b[1] for a, b in zip(found, expected, strict=True)) >= 6  # scaling changes the picture a little


def exported(run: RunDir, name: str) -> None:
    """An export of the run without its parity check, which takes a fresh process."""
    ready, target = open_export_model(run.path), export.get(name)
    folder, file = run.path / "exports" / name, f"model{target.suffix}"
    folder.mkdir(parents=True)
    target.export(ready.net, ready.example, folder / file)
    write_manifest(folder, {"target": name, "file": file, **ready.facts})


def same_lines(left: list[list[str]], right: list[list[str]]) -> None:
    assert [line[:2] for line in left] == [line[:2] for line in right]
    assert [float(line[2]) for line in left[1:]] == pytest.approx([float(line[2]) for line in right[1:]], abs=2e-6)


def test_an_export_predicts_what_the_module_does(run: RunDir, images: Any, tmp_path: Path) -> None:
    exported(run, "onnx")
    source = save(tmp_path, images[0])
    predict(request(run, source, tmp_path / "module.csv"))
    assert predict(request(run, source, tmp_path / "onnx.csv", "export=onnx", "batch_size=100")) == 297
    same_lines(rows(tmp_path / "onnx.csv"), rows(tmp_path / "module.csv"))
    path = run.path / "exports" / "onnx" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"checkpoint_sha256": "of an earlier one"}))
    with pytest.raises(UserError, match=r"^target=onnx: exports/onnx is of an earlier best\.ckpt: export"):
        predict(request(run, source, tmp_path / "no.csv", "export=onnx"))
    assert not (tmp_path / "no.csv").exists()


def test_the_next_token_of_each_sequence(tmp_path: Path) -> None:
    sizes = [f"data.source.{split}_size=16" for split in ("train", "val", "test")]
    small = ("model=gpt_nano", "model.net.depth=1", "model.net.width=16", "trainer.max_epochs=1", "data.batch_size=8")
    cfg = new_run(tmp_path, *SMALL[3:-1], "trainer.log_every_n_steps=1", "data=synthetic_tokens", *small, *sizes)
    train(cfg)
    run = RunDir(cfg["paths"]["run_dir"])
    ids = np.random.default_rng(0).integers(0, 32, (5, 12))
    assert predict(request(run, save(tmp_path, ids), tmp_path / "out.csv", "batch_size=2")) == 5
    wanted = lathe.load(run.path).predict(ids)
    header, *lines = rows(tmp_path / "out.csv")
    assert header == ["sequence", "prediction", "probability"]
    assert [[int(line[0]), int(line[1])] for line in lines] == list(map(list, enumerate(wanted.prediction)))
    assert [float(line[2]) for line in lines] == pytest.approx(wanted.probability.tolist(), abs=1e-6)
    with pytest.raises(UserError, match=r"^input=.*images\.npy holds token ids from 32 to 32: expected 0 to 31\.$"):
        predict(request(run, save(tmp_path, np.full((1, 3), 32)), tmp_path / "no.csv"))


def test_an_output_takes_the_place_of_nothing_that_is_read(run: RunDir, pixels: np.ndarray, tmp_path: Path) -> None:
    source = save(tmp_path, pixels[:2])
    (tmp_path / "link.csv").symlink_to(source)
    (run.path / "exports").mkdir(exist_ok=True)
    Image.fromarray(pixels[0, 0]).save(tmp_path / "seven.png")
    checkpoint = run.path / "checkpoints" / "best.ckpt"
    before = {path: path.read_bytes() for path in (source, tmp_path / "seven.png", checkpoint)}
    outputs = [(source, tmp_path / "link.csv"), (tmp_path, tmp_path / "seven.png"), (tmp_path, tmp_path / "new.npy")]
    for input_path, output in [*outputs, (source, checkpoint), (source, run.path / "exports" / "x.csv")]:
        with pytest.raises(UserError, match=r"^output=.* would take the place of .*: name another file\.$"):
            predict(request(run, input_path, output))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a pipe"):
        predict(request(run, source, tmp_path / "pipe"))
    assert {path: path.read_bytes() for path in before} == before
    predict(request(run, source, tmp_path / "out.csv"))
    predict(request(run, source, run.path / "predictions.csv"))  # next to the run's own files


def test_bad_files_of_a_folder_are_left_out_and_named(run: RunDir, pixels: np.ndarray, tmp_path: Path) -> None:
    folder, output = tmp_path / "png", tmp_path / "out.csv"
    folder.mkdir()
    for number in range(7):
        Image.fromarray(pixels[number, 0]).save(folder / f"{number}.png")
    predict(request(run, folder, output, "batch_size=2"))
    whole = rows(output)
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:50])  # the header is whole
    (folder / "4.png").write_bytes(b"none")
    (folder / "5.npy").write_bytes(b"none")
    with pytest.warns(UserWarning, match=r"^skip_bad=3 leaves out 4\.png, 5\.npy, 1\.png\.$"):
        assert predict(request(run, folder, output, "batch_size=2", "skip_bad=3")) == 5
    assert rows(output) == [row for row in whole if row[0] not in ("1.png", "4.png")]
    for limit in (0, 2):
        with pytest.raises(UserError, match=r"[145]\.(png|npy) .* or set skip_bad to how many may be left out\.$"):
            predict(request(run, folder, output, "batch_size=2", f"skip_bad={limit}"))
    assert len(rows(output)) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "png"]
    for path in sorted(folder.iterdir()):
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=r"^skip_bad=9: .*can be read: mend it\.$"):
        predict(request(run, folder, tmp_path / "none.csv", "skip_bad=9"))
    assert not (tmp_path / "none.csv").exists()
