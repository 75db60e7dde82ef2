"""Writing shards: atomic, from folders of images and tar files of other tools, readable by webdataset."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.shards import pixels, write

from lathe.data.shard_write import FolderSamples, index_tars, write_shards
from lathe.data.shards import Shards
from lathe.errors import UserError


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    return write(tmp_path / "set", encoding="npy")


def test_webdataset_reads_the_same_samples(tmp_path: Path) -> None:
    import webdataset

    path = write(tmp_path / "set")
    with ExitStack() as stack:  # given only names, webdataset leaves its files to the garbage collector
        names = [path / f"train-{number:06d}.tar" for number in range(7)]
        sources = [{"url": str(name), "stream": stack.enter_context(open(name, "rb"))} for name in names]
        samples = webdataset.tariterators.group_by_keys(webdataset.tariterators.tar_file_expander(sources))
        read = list(webdataset.to_tuple("png", "cls")(webdataset.decode("rgb8")(samples)))
    images, labels = pixels()["train"]
    assert np.array_equal(np.stack([image for image, _ in read]).transpose(0, 3, 1, 2), images)
    assert [label for _, label in read] == labels.tolist()


def test_equal_images_make_equal_bytes(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name) for name in ("a", "b"))
    assert sorted(path.read_bytes() for path in one.iterdir()) == sorted(path.read_bytes() for path in two.iterdir())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"shape": (4, 8, 8)}, r"encoding=png takes 1 or 3 channels and the images have 4"),
        ({"num_classes": 3}, r"has the class \d, but there are 3"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        write(tmp_path / "set", **settings)
    assert list(tmp_path.iterdir()) == []


def test_shards_are_replaced_only_if_asked_and_nothing_else_ever_is(npy: Path) -> None:
    with pytest.raises(UserError, match=r"is there already: .*overwrite=true"):
        write(npy)
    write(npy, shard_size=25, overwrite=True)
    assert len(list(npy.glob("train-*.tar"))) == 2
    (npy / "index.json").unlink()
    with pytest.raises(UserError, match="it holds no shards"):
        write(npy, overwrite=True)


def save_folder(folder: Path, sizes: dict[str, int], splits: tuple[str, ...] = ("",)) -> None:
    rng = np.random.default_rng(0)
    for name in splits:
        for kind, count in sizes.items():
            (folder / name / kind).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (6, 10, 3), dtype=np.uint8)).save(
                    folder / name / kind / f"{i}.png"
                )


def test_an_image_folder_is_split_and_brought_to_size(tmp_path: Path) -> None:
    save_folder(tmp_path / "in", {"cat": 8, "dog": 12})
    source = FolderSamples(str(tmp_path / "in"), 3, 4, val_size=5, test_size=5)
    write_shards(tmp_path / "out", {name: source.samples(name) for name in source.files}, source.num_classes, 100)
    read = Shards("", str(tmp_path / "out")).load()
    assert read.train.images.shape == (10, 3, 4, 4)
    assert [len(read.train), len(read.val), len(read.test)] == [10, 5, 5]
    assert np.bincount(read.val.labels).tolist() == [2, 3]
    save_folder(tmp_path / "cut", {"cat": 2, "dog": 3}, ("train", "val", "test"))
    ready = FolderSamples(str(tmp_path / "cut"), 1, None, 1, 1)
    assert {image.shape for image, _ in ready.samples("test")} == {(1, 6, 10)}
    assert [label for _, label in ready.samples("val")] == [0, 0, 1, 1, 1]
    save_folder(tmp_path / "called", {"cat": 4, "dog": 4, ".cache": 1}, ("Training", "valid"))
    called = FolderSamples(str(tmp_path / "called"), 3, None, val_size=7, test_size=2)  # test is cut from train
    assert called.classes == ["cat", "dog"]
    assert {name: len(files) for name, files in called.files.items()} == {"train": 6, "test": 2, "val": 8}
    assert {path.parts[-3] for path, _ in called.files["test"]} == {"Training"}


def test_a_folder_with_a_damaged_image_is_refused(tmp_path: Path) -> None:
    save_folder(tmp_path, {"cat": 2, "dog": 2})
    (tmp_path / "cat" / "0.png").write_text("no image")
    source = FolderSamples(str(tmp_path), 3, None, val_size=1, test_size=1)
    with pytest.raises(UserError, match=r"0\.png cannot be read as an image"):
        [list(source.samples(name)) for name in ("train", "val", "test")]


def test_tars_of_another_tool_are_indexed_in_place(tmp_path: Path) -> None:
    from webdataset import TarWriter

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    for name in ("train", "val", "test"):
        with TarWriter(str(tmp_path / f"{name}-0.tar")) as tar:
            for i, image in enumerate(images):
                tar.write(
                    {"__key__": f"a.folder/{i}", "png" if i % 2 else "jpg": image, "cls": i % 3, "json": {"note": i}}
                )
    index_tars(tmp_path, 3)
    read, labels = Shards("", str(tmp_path), verify=True).load().val.read()
    assert np.array_equal(read[1::2], images[1::2].transpose(0, 3, 1, 2))
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
