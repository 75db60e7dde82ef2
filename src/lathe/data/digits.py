"""The handwritten digits in the package: 1,797 real images, no download."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch.nn.functional import interpolate

from lathe.config.types import Count, Seed
from lathe.config.validation import validated
from lathe.data.splits import Split, Splits, stratified_split

DIGITS = Path(__file__).with_name("digits.npz")


class Digits:
    """8 x 8 grey images of the digits 0 to 9, optionally enlarged; values 0..16 are scaled to 0..255.

    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (CC BY 4.0; see digits.md).

    The arguments are those of `source` in configs/data/digits.yaml, which describes them.
    """

    num_classes = 10

    @validated
    def __init__(
        self,
        image_size: Annotated[int, Field(ge=8)] = 8,
        val_size: Count = 200,
        test_size: Count = 297,
        split_seed: Seed = 0,
    ) -> None:
        self.image_size = image_size
        self.sizes = {"val": val_size, "test": test_size}
        self.split_seed = split_seed

    def prepare(self) -> None:
        """Do nothing: the images are part of the package."""

    def load(self) -> Splits:
        """Return images uint8 [n, 1, image_size, image_size]."""
        with np.load(DIGITS, allow_pickle=False) as digits:
            pixels, labels = digits["images"], digits["labels"].astype(np.int64)
        scaled = torch.from_numpy(pixels).float()[:, None] * (255 / 16)
        if self.image_size != 8:
            scaled = interpolate(scaled, size=(self.image_size, self.image_size), mode="bilinear", align_corners=False)
        images = scaled.round().to(torch.uint8).numpy()
        rows = stratified_split(labels, self.sizes, self.split_seed)
        return Splits(**{name: Split(images, labels, rows[name]) for name in ("train", "val", "test")})
