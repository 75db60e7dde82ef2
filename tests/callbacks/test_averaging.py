"""One moving average for those who evaluate it and those who learn from it; states that were saved earlier go on."""

import pytest
import torch

from lathe.callbacks.ema import MovingAverage


@pytest.mark.parametrize(("warmup", "decays"), [(True, [1 / 10, 2 / 11, 3 / 12]), (False, [0.9] * 3)])
def test_moving_average_follows_the_formula(warmup: bool, decays: list[float]) -> None:
    moving = MovingAverage(0.9, warmup)
    moving.tensors = [torch.ones(2)]
    expected = 1.0
    for number, decay in enumerate(decays):
        moving.update([torch.full((2,), float(number))])
        expected = decay * expected + (1 - decay) * number
    assert moving.updates == 3
    torch.testing.assert_close(moving.tensors[0], torch.full((2,), expected))
