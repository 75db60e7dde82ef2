"""Classes of images that are not part of any data set."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lathe.config import require
from lathe.data import Normalizer
from lathe.errors import UserError
from lathe.evaluate import check_request, rebuild


def predict(cfg: dict[str, Any]) -> int:
    """Writes a line for each image of `input` to the CSV `output`, whole or not at all, and returns how many.

    Raises:
        UserError: images that can't be read or do not fit the net, or what `rebuild` raises.
    """
    request, facts = cfg["request"], cfg["data"]
    require(
        cfg["trainer"]["devices"] in (1, "auto"), f"trainer.devices={cfg['trainer']['devices']}: prediction runs on one device."
    )
    output = Path(request["output"])
    check_request(request)
    names, images = read_images(Path(request["input"]), facts["channels"])
    images = fit(images, facts["image_size"], request["resize"])
    task, datamodule, trainer = rebuild(cfg)
    batch_size = request["batch_size"] or datamodule.eval_batch_size
    batches = ImageBatches(images, batch_size, Normalizer(datamodule.mean, datamodule.std, datamodule.channels))
    outputs = trainer.predict(task, dataloaders=batches)
    probabilities = torch.cat([torch.as_tensor(logits).float() for logits in outputs or []]).softmax(dim=1)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "prediction", "probability"])
            for name, row in zip(names, probabilities, strict=True):
                best = int(row.argmax())
                writer.writerow([name, best, f"{float(row[best]):.6f}"])
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{len(names)} predictions in {output}")
    return len(names)


class ImageBatches:
    """Normalised batches [batch, channels, height, width] of uint8 images, in order."""

    def __init__(self, images: Tensor, batch_size: int, normalizer: Normalizer) -> None:
        self.images, self.batch_size, self.normalizer = images, batch_size, normalizer

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.images.split(self.batch_size):
            yield self.normalizer(batch)


def read_images(path: Path, channels: int) -> tuple[list[str], Tensor]:
    """Names, or numbers, and uint8 images [n, channels, height, width] of a .npy file or a folder of .png files.

    Raises:
        UserError: nothing there, or not images of that kind.
    """
    if path.is_dir():
        return _read_folder(path, channels)
    require(path.is_file(), f"input={path}: there is no such file or folder.")
    try:
        with open(path, "rb") as file:
            array = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, BadZipFile) as error:
        raise UserError(
            f"input={path} can't be read as a .npy array: give one of uint8 images, or a folder of .png files."
        ) from error
    require(isinstance(array, np.ndarray) and array.dtype == np.uint8, f"input={path}: images must be uint8, from 0 to 255.")
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[1] != channels and array.shape[3] == channels:
        array = array.transpose(0, 3, 1, 2)
    require(
        array.ndim == 4 and array.shape[1] == channels and len(array) > 0,
        f"input={path} has shape {list(array.shape)}, but the net takes images of {channels} channels: give [n, height, width, {channels}]"
        f" or [n, {channels}, height, width].",
    )
    return [str(index) for index in range(len(array))], torch.from_numpy(np.ascontiguousarray(array))


def _read_folder(path: Path, channels: int) -> tuple[list[str], Tensor]:
    from PIL import Image, UnidentifiedImageError

    files = sorted(path.glob("*.png"))
    require(bool(files), f"input={path}: the folder has no .png files.")
    require(channels in (1, 3), f"input={path}: PNG images have 1 or 3 channels, but the net takes {channels}; give a .npy file.")
    pixels = []
    for file in files:
        try:
            with Image.open(file, formats=["PNG"]) as image:
                pixels.append(np.asarray(image.convert("L" if channels == 1 else "RGB")))
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise UserError(f"input={file} can't be read as a PNG image.") from error
    sizes = {image.shape[:2] for image in pixels}
    require(len(sizes) == 1, f"input={path}: the images have {len(sizes)} different sizes; make them equal first.")
    stacked = torch.from_numpy(np.stack(pixels))
    return [file.name for file in files], stacked[:, None] if channels == 1 else stacked.permute(0, 3, 1, 2).contiguous()


def fit(images: Tensor, size: int, resize: bool) -> Tensor:
    """The images at `size` x `size` pixels.

    Raises:
        UserError: they have another size and `resize` is off.
    """
    if images.shape[-2:] == (size, size):
        return images
    found = f"{images.shape[-2]} x {images.shape[-1]}"
    require(resize, f"input has images of {found} pixels, but the net takes {size} x {size}: resize=true scales them.")
    scaled = F.interpolate(images.float(), size=(size, size), mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).to(torch.uint8)
