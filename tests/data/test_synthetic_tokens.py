"""The source's entropy is the loss of its probabilities on its sequences, and a model can reach it."""

import math

import numpy as np
import pytest

from lathe.data.synthetic_tokens import SyntheticTokens

CASES = [
    {},
    {"noise": 0.05, "vocab_size": 7},
    {"lag": 5, "length": 20},
    {"noise": 1.0, "vocab_size": 3},
    {"vocab_size": 70000, "length": 8},
    {"lag": 8, "length": 8},
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


def test_entropy_by_hand() -> None:
    # one of two tokens follows with 3/4: -(3/4 ln 3/4 + 1/4 ln 1/4)
    assert SyntheticTokens(vocab_size=2, noise=0.5).entropy == pytest.approx(0.5623351446)
    assert SyntheticTokens(vocab_size=2, noise=0.5).best_accuracy == 0.75
    assert SyntheticTokens(noise=0).entropy == 0
    assert SyntheticTokens(noise=1).entropy == pytest.approx(math.log(32))
    # the first of 4 targets has no predecessor to follow from
    assert SyntheticTokens(vocab_size=2, noise=0.5, lag=2, length=4).entropy == pytest.approx(
        (math.log(2) + 3 * 0.5623351446) / 4
    )


def test_the_probabilities_are_those_of_the_sequences() -> None:
    """Over all sequences of a tiny chain, probabilities sum to one and equal the frequencies."""
    source = SyntheticTokens(vocab_size=2, length=3, noise=0.4, lag=2, train_size=40000)
    every = np.array([[i >> 3 & 1, i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(16)])
    shares = np.exp(source.log_probabilities(every).sum(axis=1)) / 2  # the first token is uniform
    assert shares.sum() == pytest.approx(1)
    found = np.bincount(sequences(source) @ np.array([8, 4, 2, 1]), minlength=16) / 40000
    assert np.abs(found - shares).max() < 4 * math.sqrt(0.25 / 40000)


def test_splits_and_seeds_differ_and_repeat() -> None:
    same, other = SyntheticTokens(train_size=256), SyntheticTokens(train_size=256, seed=1)
    first = sequences(same)
    assert np.array_equal(first, sequences(SyntheticTokens(train_size=256)))
    assert not np.array_equal(first, sequences(other))
    assert not np.array_equal(first, sequences(same, "val"))
    assert not np.array_equal(sequences(same, "test"), sequences(same, "val"))
    assert [len(sequences(SyntheticTokens(test_size=3), split)) for split in ("train", "val", "test")] == [2048, 512, 3]
