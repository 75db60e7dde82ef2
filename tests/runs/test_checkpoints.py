"""Checkpoint files are read without running code, and their weights must fit the net."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lathe.errors import UserError
from lathe.runs.checkpoints import load_weights, read_checkpoint

GOOD = {"state_dict": {"weight": torch.ones(2, 3)}, "global_step": 7, "epoch": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(GOOD, tmp_path / "good.ckpt")
    return tmp_path / "good.ckpt"


def test_a_checkpoint_is_read(path: Path) -> None:
    state = read_checkpoint(path)
    assert state["global_step"] == 7
    assert torch.equal(state["state_dict"]["weight"], torch.ones(2, 3))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^ckpt_path=.*no\.ckpt: there is no such file"):
        read_checkpoint(tmp_path / "no.ckpt", "ckpt_path")


@pytest.mark.parametrize("content", [b"", b"text\n", b"PK\x03\x04 not really a zip", b"\x80\x04garbage"])
def test_a_file_of_another_kind_or_a_part_of_one_is_refused(path: Path, content: bytes) -> None:
    whole = path.read_bytes()
    for data in (content, whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"^ckpt_path=.*good\.ckpt (can't be read as|is not) a checkpoint"):
            read_checkpoint(path, "ckpt_path")


FITS = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"weight": torch.ones(2, 3)}, "it has no bias;"),
        (FITS | {"weight": torch.ones(2, 4)}, "weight is [2, 4] there and [2, 3] here;"),
        (FITS | {"z": torch.ones(1), "extra": torch.ones(1)}, "it also has extra;"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_none_is_loaded(weights: dict[str, torch.Tensor], message: str) -> None:
    net = nn.Linear(3, 2)
    before = net.weight.detach().clone()
    with pytest.raises(UserError) as caught:
        load_weights(net, weights, "a")
    assert str(caught.value).startswith(f"a does not fit this net: {message}")
    assert torch.equal(net.weight, before)
