"""Law 6 for inputs: an image file gives the same tensor in training, predictions, an export and the server."""

import io
import tarfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lathe.data import Normalizer
from lathe.data.checks import squashed
from lathe.data.shards import FolderSamples, ShardDataModule, Shards, index_tars, write_shards
from lathe.errors import UserError
from lathe.export.inputs import Preprocess
from lathe.images import find_images
from lathe.runs.export_model import make_preprocess
from lathe.runs.instantiate import instantiate
from lathe.serving.decode import Limits, decode
from lathe.verbs.predict import Images

MEAN, STD, SIDE = [0.5, 0.4, 0.3], [0.2, 0.3, 0.25], 8
LIMITS = Limits(body=2**20, pixels=10000, samples=10, tokens=10)
TYPES = {".jpg": "image/jpeg", ".png": "image/png"}


def photo(turn: int) -> bytes:
    """Return a JPEG of 30 x 21 pixels with the EXIF orientation `turn`, asymmetric in light and colour."""
    rows, columns = np.mgrid[0:21, 0:30]
    scene = np.stack([columns * 8, rows * 12, 255 - columns * 4 - rows * 4], axis=-1).astype(np.uint8)
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = turn
    Image.fromarray(scene).save(file, "JPEG", quality=95, exif=exif)
    return file.getvalue()


def sticker() -> bytes:
    """Return a PNG of 12 x 20 pixels whose transparent part is black."""
    pixels = np.zeros((20, 12, 4), np.uint8)
    pixels[6:14, 3:9] = (200, 30, 90, 255)
    pixels[9:11, 3:9, 3] = 128
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


CONTENTS = {f"{turn}.jpg": photo(turn) for turn in range(1, 9)} | {"9.png": sticker()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "val", "test"):
        path = tmp_path / "photos" / split / "all"
        path.mkdir(parents=True)
        for name, content in CONTENTS.items():
            (path / name).write_bytes(content)
    return tmp_path / "photos"


def trained_on(folder: Path, out: Path) -> torch.Tensor:
    """Return the images as in training, through shards and the loader: float32 [n, 3, SIDE, SIDE]."""
    source = FolderSamples(str(folder), 3, SIDE, 1, 1)
    splits: dict[str, Iterator[tuple[np.ndarray, int]]] = {
        name: source.samples(name) for name in ("train", "val", "test")
    }
    write_shards(out, splits, 1, 100)
    module = ShardDataModule(
        Shards("", str(out)), num_classes=1, channels=3, image_size=SIDE, mean=MEAN, std=STD, batch_size=3, seed=0
    )
    module.prepare_data()
    module.setup("fit")
    return torch.cat([batch[0] for batch in module.eval_loader("train")])[: len(CONTENTS)]


def test_a_file_gives_equal_tensors_in_training_prediction_and_the_server(folder: Path, tmp_path: Path) -> None:
    expected = trained_on(folder, tmp_path / "shards")
    normalizer = Normalizer(MEAN, STD, 3)
    predicted = Images(find_images(folder / "train" / "all", 3), (SIDE, SIDE), resize=True, batch_size=2)
    assert torch.equal(torch.cat([normalizer(torch.from_numpy(batch)) for batch in predicted]), expected)
    facts = {"input": {"shape": ["batch", 3, SIDE, SIDE]}}
    sent = [decode(content, TYPES[Path(name).suffix], facts, LIMITS)[0] for name, content in CONTENTS.items()]
    graph = Preprocess(MEAN, STD, (SIDE, SIDE))
    assert torch.equal(graph(torch.from_numpy(np.concatenate(sent))), expected)
    any_size = {"input": {"shape": ["batch", 3, "height", "width"]}}
    for row, (name, content) in zip(expected, CONTENTS.items(), strict=True):
        pixels = torch.from_numpy(decode(content, TYPES[Path(name).suffix], any_size, LIMITS)[0])
        scaled = Preprocess(MEAN, STD, (SIDE, SIDE), "any")(pixels)[0]
        assert float((scaled - row).abs().max()) <= 1.01 / 255 / min(STD)  # the graph does not round to whole pixels


def test_squashed_files_too(tmp_path: Path) -> None:
    for label in ("one", "two"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for name, content in CONTENTS.items():
            (tmp_path / "photos" / label / name).write_bytes(content)
    data = {"_target_": "lathe.data.ImageFolder", "resize": "squash", "image_size": SIDE}
    source = instantiate(data, "data.source", folder=str(tmp_path / "photos"), data_dir=str(tmp_path), val_share=0.2)
    source.prepare()
    files = sorted(CONTENTS)
    trained = source.load().train.images[: len(files)]
    middle = np.concatenate(list(Images(find_images(tmp_path / "photos" / "one", 3), (SIDE, SIDE), True, 4)))
    assert not np.array_equal(middle, trained)
    assert squashed({"source": data})
    predicted = Images(find_images(tmp_path / "photos" / "one", 3), (SIDE, SIDE), True, 4, squashed({"source": data}))
    assert np.array_equal(np.concatenate(list(predicted)), trained)
    facts = {"input": {"shape": ["batch", 3, SIDE, SIDE]}, "preprocess": {"squash": True}}
    sent = [decode(CONTENTS[name], TYPES[Path(name).suffix], facts, LIMITS)[0] for name in files]
    assert np.array_equal(np.concatenate(sent), trained)
    facts = {"mean": MEAN, "std": STD, "image_size": SIDE, "source": data}
    make_preprocess({"data": facts})
    with pytest.raises(UserError, match=r"^target\.input_size=any scales the middle of images, but data\.source"):
        make_preprocess({"data": facts}, "any")


def test_what_they_give_is_the_scene_as_it_was_seen(folder: Path, tmp_path: Path) -> None:
    """Rotated pictures show one scene, nothing is squeezed, and transparent pixels are white."""
    found = (
        trained_on(folder, tmp_path / "shards") * torch.tensor(STD).view(1, 3, 1, 1)
        + torch.tensor(MEAN).view(1, 3, 1, 1)
    ) * 255
    upright = found[0]
    unturned = {
        2: lambda x: x.flip(2),
        3: lambda x: x.flip(1, 2),
        4: lambda x: x.flip(1),
        5: lambda x: x.transpose(1, 2),
        6: lambda x: x.rot90(1, (1, 2)),
        7: lambda x: x.flip(1, 2).transpose(1, 2),
        8: lambda x: x.rot90(-1, (1, 2)),
    }
    for turn, undo in unturned.items():
        assert float((undo(found[turn - 1]) - upright).abs().max()) <= 3, turn
    # red grows by 8 a column, and a pixel of the result has 21 / 8 columns of the middle 21 of 30
    assert torch.allclose(upright[0].mean(0), (4.5 + (torch.arange(8) + 0.5) * 21 / 8 - 0.5) * 8, atol=4)
    assert found[8, :, 0].min() >= 254
    assert torch.allclose(found[8, :, 2, 4].round(), torch.tensor([200.0, 30.0, 90.0]), atol=1)


def test_tars_of_another_tool_are_read_likewise(folder: Path, tmp_path: Path) -> None:
    """The shards have the original files: rotated photos and transparent stickers too."""
    for split in ("train", "val", "test"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            for number, (name, content) in enumerate(CONTENTS.items()):
                if number not in (0, 2, 8):  # of one shape: landscape scenes, as the index has one
                    continue
                image = content if name.endswith("jpg") else wide_sticker()
                for part, data in ((Path(name).suffix, image), (".cls", b"0")):
                    info = tarfile.TarInfo(f"{number}{part}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    index = index_tars(tmp_path, 1)
    assert index["image"] == [3, 21, 30]
    read, _ = Shards("", str(tmp_path)).load().val.read()
    any_size = {"input": {"shape": ["batch", 3, "height", "width"]}}
    bodies = [(CONTENTS["1.jpg"], "image/jpeg"), (CONTENTS["3.jpg"], "image/jpeg"), (wide_sticker(), "image/png")]
    assert np.array_equal(read, np.concatenate([decode(body, kind, any_size, LIMITS)[0] for body, kind in bodies]))
    assert (read[2, :, 0] == 255).all()


def wide_sticker() -> bytes:
    """Return the sticker in the photos' size, in a palette with a transparent colour."""
    file = io.BytesIO()
    image = Image.open(io.BytesIO(sticker())).resize((30, 21), Image.Resampling.NEAREST)
    image.quantize(20).save(file, "PNG")
    return file.getvalue()


def test_a_file_is_read_as_what_it_is_whatever_it_is_called(tmp_path: Path) -> None:
    """Large folders have a few PNG files called .jpg: training accepts them, so predictions do."""
    classes = tmp_path / "in" / "all"
    classes.mkdir(parents=True)
    for name in ("a.jpg", "b.png", "c.webp"):
        (classes / name).write_bytes(sticker())
    source = FolderSamples(str(tmp_path / "in"), 3, None, 1, 1)
    trained = [pixels for pixels, _ in chain.from_iterable(source.samples(name) for name in source.rows)]
    predicted = [next(file.read()) for file in find_images(classes, 3)]
    assert len(trained) == len(predicted) == 3
    assert all(np.array_equal(pixels, predicted[0]) for pixels in (*trained, *predicted))
