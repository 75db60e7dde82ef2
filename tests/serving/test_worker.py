"""A worker's answers to a batch."""

import numpy as np
import pytest

from lathe.serving.worker import compute


def sums(x: np.ndarray) -> np.ndarray:
    """Return sum and first pixel of each image; raise for images with a 13."""
    if (x == 13).any():
        raise ValueError("unlucky")
    return np.stack([x.sum(axis=(1, 2, 3)), x[:, 0, 0, 0]], axis=1)


def test_requests_are_computed_together_and_get_their_own_rows() -> None:
    sizes: list[int] = []

    def counted(x: np.ndarray) -> np.ndarray:
        sizes.append(len(x))
        return sums(x)

    inputs = [np.full((rows, 1, 2, 2), rows, np.uint8) for rows in (1, 3, 2)]
    found = compute(counted, inputs)
    assert sizes == [6]
    assert [part.tolist() for part in found] == [[[4.0, 1.0]], [[12.0, 3.0]] * 3, [[8.0, 2.0]] * 2]
    assert all(part.dtype == np.float32 for part in found)


def test_other_shapes_are_computed_apart() -> None:
    inputs = [np.ones((1, 1, 2, 2), np.uint8), np.ones((1, 1, 4, 4), np.uint8), np.ones((2, 1, 2, 2), np.uint8)]
    assert [part[:, 0].tolist() for part in compute(sums, inputs)] == [[4.0], [16.0], [4.0, 4.0]]


def test_an_input_that_the_net_cant_take_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    inputs = [np.full((1, 1, 2, 2), value, np.uint8) for value in (1, 13, 2)]
    found = compute(sums, inputs)
    assert found[1] is None
    assert [found[0].tolist(), found[2].tolist()] == [[[4.0, 1.0]], [[8.0, 2.0]]]
    assert "unlucky" in caplog.text
