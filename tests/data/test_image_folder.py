"""Folders of image files: their splits, pixels and cache."""

import csv
import importlib
import json
import os
import shutil
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.commands import in_process
from support.pictures import pictures
from support.runs import SMALL, config, new_run, runs

import lathe.data.image_folder as module
from lathe.config.class_names import class_names
from lathe.config.resolve import with_absolute_paths
from lathe.data import Digits, ImageDataModule, ImageFolder
from lathe.data.splits import Splits
from lathe.errors import UserError
from lathe.runs.build import make_data
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs import export as parity
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


def test_files_that_come_and_go_leave_the_others_in_their_split(tmp_path: Path) -> None:
    """Evaluation must not test on training images: at most one file of each class moves at each edge."""
    pictures(tmp_path / "photos", {"cat": 200, "dog": 300, "fox": 100})

    def divided() -> dict[str, set[str]]:
        data = source(tmp_path, image_size=2)
        rows = data._divided(np.zeros(0, np.int64))
        return {split: {data._files.names[row] for row in rows[split]} for split in NAMES_OF_SPLITS}

    before = divided()
    first = min((tmp_path / "photos" / "cat").iterdir())
    for change in (lambda: shutil.copy(first, first.parent / "zz.png"), first.unlink, (first.parent / "zz.png").unlink):
        change()
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


@pytest.mark.parametrize(
    ("names", "given"),
    [
        (NAMES_OF_SPLITS, {}),
        (("learn", "choose", "judge"), {"train": "learn", "val": "choose", "test": "judge"}),
        (("Training", "validation", "test"), {}),
    ],
)
def test_splits_that_are_folders(tmp_path: Path, names: tuple[str, ...], given: dict[str, str]) -> None:
    for number, name in enumerate(names):
        pictures(tmp_path / "photos" / name, dict.fromkeys(NAMES, 3 - number), seed=number)
    splits = opened(source(tmp_path, **given))
    assert per_class(splits) == {"train": [3, 3, 3], "val": [2, 2, 2], "test": [1, 1, 1]}
    assert splits.val.name(0) == f"{names[1]}/cat/000.png"
    assert source(tmp_path, **given).class_names == NAMES


def test_a_test_that_is_not_there_is_cut_out_of_train_and_a_class_may_be_called_train(tmp_path: Path) -> None:
    pictures(tmp_path / "photos" / "train", dict.fromkeys(NAMES, 10))
    pictures(tmp_path / "photos" / "val", dict.fromkeys(NAMES, 2), seed=1)
    assert per_class(opened(source(tmp_path))) == {"train": [9, 9, 9], "val": [2, 2, 2], "test": [1, 1, 1]}
    shutil.rmtree(tmp_path / "photos")
    pictures(tmp_path / "photos", {"car": 10, "bus": 10, "train": 10})
    assert source(tmp_path).class_names == ["bus", "car", "train"]


@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_lists_of_files(tmp_path: Path, suffix: str) -> None:
    folder = pictures(tmp_path / "photos", {"a": 4, "b": 4})
    for split, numbers in {"train": (0, 1), "val": (2,), "test": (3,)}.items():
        lines = [f"{label}/{number:03}.png" for number in numbers for label in ("b", "a")]
        if suffix == "csv":
            lines = ["path, label", *(f"{line}, {'one' if line[0] == 'b' else 'two'}" for line in lines)]
        (folder / f"{split}.{suffix}").write_text("\n".join([*lines, ""]))
    named = {split: f"{split}.{suffix}" for split in NAMES_OF_SPLITS}
    data = source(tmp_path, **named)
    splits = opened(data)
    assert data.class_names == (["one", "two"] if suffix == "csv" else ["a", "b"])
    assert [split.labels[split.rows].tolist() for split in (splits.train, splits.val, splits.test)] == (
        [[0, 1, 0, 1], [0, 1], [0, 1]] if suffix == "csv" else [[1, 0, 1, 0], [1, 0], [1, 0]]
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


# A run on a moved folder of images. Some commands need only the run directory, the others take the new folder.


QUIET = ("trainer.accelerator=cpu", "trainer.enable_progress_bar=false")


def words(folder: Path) -> list[str]:
    """Overrides for data from a folder."""
    return ["data=image_folder", f"data.folder={folder}", "data.image_size=8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run whose folder, `photos`, is now at `elsewhere`; both are in `home`."""
    tmp_path = tmp_path_factory.mktemp("moved")
    folder = pictures(tmp_path / "photos", dict.fromkeys(NAMES, 20))
    given = [*SMALL, *words(folder), "data.batch_size=8", f"paths.data_dir={tmp_path / 'data'}"]
    cfg = new_run(tmp_path / "logs", *given)
    train(cfg)
    folder.rename(tmp_path / "elsewhere")
    return RunDir(cfg["paths"]["run_dir"])


@pytest.fixture
def home(run: RunDir) -> Path:
    return run.path.parents[2]


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


def test_commands_take_the_new_folder(run: RunDir, home: Path, tmp_path: Path) -> None:
    """The same metrics as before, of the net and a compressed one; no trace of the old path in the outputs."""
    moved = f"data.folder={home / 'elsewhere'}"
    output = tmp_path / "metrics.json"
    request = [f"run={run.path}", f"output={output}", *QUIET]
    assert in_process("scripts/evaluate.py", *request, moved) == 0
    assert json.loads(output.read_text()) == pytest.approx({k: run.result[k] for k in ("test/accuracy", "test/loss")})
    found = load(run.path, folder=home / "elsewhere").datamodule
    assert len(found.test_dataloader()) == 1
    compress = ["compression=prune", "compression.receipt=none", "compression.prune.criterion=magnitude", QUIET[0]]
    assert in_process("scripts/compress.py", f"run={run.path}", moved, *compress) == 0
    smaller = runs(home / "logs")[-1]
    assert json.loads((smaller / "result.json").read_text())["source/test/loss"] == run.result["test/loss"]
    assert in_process("scripts/evaluate.py", f"run={smaller}", *QUIET) == 0


def test_it_ships_without_the_folder(
    run: RunDir, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    moved = f"data.folder={home / 'elsewhere'}"
    assert in_process("scripts/export.py", f"run={run.path}", "target=weights", moved) == 0
    report = json.loads((run.path / "exports" / "weights" / "parity.json").read_text())
    assert (report["samples"], report["figures"]["file"]["accuracy"]) == (6, run.result["test/accuracy"])
    assert in_process("scripts/export.py", f"run={run.path}", "target=onnx_int8") == 1  # calibrated on its data
    assert "is no folder: give" in capsys.readouterr().err


# It changes the run, and so comes last.
def test_a_run_continues_with_the_new_folder(run: RunDir, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = run.result["steps"]
    longer = [f"resume={run.path}", "trainer.max_epochs=3", "data=image_folder"]
    assert in_process("train.py", *longer, f"data.folder={home / 'elsewhere'}") == 0
    assert run.result["steps"] == steps * 3 // 2
    assert run.config["data"]["folder"] == run.config["data"]["source"]["folder"] == str(home / "elsewhere")
    assert len(load(run.path).datamodule.train_dataloader()) == 6
    pictures(home / "other", dict.fromkeys(NAMES, 20), seed=2)
    capsys.readouterr()
    assert in_process("train.py", *longer, f"data.folder={home / 'other'}") == 1
    assert f"the command changes data.folder: {home / 'elsewhere'} -> {home / 'other'}" in capsys.readouterr().err
    (home / "elsewhere" / "fox").rename(home / "elsewhere" / "elk")
    capsys.readouterr()
    for place, said in {
        "elsewhere": "elk more and fox less",
        "nowhere": f"data.folder={home / 'nowhere'} is not a folder",
    }.items():
        assert in_process("scripts/evaluate.py", f"run={run.path}", f"data.folder={home / place}", *QUIET) == 1
        assert said in capsys.readouterr().err


# Unusable folders of images are refused before training; class names are never interpolated.


TWO = {"cat": 6, "dog": 6}


def bomb(path: Path) -> None:
    """A PNG whose header declares 10^9 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50000, 20000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))))


def listed(folder: Path, *lines: str) -> None:
    for name in ("list.txt", "val.txt"):
        (folder / name).write_text("\n".join(lines))


def splits(folder: Path, **classes: dict[str, int]) -> None:
    shutil.rmtree(folder)
    for name, counts in classes.items():
        pictures(folder / name, counts)


# The change of the folder, the source's settings, and words of the message.
CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "a class that is not validated": (
        lambda folder: splits(folder, train={"cat": 2, "dog": 2}, val={"cat": 2}),
        {},
        r"val and data\.source\.classes \(cat, dog\) differ in dog",
    ),
    "a picture that unpacks to too much": (
        lambda folder: bomb(folder / "cat" / "bomb.png"),
        {},
        r"cat/bomb\.png has 20000 x 50000 pixels",
    ),
    "a list of what is not there": (
        lambda folder: listed(folder, "cat/000.png", "dog/000.png", "cat/nine.png"),
        {"train": "list.txt"},
        r"lists cat/nine\.png, which are no images",
    ),
    "a list that leads out": (
        lambda folder: listed(folder, "cat/../../secret/x.png", "/etc/cat/x.png"),
        {"train": "list.txt"},
        "leads out of the folder",
    ),
    "a file in two splits": (
        lambda folder: listed(folder, "cat/000.png", "dog/000.png"),
        {"train": "list.txt", "val": "val.txt"},
        "is in train and val",
    ),
    "a split elsewhere": (
        lambda folder: pictures(folder.parent / "other", TWO),
        {"train": "../other"},
        r"leads out of data\.folder",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_trained_on_is_refused(case: str, tmp_path: Path) -> None:
    prepare, settings, words = CASES[case]
    folder = pictures(tmp_path / "photos", TWO)
    prepare(folder)
    with pytest.raises(UserError, match=words):
        ImageFolder(str(folder), str(tmp_path / "data"), **{"image_size": 4, **settings}).prepare()
    assert not list((tmp_path / "data").glob("*/photos*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"^data\.folder: a value has to be given"),
        (["data.folder=nope"], r"^data\.folder=nope is no folder"),
        (["data.folder=photos/cat"], "photos/cat has no folder in it"),
    ],
)
def test_a_missing_folder_is_refused_when_the_configuration_is_composed(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path / "photos", TWO)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        config("data=image_folder", *SMALL, *words)


@pytest.mark.parametrize(("name", "kind"), [("${oc.env:SECRET}", "folder"), ("\x1b[31m", "list")])
def test_names_of_classes_are_never_resolved(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data may come from a stranger, and the environment holds keys."""
    monkeypatch.setenv("SECRET", "hunter2")
    if kind == "folder":
        folder, words = pictures(tmp_path / "photos", {**TWO, name: 3}), []
    else:
        folder, words = pictures(tmp_path / "photos", TWO), ["data.source.train=list.csv"]
        (folder / "list.csv").write_text(f'path,label\ncat/000.png,"{name}"\n')
    with pytest.raises(UserError, match=r"has a class named '.*', expected printable characters without \$\{") as told:
        config("data=image_folder", f"data.folder={folder}", *SMALL, *words)
    assert repr(name) in str(told.value)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("place", ["cat/pipe.png", "list.csv"])
def test_a_pipe_is_not_waited_for(place: str, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", TWO)
    os.mkfifo(folder / place)
    train = place if place.endswith(".csv") else None
    with pytest.raises(UserError, match=r"pipe\.png is a folder, a pipe or a dev|list\.csv is no file: give one with"):
        ImageFolder(str(folder), str(tmp_path / "data"), image_size=4, train=train).prepare()


def test_folders_that_archives_and_tools_leave_are_not_classes(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", TWO)
    for name in ("__MACOSX", ".git", ".ipynb_checkpoints", ".thumbnails"):
        (folder / name).mkdir()
        (folder / "cat" / name).mkdir()
    assert class_names(str(folder)) == ["cat", "dog"]
    assert config("data=image_folder", f"data.folder={folder}")["data"]["num_classes"] == 2
    (folder / "__MACOSX" / "._000.png").write_bytes(b"\0\5\x16\7")
    shutil.rmtree(folder / "cat" / "__MACOSX")
    ImageFolder(str(folder), str(tmp_path / "data"), val_share=0.2, test_share=0.2).prepare()


def test_one_class_warns(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", {"cat": 6})
    with pytest.warns(UserWarning, match=r"^data\.folder=.*photos has one class, cat: expected a folder for each"):
        ImageFolder(str(folder), str(tmp_path / "data")).prepare()


def test_a_folder_that_the_source_does_not_read(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"num_classes": 10, "channels": 1, "image_size": 8, "mean": [0.3], "std": [0.3]}
    with pytest.raises(UserError, match=r"^data\.folder=x is not what the source Digits reads: leave it out, or choo"):
        ImageDataModule(Digits(), **facts, batch_size=8, folder="x")
