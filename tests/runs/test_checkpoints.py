"""Checkpoint files are read without running code, and their weights must fit the net."""

import pickle
from pathlib import Path
from typing import Any

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
    with pytest.raises(UserError, match=r"^ckpt_path=last: .*: name its run, such as ckpt_path=logs/latest\.$"):
        read_checkpoint(Path("last"), "ckpt_path")


@pytest.mark.parametrize("content", [b"", b"text\n", b"PK\x03\x04 not really a zip", b"\x80\x04garbage"])
def test_a_file_of_another_kind_or_a_part_of_one_is_refused(path: Path, content: bytes) -> None:
    whole = path.read_bytes()
    for data in (content, whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"^ckpt_path=.*good\.ckpt (can't be read as|is not) a checkpoint"):
            read_checkpoint(path, "ckpt_path")


class Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_code_in_a_file_does_not_run(path: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was run"
    trap = {**GOOD, "extra": Trap(mark)}
    for save in (lambda: torch.save(trap, path), lambda: path.write_bytes(pickle.dumps(trap))):
        save()
        with pytest.raises(UserError, match=r"^resume=.*(loading it could run code\.$|can't be read as a checkpoint)"):
            read_checkpoint(path, "resume")
    assert not mark.exists()


@pytest.mark.parametrize("content", [[1, 2], {"weight": torch.ones(2)}, {"state_dict": {}}])
def test_a_torch_file_without_a_checkpoint_is_refused(path: Path, content: Any) -> None:
    torch.save(content, path)
    with pytest.raises(UserError, match=r"is not a checkpoint of a run"):
        read_checkpoint(path)


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
