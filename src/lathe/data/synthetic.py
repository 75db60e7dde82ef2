"""Generated images, tokens and documents with a known best accuracy or loss."""

import math
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lathe.config.types import Count, Seed, Share
from lathe.config.validation import validated
from lathe.data import random
from lathe.data.splits import Images, Labels, Split, Splits
from lathe.data.tokens import Tokens
from lathe.errors import ArgumentError, UserError

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
        self.num_classes, self.channels, self.image_size = num_classes, channels, image_size
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.noise, self.seed = noise, seed
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
        templates = rng.choice([-1, 1], size=(1, cells))
        smallest = cells
        while len(templates) < self.num_classes:
            candidates = rng.choice([-1, 1], size=(CANDIDATES, cells))
            nearest = ((cells - candidates @ templates.T) // 2).min(axis=1)
            best = int(nearest.argmax())
            smallest = min(smallest, int(nearest[best]))
            if smallest == 0:
                raise UserError(
                    f"data.num_classes={self.num_classes} is more than the different templates found on {cells} cells:"
                    " choose fewer classes, a larger data.image_size or more data.channels."
                )
            templates = np.concatenate([templates, candidates[best : best + 1]])
        return templates, smallest

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


class SyntheticTokens:
    """Sequences of a Markov chain: each token follows from the one `lag` places before, or is redrawn.

    A fixed random permutation s maps each token to its successor. A sequence starts with `lag` tokens drawn uniformly;
    then the token at place t is s(token at t - lag) with probability 1 - noise, and drawn uniformly from all V tokens
    else. Each step keeps the uniform distribution, so the chain is stationary from its first token on. Given the past,
    a token is the successor with probability p = 1 - noise + noise / V and each other one with q = noise / V, so its
    entropy in nats is

        h = -p ln p - (V - 1) q ln q

    No model can have a lower expected loss, or a higher accuracy than p. The first lag - 1 of a sequence's `length`
    targets follow from nothing (entropy ln V): see `entropy`. With lag 1 a table of pairs of tokens reaches the bound;
    with more the net needs context.

    The arguments are those of `source` in configs/data/synthetic_tokens.yaml, which describes them.
    """

    @validated
    def __init__(
        self,
        vocab_size: Annotated[int, Field(ge=2)] = 32,
        length: Count = 32,
        train_size: Count = 2048,
        val_size: Count = 512,
        test_size: Count = 512,
        noise: Share = 0.2,
        lag: Count = 1,
        seed: Seed = 0,
    ) -> None:
        if lag > length:
            raise ArgumentError(f"lag={lag} is more than length={length}: choose at most that.")
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.vocab_size, self.length, self.noise, self.lag, self.seed = vocab_size, length, noise, lag, seed
        self.dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self.successor = random.stream(self.seed, 0).permutation(vocab_size).astype(self.dtype)

    @property
    def entropy(self) -> float:
        """Return the lowest expected loss, nats per target: ((lag - 1) ln V + (length - lag + 1) h) / length."""
        p, q = self._odds
        h = -p * math.log(p) - (self.vocab_size - 1) * (q * math.log(q) if q else 0.0)
        return ((self.lag - 1) * math.log(self.vocab_size) + (self.length - self.lag + 1) * h) / self.length

    @property
    def best_accuracy(self) -> float:
        """Return the highest expected accuracy on sequences of `length` targets."""
        return ((self.lag - 1) / self.vocab_size + (self.length - self.lag + 1) * self._odds[0]) / self.length

    @property
    def _odds(self) -> tuple[float, float]:
        """Return the probabilities p of the successor and q of each other token."""
        q = self.noise / self.vocab_size
        return 1 - self.noise + q, q

    def prepare(self) -> None:
        """Do nothing: sequences are drawn by `load`."""

    def load(self) -> dict[str, Tokens]:
        """Return sequences of length + 1 tokens, concatenated."""
        return {
            name: Tokens(self._draw(size, stream).reshape(-1), sequences=True)
            for stream, (name, size) in enumerate(self.sizes.items(), 1)
        }

    def log_probabilities(self, sequences: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the source's ln P(token | past), [n, length], of the targets in sequences [n, length + 1]."""
        p, q = self._odds
        follows = sequences[:, self.lag :] == self.successor[sequences[:, : -self.lag]]
        with np.errstate(divide="ignore"):  # without noise, other tokens are impossible
            steps = np.where(follows, math.log(p), np.log(np.float64(q)))
        starts = np.full((len(sequences), self.lag - 1), -math.log(self.vocab_size))
        return np.concatenate([starts, steps], axis=1)

    def _draw(self, n: int, stream: int) -> NDArray[np.uint16] | NDArray[np.uint32]:
        rng = random.stream(self.seed, stream)
        # redrawn tokens; the others are overwritten by their successors, place by place
        tokens: NDArray[Any] = rng.integers(self.vocab_size, size=(n, self.length + 1), dtype=self.dtype)
        follows = rng.random(tokens.shape) >= self.noise
        for position in range(self.lag, self.length + 1):
            successors = self.successor[tokens[:, position - self.lag]]
            tokens[:, position] = np.where(follows[:, position], successors, tokens[:, position])
        return tokens


class SyntheticDocuments:
    """Random-length prefixes of the sequences of `SyntheticTokens`, each ended by `vocab_size - 1`.

    A document has L tokens before its end, P(L = n) = ln((n + 1) / n) / ln((longest + 1) / shortest) for shortest <= n
    <= longest: many short ones, few long ones, as in text. With U = vocab_size - 1 tokens other than the end, and h the
    entropy of a step of the chain, a document carries H(L) + E[min(L, lag)] ln U + E[max(L - lag, 0)] h nats in E[L] +
    1 targets.

    The arguments are those of `source` in configs/data/documents.yaml, which describes them.
    """

    @validated
    def __init__(
        self,
        vocab_size: Annotated[int, Field(ge=3)] = 64,
        shortest: Count = 4,
        longest: Annotated[int, Field(ge=2)] = 127,
        train_size: Count = 4096,
        val_size: Count = 256,
        test_size: Count = 256,
        noise: Share = 0.2,
        lag: Count = 1,
        seed: Seed = 0,
    ) -> None:
        if shortest > longest:
            raise ArgumentError(f"shortest={shortest} is more than longest={longest}: choose at most that.")
        self.chain = SyntheticTokens(vocab_size - 1, longest - 1, train_size, val_size, test_size, noise, lag, seed)
        self.vocab_size, self.end = vocab_size, vocab_size - 1
        self.shortest, self.longest, self.seed = shortest, longest, seed

    @property
    def entropy(self) -> float:
        """Return the lowest expected loss, in nats per target, the ends included."""
        n = np.arange(self.shortest, self.longest + 1)
        odds = np.log((n + 1) / n) / math.log((self.longest + 1) / self.shortest)
        uniform, lag = math.log(self.vocab_size - 1), self.chain.lag
        step = (self.chain.entropy * self.chain.length - (lag - 1) * uniform) / (self.chain.length - lag + 1)
        nats = -odds * np.log(odds) + odds * (np.minimum(n, lag) * uniform + np.maximum(n - lag, 0) * step)
        return float(nats.sum() / (odds * (n + 1)).sum())

    def prepare(self) -> None:
        """Do nothing: documents are drawn by `load`."""

    def load(self) -> dict[str, Tokens]:
        """Return one stream for each split, each document ended by `end`."""
        return {
            name: Tokens(self._shorten(tokens, stream))
            for stream, (name, tokens) in enumerate(self.chain.load().items(), 1)
        }

    def _shorten(self, tokens: Tokens, stream: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        sequences = tokens.ids.reshape(-1, self.longest)
        uniforms = random.stream(self.seed, 2**32 + stream).random(len(sequences))
        spread = math.log((self.longest + 1) / self.shortest)
        lengths = np.minimum((self.shortest * np.exp(uniforms * spread)).astype(np.int64), self.longest)
        ended = np.concatenate([sequences, np.zeros_like(sequences[:, :1])], axis=1)
        np.put_along_axis(ended, lengths[:, None], self.end, axis=1)
        return ended[np.arange(self.longest + 1) <= lengths[:, None]]
