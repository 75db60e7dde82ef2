"""Images in folders and .npy files, read in batches or refused."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lathe.images
from lathe.errors import UserError
from lathe.images import find_images
from lathe.verbs.predict import Images


def save(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "images.npy", array)
    return folder / "images.npy"


def png_folder(tmp_path: Path, *sizes: tuple[int, ...]) -> Path:
    for number, size in enumerate(sizes):
        pixels = np.arange(np.prod(size), dtype=np.uint8).reshape(size)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return tmp_path


def test_images_are_read_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a batch and the next image are in memory."""
    folder = png_folder(tmp_path, *[(8, 8)] * 10)
    read = 0
    original = lathe.images.read_picture

    def counted(*args: Any) -> Any:
        nonlocal read
        read += 1
        return original(*args)

    monkeypatch.setattr("lathe.images.read_picture", counted)
    batches = Images(find_images(folder, 1), (8, 8), False, 4)
    assert [(len(batch), read) for batch in batches] == [(4, 5), (4, 9), (2, 10)]


def test_nets_for_any_size_get_batches_of_one_size(tmp_path: Path) -> None:
    batches = Images(find_images(png_folder(tmp_path, (4, 5), (4, 5), (6, 5), (4, 5)), 1), None, False, 8)
    assert [batch.shape for batch in batches] == [(2, 1, 4, 5), (1, 1, 6, 5), (1, 1, 4, 5)]


def test_arrays_that_are_no_images_are_refused(tmp_path: Path) -> None:
    for kind, channels, sentence in (
        (np.float32, 1, "images must be uint8, from 0 to 255"),
        (np.uint8, 3, "but the net takes images of 3 channels"),
    ):
        with pytest.raises(UserError, match=sentence):
            find_images(save(tmp_path, np.zeros((2, 8, 8), kind)), channels)


def test_files_that_cant_be_read_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, np.zeros((9, 8, 8), np.uint8))
    for content in (path.read_bytes()[:300], b"", b"PK\x03\x04 torn"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"images\.npy can't be read as a \.npy array"):
            find_images(path, 1)
    np.save(path, np.array([{"code": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="can't be read"):
        find_images(path, 1)


def test_a_header_of_any_kind_is_refused(tmp_path: Path) -> None:
    """Random shapes: numbers that overflow, none, and other types than numbers."""
    rng, path = random.Random(0), tmp_path / "images.npy"
    sides = [0, 1, 3, 8, -1, 2**31, 2**63 - 1, 2**63, 2**64 + 1, True, 8.0, None, "8", (8,)]
    for _ in range(200):
        shape = tuple(rng.choice(sides) for _ in range(rng.randrange(5)))
        header = {"descr": rng.choice(["|u1", "<f4", "|O", "nothing"]), "fortran_order": False, "shape": shape}
        text = repr(header).encode().ljust(117) + b"\n"
        values = bytes(rng.choice([0, 64, 512]))
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + values)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserError, match=f"^input={path}"):
                list(find_images(path, 1)[0].read())


def test_folders_without_images_and_images_of_another_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder has no"):
        find_images(tmp_path, 1)
    png_folder(tmp_path, (4, 4), (5, 5))
    with pytest.raises(UserError, match=r"1\.png has 5 x 5 pixels, but the net takes 4 x 4: resize=true"):
        Images(find_images(tmp_path, 1), (4, 4), False, 8)
