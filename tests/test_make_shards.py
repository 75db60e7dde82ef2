"""scripts/make_shards.py: the real command, and one message for each mistake."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.commands import check, run
from support.runs import SMALL, config, new_run

from lathe.data.digits import Digits
from lathe.data.shards import Shards
from lathe.errors import UserError
from lathe.runs.export_model import class_names
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.make_shards import make_shards


def make(tmp_path: Path, *overrides: str) -> tuple[Path, dict[str, Any]]:
    return make_shards(config(*overrides, f"paths.data_dir={tmp_path}", name="make_shards"))


@pytest.mark.slow
def test_the_command_writes_digits_and_says_how_to_train_on_them(tmp_path: Path) -> None:
    words = ("shard_size=500", "output=written", f"paths.data_dir={tmp_path}")
    done = check(run(*words, cwd=tmp_path, script="scripts/make_shards.py"))
    assert "{'train': 1300, 'val': 200, 'test': 297} images" in done.stdout
    facts = "data.num_classes=10 data.channels=1 data.image_size=8"
    assert f"data=shards data.source.name={tmp_path / 'written'} {facts}" in done.stdout
    assert "'data.mean=[0.3054]' 'data.std=[0.3759]'" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} - {"logs"} == {"written"}
    read = Shards(str(tmp_path), "written", verify=True)
    read.prepare()
    for name in ("train", "val", "test"):
        ours, theirs = getattr(read.load(), name).read(), getattr(Digits().load(), name).read()
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_other_data_sets_and_folders_of_images(tmp_path: Path) -> None:
    sizes = ("data.source.train_size=20", "data.source.val_size=5", "data.source.test_size=5")
    folder, index = make(tmp_path, "data=synthetic", "encoding=npy", "shard_size=8", "output=made", *sizes)
    assert folder == tmp_path / "made"
    assert ([len(split["shards"]) for split in index["splits"].values()], index["image"]) == ([3, 1, 1], [1, 16, 16])
    for kind in ("cat", "dog"):
        (tmp_path / "files" / kind).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (9, 7), (i, 0, 0)).save(tmp_path / "files" / kind / f"{i}.jpg")
    asked = ("images.channels=1", "images.image_size=4", "images.val_size=2", "images.test_size=2", "output=cats")
    _, index = make(tmp_path, f"images.folder={tmp_path / 'files'}", *asked)
    assert (index["num_classes"], index["image"], index["splits"]["train"]["shards"][0]["samples"]) == (2, [1, 4, 4], 4)
    _, again = make(tmp_path, f"tars.folder={folder}", "tars.num_classes=10")
    assert again["splits"]["train"]["shards"] == Shards("", str(folder)).index["splits"]["train"]["shards"]
    with pytest.raises(UserError, match=r"has classes from \d to \d, but tars\.num_classes=3: "):
        make(tmp_path, f"tars.folder={folder}", "tars.num_classes=3")


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    for word, sentence in (
        ("data=documents", "only image data sets are written as shards"),
        ("images.folder=nowhere", r"images\.folder=nowhere is no folder"),
    ):
        with pytest.raises(UserError, match=sentence):
            make(tmp_path, word)
    assert list(tmp_path.iterdir()) == []


def test_names_of_class_folders_reach_the_answers(tmp_path: Path) -> None:
    for number, kind in enumerate(("zebra", "ant")):  # not in their sorted order
        (tmp_path / "files" / kind).mkdir(parents=True)
        for i in range(8):
            Image.new("L", (8, 8), 40 * number + i).save(tmp_path / "files" / kind / f"{i}.png")
    asked = ("images.channels=1", "images.val_size=4", "images.test_size=4", "output=set")
    folder, index = make(tmp_path, f"images.folder={tmp_path / 'files'}", *asked)
    assert index["class_names"] == ["ant", "zebra"]
    facts = (f"data.source.name={folder}", "data.num_classes=2", "data.batch_size=4", "data.pin_memory=false")
    cfg = new_run(
        tmp_path / "logs", "data=shards", *SMALL, *facts, "trainer.max_epochs=1", "trainer.log_every_n_steps=1"
    )
    train(cfg)
    saved = RunDir(Path(cfg["paths"]["run_dir"])).config
    assert class_names(saved) == ["ant", "zebra"]
    assert saved | {"trusted": []} == cfg | {"data": cfg["data"] | {"class_names": ["ant", "zebra"]}}
