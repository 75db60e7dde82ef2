"""A checkpoint's file holds tensors of main memory, whatever device the run was on."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from lathe.callbacks import checkpoint_io


class Away(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


def test_what_lies_elsewhere_is_brought_and_the_rest_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_io, "_copied", lambda tensor, storages: "brought")
    here, away = torch.ones(2), torch.ones(2).as_subclass(Away)
    found = checkpoint_io.in_main_memory({"a": [here, away], "b": OrderedDict(c=(away, 1, "word"))})
    assert found == {"a": [here, "brought"], "b": OrderedDict(c=("brought", 1, "word"))}
    assert found["a"][0] is here


@pytest.mark.parametrize("kept", [checkpoint_io.in_main_memory, checkpoint_io.snapshot])
def test_a_modules_state_keeps_the_versions_of_its_parts(kept: Any) -> None:
    """By which a module tells what an earlier version of it has written."""
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    assert state._metadata["1"] == {"version": 2}
    assert kept({"state_dict": state})["state_dict"]._metadata == state._metadata
