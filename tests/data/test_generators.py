"""The global generators are left as they were, to the last half of a pair of draws, and no draw is overlooked."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lathe.data.generators import GENERATORS, Global, NumPy, Python, Torch, put_back, watched
from lathe.data.random import hashed_seed, sample_seeds

DRAWS: dict[str, tuple[type[Global], Callable[[], Any]]] = {
    "random": (Python, random.random),
    "random's normal": (Python, lambda: random.gauss(0, 1)),
    "random's bits": (Python, lambda: random.getrandbits(1)),
    "shuffle": (Python, lambda: random.shuffle([1, 2, 3])),
    "numpy": (NumPy, np.random.rand),
    "numpy's normal": (NumPy, np.random.normal),
    "numpy's permutation": (NumPy, lambda: np.random.permutation(3)),
    "torch": (Torch, lambda: torch.rand(())),
    "torch's normal": (Torch, lambda: torch.randn(())),
    "torch's many": (Torch, lambda: torch.randn(100)),
}


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        yield


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("before", [0, 1, 700])
def test_a_draw_is_seen_and_undone(name: str, before: int) -> None:
    kind, draw = DRAWS[name]
    for _ in range(before):  # after an odd number of normal draws the second of a pair is left over
        draw()
    states = random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()  # type: ignore[index]
    with put_back() as taken:
        draw()
        moved = {type(g) for g, one in zip(GENERATORS, taken, strict=True) if g.moved(one)}
    assert moved == {kind}
    assert random.getstate() == states[0]
    now = np.random.get_state()[1:3]  # type: ignore[index]
    assert now[0].tolist() == states[1][0].tolist()  # type: ignore[index,union-attr]
    assert now[1] == states[1][1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert watched(draw)[1]
    assert watched(lambda: 5) == (5, False)


def test_generators_are_put_back_when_a_dataset_fails() -> None:
    def fails() -> None:
        random.random()
        raise ZeroDivisionError

    state = random.getstate()
    with pytest.raises(ZeroDivisionError):
        watched(fails)
    assert random.getstate() == state
    assert np.random.get_state()[0] == "MT19937"  # type: ignore[index]


def test_the_seeds_of_a_batch_are_those_of_its_samples() -> None:
    rows = [0, 5, 10**9]
    assert sample_seeds(-3, rows, 7) == [hashed_seed(-3, f"sample {row}", 7) for row in rows]
    assert sample_seeds(0, [1, 2], 0) == [7198330153459917495, 65179983866782543]  # which runs before this had
