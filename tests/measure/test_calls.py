"""Arguments of a net: cut to a batch, saved as plain data, run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.measure.calls import Call, run

CALL = Call((torch.arange(12.0).view(4, 3),), {"more": [torch.ones(4), {"scale": torch.tensor(2.0)}], "name": "a"})


class Net(nn.Module):
    def forward(self, x: Tensor, more: Any, name: str) -> Tensor:
        return x.mul_(more[1]["scale"]) + more[0].unsqueeze(1)


def test_a_call_is_cut_and_named() -> None:
    cut = CALL[:2]
    shapes = {place: tuple(tensor.shape) for place, tensor in cut.tensors().items()}
    assert shapes == {"0": (2, 3), "more.0": (2,), "more.1.scale": ()}
    assert (CALL.samples(), cut.samples(), cut.kwargs["name"]) == (4, 2, "a")
    assert CALL.example is CALL
    assert Call((torch.ones(2),)).example.shape == (2,)


def test_a_net_may_write_into_its_input() -> None:
    first, second = run(Net(), CALL), run(Net(), CALL)
    assert torch.equal(first, second)
    assert torch.equal(first, 2 * torch.arange(12.0).view(4, 3) + 1)


def test_a_saved_call_holds_its_own_numbers_alone(tmp_path: Path) -> None:
    path = tmp_path / "example.pt"
    Call((torch.zeros(10**6)[:2],)).save(path)
    assert path.stat().st_size < 10**4
    CALL.save(path)
    found = Call.load(path)
    assert torch.equal(run(Net(), found), run(Net(), CALL))
    torch.save({"x": torch.ones(2)}, path)
    assert Call.load(path).kwargs["x"].shape == (2,)
    path.write_bytes(b"none")
    with pytest.raises(UserError, match=r"model.example=.*example.pt"):
        Call.load(path)
