"""Pictures as arrays: layouts, scaling and headers. tests/serving/test_decode.py covers layouts of arrays."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image

from lathe.export.inputs import Preprocess
from lathe.images import READERS, PictureError, TooLarge, kind_of, picture_size, read_picture, scaled


def test_scaling_is_that_of_the_graphs_up_to_rounding() -> None:
    """That of exports with target.input_size: for one shape, torch's antialiased filter."""
    picture = np.random.default_rng(0).integers(0, 256, (3, 19, 31), dtype=np.uint8)
    given = torch.from_numpy(picture)[None]
    for size in ((8, 8), (40, 16), (19, 7), (38, 62), (1, 1)):
        found = scaled(picture, size)
        assert (found.shape, found.dtype) == ((3, *size), np.uint8)
        for sides in ("any", picture.shape[1:]):
            exact = Preprocess([0.0] * 3, [1.0] * 3, size, sides)(given)[0].numpy() * 255
            assert np.abs(found - exact).max() <= 1.01  # it rounds after each axis
    assert scaled(picture, (19, 31)) is picture


def test_the_middle_is_scaled_and_nothing_is_squeezed() -> None:
    scene = np.zeros((1, 8, 24), np.uint8)
    scene[:, :, 8:16] = np.arange(64).reshape(8, 8)
    assert np.array_equal(scaled(scene, (8, 8)), scene[:, :, 8:16])
    assert np.array_equal(scaled(scene.transpose(0, 2, 1), (8, 8)), scene[:, :, 8:16].transpose(0, 2, 1))
    for height, width in ((1, 40), (33, 7), (500, 499), (3, 4)):  # the window is clipped at the border
        assert (scaled(np.full((1, height, width), 9, np.uint8), (16, 12)) == 9).all()


def test_every_shape_is_scaled_to_every_size() -> None:
    """Includes windows that begin at 0 up to rounding: 225 by 300 pixels to 28, 224 or 299."""
    sides = [*range(1, 40), 58, 116, 123, 225, 232, 239, 246, 253, 299, 300, 450, 457, 464, 600]
    draw = random.Random(0)
    for side in (1, 7, 28, 112, 224, 299):
        for height in sides:
            picture = np.full((1, height, draw.choice(sides)), 9, np.uint8)
            for given in (picture, picture.transpose(0, 2, 1)):
                assert (scaled(given, (side, side)) == 9).all()


def test_kinds_are_found_by_how_a_file_begins() -> None:
    for kind in READERS:
        file = io.BytesIO()
        Image.new("RGB", (3, 2), (1, 2, 3)).save(file, kind)
        assert kind_of(file.getvalue()[:12]) == kind
        assert read_picture(io.BytesIO(file.getvalue()), kind, 3, 6).shape == (3, 2, 3)
    assert kind_of(b"GIF89a") is None


def test_a_header_tells_the_size_without_the_pixels() -> None:
    out, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 8
    noise = np.random.default_rng(0).integers(0, 256, (20, 30), dtype=np.uint8)
    Image.fromarray(noise).save(out, "JPEG", exif=turned, quality=95)
    cut = out.getvalue()[:-300]
    assert picture_size(io.BytesIO(cut), "JPEG", 600) == (30, 20)
    assert read_picture(io.BytesIO(out.getvalue()), "JPEG", 1, 600).shape == (1, 30, 20)
    with pytest.raises(PictureError, match="can't be read as a JPEG image"):
        read_picture(io.BytesIO(cut), "JPEG", 1, 600)
    with pytest.raises(TooLarge, match="has 20 x 30 pixels, more than 599"):
        picture_size(io.BytesIO(cut), "JPEG", 599)
    with pytest.raises(PictureError, match="can't be read as a PNG image"):
        picture_size(io.BytesIO(cut), "PNG", 600)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animations_are_refused(kind: str) -> None:
    frames, file = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "green")], io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    for read in (lambda: picture_size(file, kind, 100), lambda: read_picture(file, kind, 3, 100)):
        file.seek(0)
        with pytest.raises(PictureError, match=r"^is animated, 3 frames, expected one picture$"):
            read()


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    """Each scan of a progressive JPEG takes a pass over all pixels, and may be a few bytes long."""
    file, noise = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    assert read_picture(io.BytesIO(content), "JPEG", 3, 4096).shape == (3, 64, 64)
    last = content.rindex(b"\xff\xda")
    bomb = content[:-2] + content[last:-2] * 100 + content[-2:]
    with pytest.raises(PictureError, match="has more than 100 scans"):
        read_picture(io.BytesIO(bomb), "JPEG", 3, 4096)
