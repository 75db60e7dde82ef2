"""The stated ceiling is the accuracy of the Bayes rule on drawn data, and no classifier exceeds it."""

import math

import numpy as np
import pytest

from lathe.data import Synthetic
from lathe.data.synthetic import SyntheticDocuments, SyntheticTokens
from lathe.data.tokens import find_documents


def bayes_rule(source: Synthetic, images: np.ndarray) -> np.ndarray:
    """Return the class of the nearest template for each image, by the mean over the pixels of each cell."""
    pooled = np.stack([images[..., source.cell == i].mean(-1) for i in range(source.grid)], axis=-1)
    pooled = np.stack([pooled[:, :, source.cell == i].mean(-2) for i in range(source.grid)], axis=-2)
    return np.argmax(np.sign(pooled.reshape(len(images), -1) - 127) @ source.templates.T, axis=1)


@pytest.mark.parametrize(
    ("classes", "channels", "size", "noise", "difficulty"),
    [
        (2, 1, 4, 0.5, 0.0),
        (10, 3, 16, 0.3, 1.0),
        (20, 2, 8, 0.0, 0.7),
    ],
)
def test_bayes_rule_reaches_the_formula(
    classes: int, channels: int, size: int, noise: float, difficulty: float
) -> None:
    n = 2000
    source = Synthetic(
        classes, channels, size, train_size=10, val_size=10, test_size=n, noise=noise, difficulty=difficulty
    )
    assert source.best_accuracy == pytest.approx(1 - noise + noise / classes)
    images, labels = source.load().test.read()
    assert images.shape == (n, channels, size, size)
    hits = (bayes_rule(source, images) == labels).mean()
    spread = np.sqrt(source.best_accuracy * (1 - source.best_accuracy) / n)
    assert abs(hits - source.best_accuracy) <= 4 * spread


def test_splits_are_different_draws_and_the_seed_decides() -> None:
    first, again, other = (
        Synthetic(seed=seed, train_size=100, val_size=100, test_size=100).load() for seed in (0, 0, 1)
    )
    assert np.array_equal(first.train.images, again.train.images)
    assert not np.array_equal(first.train.images, first.test.images)
    assert not np.array_equal(first.train.images, other.train.images)


# Synthetic documents have the stated lengths and entropy.


def test_the_synthetic_source_has_the_entropy_it_names() -> None:
    """A long sample's empirical code length under the true source is the entropy to within its spread."""
    source = SyntheticDocuments(vocab_size=17, shortest=3, longest=40, train_size=20000, noise=0.3, lag=2)
    documents = find_documents(source.load()["train"].ids, source.end)
    inner = documents.lengths - 1
    assert (inner.min(), inner.max()) == (3, 40)
    n = np.arange(3, 41)
    odds = np.log((n + 1) / n) / np.log(41 / 3)
    assert np.abs(np.bincount(inner, minlength=41)[3:] / 20000 - odds).max() < 0.01
    p, q = 1 - 0.3 + 0.3 / 16, 0.3 / 16
    nats, ids = -np.log(odds)[inner - 3].sum(), documents.ids.astype(int)
    for start, size in zip(documents.starts[:4000], inner[:4000], strict=True):
        text = ids[start : start + size]
        follows = text[2:] == source.chain.successor[text[:-2]]
        nats += np.where(follows, -np.log(p), -np.log(q)).sum() * 5 + min(size, 2) * np.log(16) * 5
    assert nats / documents.lengths.sum() == pytest.approx(source.entropy, rel=0.01)


# The source's entropy is the loss of its probabilities on its sequences, and a model can reach it.


CASES = [
    {"noise": 0.05, "vocab_size": 7},
    {"lag": 5, "length": 20},
    {"noise": 1.0, "vocab_size": 3},
    {"vocab_size": 70000, "length": 8},
]


def sequences(source: SyntheticTokens, split: str = "train") -> np.ndarray:
    return source.load()[split].ids.reshape(-1, source.length + 1).astype(np.int64)


@pytest.mark.parametrize("case", CASES)
def test_entropy_is_the_mean_loss_of_the_sources_own_probabilities(case: dict[str, float]) -> None:
    source = SyntheticTokens(**case)  # type: ignore[arg-type]
    losses = -source.log_probabilities(sequences(source)).mean(
        axis=1
    )  # sequences are independent, their tokens are not
    assert abs(losses.mean() - source.entropy) <= 3 * losses.std() / math.sqrt(len(losses)) + 1e-12


def test_the_probabilities_are_those_of_the_sequences() -> None:
    """Over all sequences of a tiny chain, probabilities sum to one and equal the frequencies."""
    source = SyntheticTokens(vocab_size=2, length=3, noise=0.4, lag=2, train_size=40000)
    every = np.array([[i >> 3 & 1, i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(16)])
    shares = np.exp(source.log_probabilities(every).sum(axis=1)) / 2  # the first token is uniform
    assert shares.sum() == pytest.approx(1)
    found = np.bincount(sequences(source) @ np.array([8, 4, 2, 1]), minlength=16) / 40000
    assert np.abs(found - shares).max() < 4 * math.sqrt(0.25 / 40000)
