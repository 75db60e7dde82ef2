"""What libraries say of a user's own code is told with its place and the way out."""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lathe.launch.telling import own_sentence, sentence_for


def raised(call: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of many kinds)
        call()
    assert isinstance(caught.value, Exception)
    return caught.value


@pytest.mark.parametrize("layer", [nn.Linear(6, 2), nn.Conv1d(6, 2, 1), nn.LayerNorm(6), nn.GRU(6, 6)])
@pytest.mark.parametrize("kind", [torch.float64, torch.int64])
def test_numbers_of_another_type_are_told_with_the_way_out(layer: nn.Module, kind: torch.dtype) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = layer(x)
            return found

    x = torch.zeros(3, 6, 1, dtype=kind) if isinstance(layer, nn.Conv1d) else torch.zeros(3, 6, dtype=kind)
    told = str(own_sentence(raised(lambda: Own()(x))))
    if not (isinstance(layer, nn.LayerNorm) and kind == torch.int64):  # which says that it has no such kernel
        assert "inputs and weights are numbers of different types: let the dataset give float32 (x.float()); H" in told


def test_what_lightning_refuses_of_a_users_call_is_told_with_its_place() -> None:
    def logs() -> None:
        raise MisconfigurationException("`self.log(on_step=False, on_epoch=False)`\nis not useful.")

    told = str(sentence_for(raised(logs)))
    assert re.fullmatch(rf"\S*logs at {re.escape(__file__)}:\d+: `self\.log\(.*\)` is not useful\.", told), told
    assert sentence_for(MisconfigurationException("No\nplace.")) == "No place."
