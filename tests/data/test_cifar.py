"""CIFAR from tiny archives in the real formats: reading, caching and refusals."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.data import Cifar
from lathe.data.published import ARCHIVES, Archive
from lathe.errors import UserError

FORMS = pytest.mark.parametrize("form", ["binary", "python"])
NAMES = pytest.mark.parametrize("name", ["cifar10", "cifar100"])


def source(folder: Path, archive: Archive, name: str = "cifar10", **settings: Any) -> Cifar:
    return Cifar(name, str(folder), archives=[archive], **({"download": False, "val_size": 20} | settings))  # type: ignore[arg-type]


@FORMS
@NAMES
def test_both_archives_give_the_images_and_labels_that_went_in(
    cifar_files: Callable, tmp_path: Path, name: str, form: str
) -> None:
    archive, truth = cifar_files(name, form)
    # a cifar100 train file has only 20 images; 5 are kept
    data = source(tmp_path, archive, name, val_size=20 if name == "cifar10" else 5)
    data.prepare()
    splits = data.load()
    for split, key in ((splits.train, "train"), (splits.val, "train"), (splits.test, "test")):
        images, labels = split.read()
        assert np.array_equal(images, truth[key][0][split.rows])
        assert np.array_equal(labels, truth[key][1][split.rows])
    together = np.concatenate([splits.train.rows, splits.val.rows])
    assert np.array_equal(np.sort(together), np.arange(len(truth["train"][1])))
    assert np.isin([f"{name}-train.npy", f"{name}-test.npy"], os.listdir(tmp_path)).all()
    assert isinstance(splits.train.images, np.memmap)


def test_damaged_npy_is_made_again(cifar_files: Callable, tmp_path: Path) -> None:
    archive, truth = cifar_files("cifar10", "binary")
    source(tmp_path, archive).prepare()
    kept = tmp_path / "cifar10-train.npy"
    kept.write_bytes(kept.read_bytes()[:1000])
    source(tmp_path, archive).prepare()
    assert np.array_equal(source(tmp_path, archive).load().train.images, truth["train"][0])


def test_wrong_hash_is_refused_before_the_archive_is_opened(
    cifar_files: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, _ = cifar_files("cifar10", "binary")
    path = tmp_path / archive.file
    path.write_bytes(path.read_bytes()[:-100])  # cut in half
    monkeypatch.setattr("tarfile.open", lambda *_: pytest.fail("opened"))
    with pytest.raises(UserError, match=r"cifar-10-binary\.tar\.gz has the MD5 hash .* delete it"):
        source(tmp_path, archive).prepare()
    assert not list(tmp_path.glob("*.npy"))


def test_malicious_pickle_is_refused_and_not_obeyed(
    tmp_path: Path, tar_gz: Callable, malicious_pickle: tuple[bytes, Path]
) -> None:
    data, obeyed = malicious_pickle
    real = ARCHIVES["cifar10"][1]
    md5 = tar_gz(tmp_path / real.file, {name: data for names in real.members.values() for name in names})
    with pytest.raises(UserError, match="it names"):
        source(tmp_path, Archive(real.file, md5, real.members, labels=real.labels)).prepare()
    assert not obeyed.exists()
    pickle.loads(data)
    assert obeyed.exists()  # unpickling would execute it
