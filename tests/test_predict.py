"""Predictions for images that are not part of any data set."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SMALL, config, new_run
from PIL import Image

from lathe.build import make
from lathe.errors import UserError
from lathe.predict import fit, predict, read_images
from lathe.run import train
from lathe.rundir import RunDir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL)
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


@pytest.fixture(scope="module")
def images(run: RunDir) -> tuple[np.ndarray, np.ndarray]:
    """The test split as the run has it: uint8 [297, 1, 8, 8] and labels."""
    data = make(run.config["data"], "data")
    data.setup()
    pixels, labels = data.open()["test"].read()
    return pixels, np.asarray(labels)


def request(run: RunDir, source: Path, output: Path, *overrides: str) -> dict[str, Any]:
    asked = config(f"run={run.path}", f"input={source}", f"output={output}", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false",
                   *overrides, name="predict")  # fmt: skip
    cfg = run.config
    cfg["trainer"] |= asked["trainer"]
    cfg["strategy"], cfg["request"] = asked["strategy"], asked
    return cfg


def rows(output: Path) -> list[list[str]]:
    with open(output, newline="") as file:
        return list(csv.reader(file))


def save(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "images.npy", array)
    return folder / "images.npy"


def test_predictions_agree_with_the_runs_own_evaluation(run: RunDir, images: Any, tmp_path: Path) -> None:
    pixels, labels = images
    assert predict(request(run, save(tmp_path, pixels), tmp_path / "out.csv")) == 297
    header, *lines = rows(tmp_path / "out.csv")
    assert header == ["image", "prediction", "probability"]
    assert [line[0] for line in lines] == [str(i) for i in range(297)]
    accuracy = np.mean([int(line[1]) == label for line, label in zip(lines, labels, strict=True)])
    assert accuracy == pytest.approx(run.result["test/accuracy"], abs=1e-6)
    assert all(0.1 <= float(line[2]) <= 1 for line in lines)  # the largest of ten shares
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images.npy", "out.csv"]


def test_layouts_and_batches_change_nothing(run: RunDir, images: Any, tmp_path: Path) -> None:
    few = images[0][:10]
    results = []
    for number, array in enumerate((few, few[:, 0], few.transpose(0, 2, 3, 1))):
        predict(request(run, save(tmp_path, array), tmp_path / f"{number}.csv", f"batch_size={(3, 10, 64)[number]}"))
        results.append([line[:2] for line in rows(tmp_path / f"{number}.csv")])
    assert results[0] == results[1] == results[2]


def test_a_folder_of_png_is_read_by_name(run: RunDir, images: Any, tmp_path: Path) -> None:
    folder = tmp_path / "png"
    folder.mkdir()
    for name, image in zip(("c", "a", "b"), images[0], strict=False):
        Image.fromarray(image[0]).save(folder / f"{name}.png")
    (folder / "notes.txt").write_text("not an image")
    assert predict(request(run, folder, tmp_path / "png.csv")) == 3
    predict(request(run, save(tmp_path, images[0][[1, 2, 0]]), tmp_path / "npy.csv"))
    assert [line[0] for line in rows(tmp_path / "png.csv")[1:]] == ["a.png", "b.png", "c.png"]
    assert [line[1:] for line in rows(tmp_path / "png.csv")] == [line[1:] for line in rows(tmp_path / "npy.csv")]


def test_another_size_is_refused_or_scaled(run: RunDir, images: Any, tmp_path: Path) -> None:
    large = np.kron(images[0][:20], np.ones((1, 1, 4, 4), dtype=np.uint8))
    source = save(tmp_path, large)
    with pytest.raises(
        UserError, match=r"^input has images of 32 x 32 pixels, but the net takes 8 x 8: resize=true scales them\.$"
    ):
        predict(request(run, source, tmp_path / "out.csv"))
    assert not (tmp_path / "out.csv").exists()
    predict(request(run, source, tmp_path / "out.csv", "resize=true"))
    scaled = [line[1] for line in rows(tmp_path / "out.csv")]
    predict(request(run, save(tmp_path, images[0][:20]), tmp_path / "out.csv"))
    assert sum(a == b for a, b in zip(scaled, [line[1] for line in rows(tmp_path / "out.csv")], strict=True)) >= 19


def test_scaling_keeps_a_flat_image_and_the_mean() -> None:
    flat = torch.full((2, 3, 12, 12), 77, dtype=torch.uint8)
    assert torch.equal(fit(flat, 5, resize=True), torch.full((2, 3, 5, 5), 77, dtype=torch.uint8))
    noise = torch.randint(0, 256, (1, 1, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    small = fit(noise, 8, resize=True)
    assert small.dtype == torch.uint8
    assert small.float().mean() == pytest.approx(noise.float().mean().item(), abs=4)
    assert fit(noise, 64, resize=False) is noise


@pytest.mark.parametrize(
    ("array", "channels", "sentence"),
    [
        (np.zeros((2, 8, 8), np.float32), 1, "images must be uint8, from 0 to 255"),
        (
            np.zeros((2, 4, 8, 8), np.uint8),
            1,
            r"has shape \[2, 4, 8, 8\], but the net takes images of 1 channels: give \[n, height, width, 1\]",
        ),
        (np.zeros((2, 8, 8), np.uint8), 3, "but the net takes images of 3 channels"),
        (np.zeros((8, 8), np.uint8), 1, "but the net takes images of 1 channels"),
        (np.zeros((0, 1, 8, 8), np.uint8), 1, "has shape"),
    ],
)
def test_arrays_that_are_no_images_are_refused(tmp_path: Path, array: np.ndarray, channels: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_images(save(tmp_path, array), channels)


def test_files_that_cant_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file or folder"):
        read_images(tmp_path / "no.npy", 1)
    path = save(tmp_path, np.zeros((9, 8, 8), np.uint8))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=r"images\.npy can't be read as a \.npy array"):
        read_images(path, 1)
    for content in (b"", b"text", b"PK\x03\x04 torn"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"images\.npy can't be read as a \.npy array"):
            read_images(path, 1)
    np.save(path, np.array([{"code": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="can't be read"):
        read_images(path, 1)
    with open(path, "wb") as file:
        np.savez(file, a=np.zeros(3))
    with pytest.raises(UserError, match="images must be uint8"):
        read_images(path, 1)


def png_folder(tmp_path: Path, *sizes: tuple[int, ...]) -> Path:
    for number, size in enumerate(sizes):
        pixels = np.arange(np.prod(size), dtype=np.uint8).reshape(size)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return tmp_path


def test_png_colours_follow_the_net(tmp_path: Path) -> None:
    names, grey = read_images(png_folder(tmp_path, (4, 5), (4, 5, 3)), 1)
    assert names == ["0.png", "1.png"]
    assert (grey.shape, grey.dtype) == ((2, 1, 4, 5), torch.uint8)
    assert grey[0, 0].flatten().tolist() == list(range(20))
    _, colour = read_images(tmp_path, 3)
    assert colour.shape == (2, 3, 4, 5)
    assert colour[1].permute(1, 2, 0).flatten().tolist() == list(range(60))
    assert torch.equal(colour[0, 0], colour[0, 2])


def test_png_folders_that_cant_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the folder has no \.png files"):
        read_images(tmp_path, 1)
    png_folder(tmp_path, (4, 4), (5, 5))
    with pytest.raises(UserError, match="the images have 2 different sizes; make them equal first"):
        read_images(tmp_path, 1)
    with pytest.raises(UserError, match=r"PNG images have 1 or 3 channels, but the net takes 4; give a \.npy file"):
        read_images(tmp_path, 4)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "jpeg", "flipped"])
def test_a_damaged_png_is_named(tmp_path: Path, damage: str) -> None:
    path = png_folder(tmp_path, (32, 32)) / "0.png"
    if damage == "jpeg":
        Image.open(path).save(path, format="JPEG")
    else:
        content = path.read_bytes()
        flipped = content[:60] + bytes(255 - byte for byte in content[60:70]) + content[70:]
        path.write_bytes({"cut": content[: len(content) // 2], "text": b"hello", "empty": b"", "flipped": flipped}[damage])
    with pytest.raises(UserError, match=r"^input=.*0\.png can't be read as a PNG image\.$"):
        read_images(tmp_path, 1)


def test_mistakes_are_told_before_the_net_is_built(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.predict.rebuild", lambda cfg: pytest.fail("too late"))
    source = save(tmp_path, np.zeros((2, 8, 8), np.uint8))
    with pytest.raises(UserError, match=r"^output=.*: its folder does not exist\.$"):
        predict(request(run, source, tmp_path / "no" / "out.csv"))
    with pytest.raises(UserError, match=r"^trainer\.devices=2: prediction runs on one device\.$"):
        predict(request(run, source, tmp_path / "out.csv", "trainer.devices=2"))
    with pytest.raises(UserError, match=r"^batch_size=0: give a whole number from 1"):
        predict(request(run, source, tmp_path / "out.csv", "batch_size=0"))


def test_a_full_disk_leaves_the_old_output(run: RunDir, images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = save(tmp_path, images[0][:3]), tmp_path / "out.csv"
    output.write_text("old")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        predict(request(run, source, output))
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images.npy", "out.csv"]
