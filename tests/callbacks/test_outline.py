"""Readers that resume refuse a checkpoint that lacks an entry. Entries that may be edited by hand are not checked."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lathe.callbacks import AtomicCheckpointIO
from lathe.errors import UserError
from lathe.strategies.fsdp import FSDP


def checkpoint() -> dict[Any, Any]:
    return {
        "state_dict": OrderedDict(weight=torch.ones(2, 3), bias=torch.zeros(2)),
        "global_step": 7,
        "structure": {"quantization": {"head": {"bits": 8}}},
        "callbacks": {"support.own.Own": {"seen": [1, 2], "rate": 0.5, "name": "a\nb"}, "Empty": {}},
        7: [torch.Size([1, 2])],
    }


def written(folder: Path) -> Path:
    path = folder / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint(), path)
    return path


def edited(path: Path, place: str) -> Path:
    state = torch.load(path, weights_only=True)
    exec(place, {"state": state, "torch": torch})
    torch.save(state, path)
    return path


TAKEN = {
    "del state['global_step']": "something in `global_step` is not there",
    "del state['callbacks']['support.own.Own']": "something in `callbacks` is not there",
    "del state['callbacks']['support.own.Own']['seen'][1]": "something in `callbacks`",
    "state['callbacks']['support.own.Own']['seen'] = (1, 2)": "or is of another type or shape",
    "state['state_dict']['bias'] = torch.zeros(3)": "something in `state_dict`",
    "state['structure']['quantization'] = {}": "something in `structure`",
    "state['outline'] = 5": "something in `outline`",
}


@pytest.mark.parametrize("place", TAKEN)
def test_what_was_taken_out_is_noticed(place: str, tmp_path: Path) -> None:
    strategy = FSDP()
    strategy.checkpoint_io = AtomicCheckpointIO()
    path = written(tmp_path)
    assert strategy.load_checkpoint(path)["global_step"] == 7
    with pytest.raises(UserError) as caught:
        strategy.load_checkpoint(edited(path, place))
    assert f"checkpoint={path} is not as it was written: " in str(caught.value)
    assert TAKEN[place] in str(caught.value)
    assert "\n" not in str(caught.value)


ALLOWED = (
    "state['global_step'] = 8",
    "state['callbacks']['support.own.Own'].update(rate=0.25, name='c')",
    "state['callbacks'] = dict(reversed(state['callbacks'].items()))",
    "del state['outline']",  # as in a checkpoint of Lightning's
)


@pytest.mark.parametrize("place", ALLOWED)
def test_values_may_be_changed_and_names_added(place: str, tmp_path: Path) -> None:
    path = edited(written(tmp_path), place)
    assert AtomicCheckpointIO().load_checkpoint(path)
