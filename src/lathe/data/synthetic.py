"""Images from a generator with a known best accuracy."""

from typing import Annotated

import numpy as np
from pydantic import Field

from lathe.config.types import Count, Seed, Share
from lathe.config.validation import validated
from lathe.data import random
from lathe.data.splits import Images, Labels, Split, Splits
from lathe.errors import UserError

SIGNAL = 64  # half the distance, in pixel values, between a template's dark and bright cells
CANDIDATES = 64  # templates tried for each class; the one farthest from those chosen before is kept


class Synthetic:
    """One random chequered template per class, disturbed but always identifiable, with noisy labels.

    An image is its class's template, a `grid` x `grid` lattice of dark and bright cells for each channel. Then r random
    cells are inverted, r = floor(difficulty * floor((d - 1) / 2)), where d is the smallest number of cells in which two
    templates differ; and each pixel gets uniform noise smaller than half the step between dark and bright. By both
    bounds the nearest template is the image's class *with certainty*, so the only errors left are those of the labels:
    with probability `noise` a label is redrawn, uniformly from all C classes. Given the class k of an image, its label
    is k with probability 1 - noise + noise / C and each other with noise / C, so the Bayes rule is to answer k, and for
    every split

        best accuracy = 1 - noise + noise / C

    in expectation; on n samples with a standard deviation of sqrt(best * (1 - best) / n).

    The arguments are those of `source` in configs/data/synthetic.yaml, which describes them.

    Raises:
        UserError: there are more classes than different templates.
    """

    @validated
    def __init__(
        self,
        num_classes: Annotated[int, Field(ge=2)] = 10,
        channels: Count = 1,
        image_size: Annotated[int, Field(ge=4)] = 16,
        train_size: Count = 4096,
        val_size: Count = 1024,
        test_size: Count = 1024,
        noise: Share = 0.1,
        difficulty: Share = 0.5,
        seed: Seed = 0,
    ) -> None:
        self.num_classes = num_classes
        self.channels = channels
        self.image_size = image_size
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.noise = noise
        self.difficulty = difficulty
        self.seed = seed
        self.grid = min(8, image_size // 2)
        # the cell of each pixel along one side: cells differ by at most one pixel in size
        self.cell = np.arange(image_size) * self.grid // image_size
        self.templates, self.distance = self._draw_templates()
        self.flipped_cells = int(difficulty * ((self.distance - 1) // 2))
        self.pixel_noise = int(difficulty * (SIGNAL - 1))

    @property
    def best_accuracy(self) -> float:
        """Return the expected accuracy of the Bayes rule, on any split."""
        return 1 - self.noise + self.noise / self.num_classes

    def prepare(self) -> None:
        """Do nothing: images are drawn by `load`."""

    def load(self) -> Splits:
        """Return images uint8 [n, channels, image_size, image_size]."""
        return Splits(
            **{
                name: Split.whole(*self._draw(size, stream))
                for stream, (name, size) in enumerate(self.sizes.items(), 1)
            }
        )

    def _draw_templates(self) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], int]:
        """Return cells of -1 and 1, [classes, channels * grid * grid], and their smallest distance in cells."""
        rng = random.stream(self.seed, 0)
        cells = self.channels * self.grid**2
        chosen = rng.choice([-1, 1], size=(1, cells))
        smallest = cells
        while len(chosen) < self.num_classes:
            candidates = rng.choice([-1, 1], size=(CANDIDATES, cells))
            nearest = ((cells - candidates @ chosen.T) // 2).min(axis=1)
            best = int(nearest.argmax())
            smallest = min(smallest, int(nearest[best]))
            if smallest == 0:
                raise UserError(
                    f"data.num_classes={self.num_classes} is more than the different templates found on {cells} cells:"
                    " choose fewer classes, a larger data.image_size or more data.channels."
                )
            chosen = np.concatenate([chosen, candidates[best : best + 1]])
        return chosen, smallest

    def _draw(self, n: int, stream: int) -> tuple[Images, Labels]:
        rng = random.stream(self.seed, stream)
        classes = rng.integers(self.num_classes, size=n)
        cells = self.templates[classes]
        turned = rng.random(cells.shape).argsort(axis=1)[:, : self.flipped_cells]
        np.put_along_axis(cells, turned, -np.take_along_axis(cells, turned, axis=1), axis=1)
        pattern = cells.reshape(n, self.channels, self.grid, self.grid)[:, :, self.cell][:, :, :, self.cell]
        levels = rng.integers(-self.pixel_noise, self.pixel_noise + 1, size=pattern.shape, dtype=np.int16)
        images = (127 + SIGNAL * pattern.astype(np.int16) + levels).astype(np.uint8)
        redrawn = rng.random(n) < self.noise
        labels = np.where(redrawn, rng.integers(self.num_classes, size=n), classes)
        return images, labels.astype(np.int64)
