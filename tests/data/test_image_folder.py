"""Folders of image files: their splits, pixels and cache."""

import json
import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.pictures import pictures
from support.runs import SMALL, config, new_run

import lathe.data.image_folder as module
from lathe.config.resolve import with_absolute_paths
from lathe.data import ImageDataModule, ImageFolder
from lathe.data.splits import Splits
from lathe.runs.build import make_data
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.load import load

CLASSES = {"dog": 30, "cat": 20, "fox": 10}
NAMES = ["cat", "dog", "fox"]
NAMES_OF_SPLITS = ("train", "val", "test")


def source(tmp_path: Path, **settings: Any) -> ImageFolder:
    return ImageFolder(str(tmp_path / "photos"), str(tmp_path / "data"), **{"image_size": 8, **settings})


def opened(data: ImageFolder) -> Splits:
    data.prepare()
    return data.load()


def per_class(splits: Splits) -> dict[str, list[int]]:
    return {name: np.bincount(getattr(splits, name).read()[1], minlength=3).tolist() for name in NAMES_OF_SPLITS}


def test_shares_keep_the_shares_of_the_classes_and_follow_their_seed(tmp_path: Path) -> None:
    pictures(tmp_path / "photos", CLASSES)
    splits = opened(source(tmp_path))
    assert per_class(splits) == {"train": [16, 24, 8], "val": [2, 3, 1], "test": [2, 3, 1]}
    rows = np.concatenate([splits.train.rows, splits.val.rows, splits.test.rows])
    assert np.array_equal(np.sort(rows), np.arange(60))
    again, other = source(tmp_path).load(), source(tmp_path, split_seed=1).load()
    assert np.array_equal(again.val.rows, splits.val.rows)
    assert not np.array_equal(other.val.rows, splits.val.rows)
    more = source(tmp_path, val_share=0.3, test_share=0.2).load()
    assert [len(split) for split in (more.train, more.val, more.test)] == [30, 18, 12]


@pytest.mark.parametrize("change", ["added", "removed"])
def test_files_that_come_and_go_leave_the_others_in_their_split(tmp_path: Path, change: str) -> None:
    """Evaluation must not test on training images: at most one file of each class moves at each edge."""
    pictures(tmp_path / "photos", {"cat": 200, "dog": 300, "fox": 100})

    def divided() -> dict[str, set[str]]:
        data = source(tmp_path, image_size=2)
        rows = data._divided(np.zeros(0, np.int64))
        return {split: {data._files.names[row] for row in rows[split]} for split in NAMES_OF_SPLITS}

    before = divided()
    first = min((tmp_path / "photos" / "cat").iterdir())
    first.rename(tmp_path / "elsewhere.png") if change == "removed" else shutil.copy(first, first.parent / "zz.png")
    after = divided()
    assert [len(after[split]) for split in ("val", "test")] == [60, 60]
    for split in NAMES_OF_SPLITS:
        others = set().union(*(before[name] for name in NAMES_OF_SPLITS if name != split))
        assert len(after[split] & others) <= 3, split


@pytest.mark.parametrize("resize", ["crop", "squash"])
def test_the_pixels_are_those_of_pillows_own_resize(tmp_path: Path, resize: str) -> None:
    """Of several kinds and modes; the middle of each, by whole pixels and by half ones."""
    rng = np.random.default_rng(0)
    sizes = {"a.png": (20, 12), "b.jpg": (12, 21), "c.bmp": (8, 8), "d.webp": (5, 9), "e.jpeg": (9, 30)}
    for label in NAMES:
        (tmp_path / "photos" / label).mkdir(parents=True)
        for name, (height, width) in sizes.items():
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            grey = label == "cat"
            Image.fromarray(pixels[..., 0] if grey else pixels).save(tmp_path / "photos" / label / name)
    Image.fromarray(rng.integers(0, 256, (30, 30, 4), dtype=np.uint8)).save(tmp_path / "photos" / "dog" / "f.png")
    Image.fromarray(pixels).quantize(16).save(tmp_path / "photos" / "fox" / "f.png")
    splits = opened(source(tmp_path, val_share=0.2, test_share=0.2, resize=resize))
    files = sorted((tmp_path / "photos").glob("*/*"))
    assert splits.train.images.shape == (len(files), 3, 8, 8)
    for index, file in enumerate(files):
        with Image.open(file) as image:
            seen = image.convert("RGBA") if image.mode in ("RGBA", "P") else image.convert("RGB")
            if seen.mode == "RGBA":
                seen = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
            side = min(seen.size)
            left, top = (seen.width - side) / 2, (seen.height - side) / 2
            box = (left, top, left + side, top + side) if resize == "crop" else None
            wanted = seen.resize((8, 8), Image.Resampling.BILINEAR, box=box)
        assert np.array_equal(splits.train.images[index], np.asarray(wanted).transpose(2, 0, 1)), file
        assert splits.train.labels[index] == NAMES.index(file.parent.name)


@pytest.mark.parametrize("named", [False, True])
def test_splits_that_are_folders(tmp_path: Path, named: bool) -> None:
    for number, name in enumerate(("learn", "choose", "judge") if named else NAMES_OF_SPLITS):
        pictures(tmp_path / "photos" / name, dict.fromkeys(NAMES, 3 - number), seed=number)
    given = {"train": "learn", "val": "choose", "test": "judge"} if named else {}
    splits = opened(source(tmp_path, **given))
    assert per_class(splits) == {"train": [3, 3, 3], "val": [2, 2, 2], "test": [1, 1, 1]}
    assert source(tmp_path, **given).class_names == NAMES


def test_a_test_that_is_not_there_is_cut_out_of_train_and_a_class_may_be_called_train(tmp_path: Path) -> None:
    pictures(tmp_path / "photos" / "train", dict.fromkeys(NAMES, 10))
    pictures(tmp_path / "photos" / "val", dict.fromkeys(NAMES, 2), seed=1)
    assert per_class(opened(source(tmp_path))) == {"train": [9, 9, 9], "val": [2, 2, 2], "test": [1, 1, 1]}
    shutil.rmtree(tmp_path / "photos")
    pictures(tmp_path / "photos", {"car": 10, "bus": 10, "train": 10})
    assert source(tmp_path).class_names == ["bus", "car", "train"]


@pytest.mark.parametrize(("train", "val", "test"), [("train", "valid", "test"), ("Training", "validation", None)])
def test_splits_by_what_people_call_them(tmp_path: Path, train: str, val: str, test: str | None) -> None:
    for number, name in enumerate((train, val, test)):
        if name is not None:
            pictures(tmp_path / "photos" / name, dict.fromkeys(NAMES, 10 - number), seed=number)
    splits = opened(source(tmp_path))
    assert per_class(splits) == {
        "train": [10] * 3 if test else [9] * 3,
        "val": [9] * 3,
        "test": [8] * 3 if test else [1] * 3,
    }
    assert splits.val.name(0) == f"{val}/cat/000.png"
    assert config("data=image_folder", f"data.folder={tmp_path / 'photos'}")["data"]["class_names"] == NAMES


@pytest.mark.parametrize("form", ["txt", "csv", "labels"])
def test_lists_of_files(tmp_path: Path, form: str) -> None:
    folder = pictures(tmp_path / "photos", {"a": 4, "b": 4})
    suffix = "txt" if form == "txt" else "csv"
    for split, numbers in {"train": (0, 1), "val": (2,), "test": (3,)}.items():
        lines = [f"{label}/{number:03}.png" for number in numbers for label in ("b", "a")]
        if form == "labels":
            lines = ["path, label", *(f"{line}, {'one' if line[0] == 'b' else 'two'}" for line in lines)]
        elif form == "csv":
            lines = ["path", *lines]
        (folder / f"{split}.{suffix}").write_text("\n".join([*lines, ""]))
    named = {split: f"{split}.{suffix}" for split in NAMES_OF_SPLITS}
    data = source(tmp_path, **named)
    splits = opened(data)
    assert data.class_names == (["one", "two"] if form == "labels" else ["a", "b"])
    assert [split.labels[split.rows].tolist() for split in (splits.train, splits.val, splits.test)] == (
        [[0, 1, 0, 1], [0, 1], [0, 1]] if form == "labels" else [[1, 0, 1, 0], [1, 0], [1, 0]]
    )
    words = [f"data.source.{split}={name}" for split, name in named.items()]
    assert config("data=image_folder", f"data.folder={folder}", *words)["data"]["num_classes"] == 2


def test_images_are_read_once_and_again_when_one_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    read: list[str] = []
    real = module.read_image
    monkeypatch.setattr(module, "read_image", lambda path, channels: read.append(str(path)) or real(path, channels))
    first = opened(source(tmp_path)).train.images
    assert sorted(read) == sorted(map(str, folder.glob("*/*")))
    opened(source(tmp_path, split_seed=3, val_share=0.2))  # the same array, split differently
    assert len(read) == 60
    opened(source(tmp_path, image_size=4))  # a second array, next to the other
    opened(source(tmp_path))
    assert len(read) == 120
    Image.new("RGB", (9, 9), "white").save(folder / "cat" / "000.png")
    changed = opened(source(tmp_path)).train.images
    assert len(read) == 180
    assert (changed[0] == 255).all()
    assert np.array_equal(changed[1:], first[1:])
    os.utime(folder / "dog" / "000.png", ns=(1, 1))
    (folder / "fox" / "000.png").unlink()
    assert len(opened(source(tmp_path)).train.images) == 59
    places = sorted((tmp_path / "data" / "image_folder_cache").glob("photos-*"))
    assert [np.load(place / "images.npy", mmap_mode="r").shape for place in places].count((59, 3, 8, 8)) == 1
    assert len(places) == 2  # that of the other size, and the latest of this size
    (places[1] / "images.npy").write_bytes(b"")  # damaged, so it is rebuilt
    assert len(opened(source(tmp_path)).train.images) == 59


def test_several_at_once_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "photos", CLASSES)
    read: list[str] = []
    real = module.read_image
    monkeypatch.setattr(module, "read_image", lambda path, channels: read.append(str(path)) or real(path, channels))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(opened(source(tmp_path)).train))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, len(read)) == ([48] * 4, 60)


def test_bad_images_are_named_and_may_be_left_out(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    (folder / "cat" / "003.png").write_bytes((folder / "cat" / "003.png").read_bytes()[:100])
    (folder / "dog" / "004.png").write_bytes(b"no image")
    (folder / "fox" / "005.png").unlink()
    (folder / "fox" / "005.png").symlink_to("005.png")
    with pytest.raises(module.UserError, match=r"^data\.source\.skip_bad=2: .*003\.png can't .*004\.png .*005\.png "):
        source(tmp_path, skip_bad=2).prepare()
    assert not list((tmp_path / "data").glob("*/photos*"))
    with pytest.warns(UserWarning, match=r"skip_bad=3 leaves out .*cat/003\.png can't be read"):
        splits = opened(source(tmp_path, skip_bad=3))
    assert per_class(splits) == {"train": [15, 23, 7], "val": [2, 3, 1], "test": [2, 3, 1]}
    with warnings.catch_warnings():  # reported once, however often they are opened
        warnings.simplefilter("error")
        opened(source(tmp_path, skip_bad=3))
    with pytest.raises(module.UserError, match=r"^data\.source\.skip_bad=0: .*003\.png"):
        source(tmp_path).prepare()  # the cache of a run that allowed them


def test_the_configuration_knows_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "photos", CLASSES)
    monkeypatch.chdir(tmp_path)
    words = ("data.image_size=8", "data.batch_size=16", f"paths.data_dir={tmp_path / 'data'}")
    cfg = config("data=image_folder", "data.folder=photos", *words)
    data = cfg["data"]
    assert (data["num_classes"], data["class_names"], data["source"]["classes"]) == (3, NAMES, NAMES)
    assert cfg["model"]["net"]["num_classes"] == 3
    kept = with_absolute_paths(cfg)["data"]  # as in a run directory, which can be used from another folder
    assert (kept["folder"], kept["source"]["folder"]) == (str(tmp_path / "photos"),) * 2
    monkeypatch.chdir("/")
    made = make_data({**cfg, "data": kept})
    assert isinstance(made, ImageDataModule)
    made.prepare_data()
    made.setup()
    assert len(made.train_dataloader()) == 3
    (tmp_path / "photos" / "fox").rename(tmp_path / "photos" / "elk")
    with pytest.raises(
        module.UserError, match=r"other classes than data\.source\.classes, elk more and fox less: give "
    ):
        make_data({**cfg, "data": kept})


def test_answers_have_the_names_of_the_folders(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", CLASSES)
    given = ["data=image_folder", f"data.folder={folder}", "data.image_size=8", f"paths.data_dir={tmp_path / 'data'}"]
    cfg = new_run(tmp_path / "logs", *SMALL, *given, "data.batch_size=4", "data.folds=3", "data.fold=1")
    train(cfg)
    run = load(cfg["paths"]["run_dir"])
    found = run.predict(folder / "dog", resize=True)
    assert found.classes == [NAMES[index] for index in found.prediction]
    assert found.classes.count("dog") > 20
    assert RunDir(run.dir).config["data"]["class_names"] == NAMES
    assert json.loads((run.dir / "result.json").read_text())["test/accuracy"] > 0.6
