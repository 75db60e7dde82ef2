"""Small folders of image files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def pictures(root: Path, counts: Mapping[str, int], seed: int = 0, suffix: str = ".png") -> Path:
    """Write `root`/<class>/<number>.png: noise of 9 to 40 pixels a side, tinted by class for the first three."""
    rng = np.random.default_rng(seed)
    for colour, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            height, width = rng.integers(9, 41, 2)
            pixels = rng.integers(0, 100, (height, width, 3), dtype=np.uint8)
            pixels[..., colour % 3] += 100
            Image.fromarray(pixels).save(root / name / f"{number:03}{suffix}")
    return root
