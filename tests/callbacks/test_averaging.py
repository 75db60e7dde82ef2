"""One moving average for those who evaluate it and those who learn from it; states that were saved earlier go on."""

import pytest
import torch
from torch import nn

from lathe.callbacks.averaging import MovingAverage
from lathe.callbacks.methods.teachers import Average


@pytest.mark.parametrize(("warmup", "decays"), [(True, [1 / 10, 2 / 11, 3 / 12]), (False, [0.9] * 3)])
def test_it_is_the_one_on_paper(warmup: bool, decays: list[float]) -> None:
    moving = MovingAverage(0.9, warmup)
    moving.tensors = [torch.ones(2)]
    expected = 1.0
    for number, decay in enumerate(decays):
        moving.update([torch.full((2,), float(number))])
        expected = decay * expected + (1 - decay) * number
    assert moving.updates == 3
    torch.testing.assert_close(moving.tensors[0], torch.full((2,), expected))


def test_the_first_weights_are_copied_in_at_least_float32() -> None:
    moving, weights = MovingAverage(0.5), [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)]
    moving.update(weights)
    weights[1].zero_()
    assert [tensor.dtype for tensor in moving.tensors] == [torch.float32, torch.float64]
    assert moving.tensors[1].tolist() == [1.0, 1.0]


def test_a_teacher_takes_the_state_that_earlier_runs_have_saved() -> None:
    net = nn.Linear(2, 1)
    saved = {"updates": 7, "average": {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}}
    teacher = Average(net, 0.9)
    teacher.load_state_dict(saved)
    teacher.bind(net)
    teacher.update()
    decay = 8 / 17
    wanted = decay * saved["average"]["weight"] + (1 - decay) * net.weight.detach()  # type: ignore[index]
    torch.testing.assert_close(teacher.net.weight.detach(), wanted)
    assert teacher.state_dict()["updates"] == 8
    assert teacher.state_dict().keys() == saved.keys()
