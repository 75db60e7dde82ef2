"""Sizes of the mesh."""

import pytest

from lathe.config.parallel_dims import Axes, axes, data_replicas
from lathe.errors import UserError


@pytest.mark.parametrize(
    ("strategy", "world", "sizes"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 6, (6, 1, 1)),
        ({"tensor": None, "data": 1}, 2, (1, 2, 1)),
        ({"tensor": 2, "data": None}, 8, (4, 2, 1)),
        ({"stages": 2}, 4, (2, 1, 2)),
        ({"data": None, "tensor": 2, "stages": 2}, 8, (2, 2, 2)),
        ({"data": 1, "tensor": 1, "stages": None}, 3, (1, 1, 3)),
    ],
)
def test_sizes_multiply_to_the_world(strategy: dict[str, int | None], world: int, sizes: tuple[int, int, int]) -> None:
    assert axes(strategy, world) == Axes(*sizes)
    assert data_replicas(strategy, world) == sizes[0]


def test_what_does_not_fit_is_refused() -> None:
    sentence = r"^strategy\.data=1 x strategy\.tensor=3 needs 3 processes, but trainer\.devices x .* = 2: change"
    with pytest.raises(UserError, match=sentence):
        axes({"tensor": 3, "data": 1}, 2)
