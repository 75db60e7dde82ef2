"""MNIST and Fashion-MNIST from small files in the real format: reading, downloads and refusals."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fashion import idx, write

from lathe.data import Mnist
from lathe.data.published import IDX_FILES
from lathe.errors import UserError

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def source(tmp_path: Path, files: Any, **settings: Any) -> Mnist:
    given = {"folder": str(tmp_path / "files"), "val_size": 10, **settings}
    return Mnist("fashion_mnist", str(tmp_path / "data"), files=files, **given)


@pytest.mark.parametrize("compressed", [True, False])
def test_the_images_and_labels_that_went_in_from_a_folder(tmp_path: Path, compressed: bool) -> None:
    files, truth = write(tmp_path / "files", compressed)
    data = source(tmp_path, files)
    data.prepare()
    splits = data.load()
    for split, key in ((splits.train, "train"), (splits.val, "train"), (splits.test, "test")):
        images, labels = split.read()
        assert np.array_equal(images[:, 0], truth[key][0][split.rows])
        assert np.array_equal(labels, truth[key][1][split.rows])
    assert np.array_equal(np.sort(np.concatenate([splits.train.rows, splits.val.rows])), np.arange(60))
    assert np.bincount(splits.val.read()[1]).tolist() == [1] * 10
    other = source(tmp_path, files, split_seed=1)
    assert not np.array_equal(other.load().val.rows, splits.val.rows)
    assert isinstance(splits.train.images, np.memmap)
    for file in (tmp_path / "files").iterdir():
        file.unlink()  # later runs do not need them
    source(tmp_path, files).prepare()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.source\.folder=.*files is no folder"):
        source(tmp_path, None).prepare()
    files, _ = write(tmp_path / "files")
    (tmp_path / "files" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=r"files has no t10k-labels-idx1-ubyte\.gz"):
        source(tmp_path, files).prepare()
    assert not list(tmp_path.rglob("*.npy"))


def test_other_contents_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    files, _ = write(tmp_path / "files")
    real = idx(np.zeros((60, 28, 28), np.uint8))
    for content in (real, real[:-1], b"hello"):
        (tmp_path / "files" / f"{IMAGES}.gz").write_bytes(gzip.compress(content))
        with pytest.raises(UserError, match=r"SHA-256 hash \w+ and not the published"):
            source(tmp_path, files).prepare()
    assert not list(tmp_path.rglob("*.npy"))


def test_a_file_that_unpacks_to_more_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = write(tmp_path / "files")
    path = tmp_path / "files" / f"{IMAGES}.gz"
    path.write_bytes(gzip.compress(bytes(50_000_000), 1))
    read: list[int] = []
    plain = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda file, size=-1: read.append(size) or plain(file, size))
    with pytest.raises(UserError, match="SHA-256"):
        source(tmp_path, files).prepare()
    assert read == [16 + 60 * 784 + 1]


def test_it_is_fetched_checked_and_fetched_once(serve: Callable, tmp_path: Path) -> None:
    files, truth = write(tmp_path / "files")
    server = serve((tmp_path / "files" / f"{IMAGES}.gz").read_bytes())  # it has this file alone, under every name
    for name in ("train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{name}.gz").rename(tmp_path / "data" / f"{name}.gz")
    data = source(tmp_path, files, folder=None, base_url=server.url)
    data.prepare()
    assert np.array_equal(data.load().test.read()[1], truth["test"][1])
    data.prepare()
    assert len(server.asked) == 1


def test_each_data_set_has_its_own_files(tmp_path: Path) -> None:
    files, truth = write(tmp_path / "files")
    data = Mnist("mnist", str(tmp_path / "data"), str(tmp_path / "files"), val_size=10, files=files)
    data.prepare()
    assert np.array_equal(data.load().test.read()[0][:, 0], truth["test"][0])
    assert sorted(path.name for path in (tmp_path / "data").glob("*.npy")) == ["mnist-test.npy", "mnist-train.npy"]
    with pytest.raises(UserError, match="SHA-256 hash"):  # these are not the published images
        Mnist("mnist", str(tmp_path / "other"), str(tmp_path / "files")).prepare()
    published = {file.sha256 for splits in IDX_FILES.values() for pair in splits.values() for file in pair}
    assert len(published) == 8
