"""The stated ceiling is the accuracy of the Bayes rule on drawn data, and no classifier exceeds it."""

import numpy as np
import pytest

from lathe.data import Synthetic


@pytest.mark.parametrize(
    ("classes", "channels", "size", "noise", "difficulty"),
    [
        (10, 1, 16, 0.1, 0.5),
        (2, 1, 4, 0.5, 0.0),
        (10, 3, 32, 0.3, 1.0),
        (5, 1, 9, 0.2, 1.0),
        (20, 2, 8, 0.0, 0.7),
        (4, 1, 8, 1.0, 0.5),
    ],
)
def test_bayes_rule_reaches_the_formula(
    classes: int, channels: int, size: int, noise: float, difficulty: float
) -> None:
    n = 4000
    source = Synthetic(
        classes, channels, size, train_size=10, val_size=10, test_size=n, noise=noise, difficulty=difficulty
    )
    assert source.best_accuracy == pytest.approx(1 - noise + noise / classes)
    images, labels = source.load().test.read()
    assert images.shape == (n, channels, size, size)
    hits = (source.bayes_predict(images) == labels).mean()
    spread = np.sqrt(source.best_accuracy * (1 - source.best_accuracy) / n)
    assert abs(hits - source.best_accuracy) <= 4 * spread


def test_without_label_noise_the_rule_never_errs_at_any_difficulty() -> None:
    for difficulty in (0.0, 0.5, 1.0):
        source = Synthetic(num_classes=10, image_size=16, train_size=5000, noise=0.0, difficulty=difficulty)
        images, labels = source.load().train.read()
        assert np.array_equal(source.bayes_predict(images), labels)
        assert source.flipped_cells * 2 < source.distance


def test_splits_are_different_draws_and_the_seed_decides() -> None:
    first, again, other = (
        Synthetic(seed=seed, train_size=100, val_size=100, test_size=100).load() for seed in (0, 0, 1)
    )
    assert np.array_equal(first.train.images, again.train.images)
    assert not np.array_equal(first.train.images, first.test.images)
    assert not np.array_equal(first.train.images, other.train.images)
