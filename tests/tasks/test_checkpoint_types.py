"""A run writes only checkpoints that can be read again: other values are reported with their place."""

import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_lightning import QUICK
from support.runs import new_run, rows
from torch import nn

import lathe
from lathe.errors import UserError
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.rundir import RunDir
from lathe.tasks.checkpoint_types import check_checkpoint, without_numpy
from lathe.training.train import train

NET = "features: 16, classes: 2, width: 4"


def run(folder: Path, *words: str, module: str = "own_lightning.LitNet", **data: Any) -> dict[str, Any]:
    net = f"model.net={{_target_: support.{module}, {NET}}}"
    best = ("callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=min")
    cfg = new_run(folder, *QUICK, *best, net, "trainer.max_epochs=1", *words)
    cfg["data"] = {"_target_": "support.own_values.Listed", **data}
    return cfg


def test_lists_of_every_part_are_plain_and_the_run_is_tested(tmp_path: Path) -> None:
    options = {"pair": [1, [2]], "named": {"a": [0.5]}}
    cfg = run(tmp_path, mean=[0.3, 0.5], more={"a": [1, {"b": 2}]})
    cfg["callbacks"]["own"] = {"_target_": "support.own_values.Shown", **options}
    assert train(cfg)["test_seen"] > 0
    state = read_checkpoint(RunDir(cfg["paths"]["run_dir"]).best)
    assert state["datamodule_hyper_parameters"] == {"mean": [0.3, 0.5], "more": {"a": [1, {"b": 2}]}, "folder": None}
    assert [type(state["shown"][name]) for name in options] == [list, dict]
    assert {name: state["shown"][name] for name in options} == options


WRITERS = {
    "state_dict of a callback": ("own_lightning.LitNet", "callbacks.Keeping.rates[1]"),
    "on_save_checkpoint of the module": ("own_values.KeepingModule", "mine.rate"),
    "state_dict of the data": ("own_lightning.LitNet", "KeepingData.seen"),
    "get_extra_state": ("own_values.KeepingExtra", "state_dict._extra_state"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_value_that_is_not_plain_is_told_at_the_first_write(tmp_path: Path, writer: str) -> None:
    module, place = WRITERS[writer]
    cfg = run(tmp_path, module=module)
    if "Keeping." in place:
        cfg["callbacks"]["own"] = {"_target_": "support.own_values.Keeping"}
    elif "Data" in place:
        cfg["data"]["_target_"] = "support.own_values.KeepingData"
    with pytest.raises(UserError) as caught:
        train(cfg)
    assert str(caught.value).startswith(f"checkpoint: {place} is a ")
    assert not list(Path(cfg["paths"]["run_dir"]).rglob("*.ckpt"))
    assert (rows(Path(cfg["paths"]["run_dir"])) == []) == ("module" in writer)  # tried before the first step


def test_numbers_of_numpy_are_written_as_numbers_and_objects_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = run(tmp_path, module="own_values.Numbers")
    train(cfg)
    assert "leave out the hyper-parameters scaler" in capsys.readouterr().out
    state = torch.load(RunDir(cfg["paths"]["run_dir"]).last, weights_only=True)
    rate = 0.05 * (1 + math.cos(math.pi * state["global_step"] / 100))
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(rate)
    assert state["mine"] == {"rate": 0.25}
    assert state["hyper_parameters"]["rate"] == 0.5
    assert "scaler" not in state["hyper_parameters"]


def test_a_schedule_kept_as_an_attribute_goes_on(tmp_path: Path) -> None:
    """Two epochs, the second resumed, have the learning rates of two epochs at once."""
    whole = run(tmp_path / "whole", "trainer.max_epochs=2", module="own_values.OwnSchedule")
    train(whole)
    parts = run(tmp_path / "parts", module="own_values.OwnSchedule")
    train(parts)
    parts["trainer"]["max_epochs"] = 2
    train(parts)
    one, two = (torch.load(RunDir(cfg["paths"]["run_dir"]).last, weights_only=True) for cfg in (whole, parts))
    assert one["optimizer_states"][0]["param_groups"][0]["lr"] == two["optimizer_states"][0]["param_groups"][0]["lr"]
    for name, value in one["state_dict"].items():
        assert torch.equal(value, two["state_dict"][name])


def test_a_module_may_keep_a_part_out_of_its_checkpoints(tmp_path: Path) -> None:
    cfg = run(tmp_path, module="own_values.Adapter")
    train(cfg)
    assert not any("frozen" in name for name in read_checkpoint(RunDir(cfg["paths"]["run_dir"]).best)["state_dict"])
    assert lathe.load(cfg["paths"]["run_dir"], trusted=["support"]).net.frozen.weight.shape == (2, 2)


def test_what_is_read_today_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[Any] = [None, {"b": (1, 2.0)}]
    own.append(own)  # as pickle writes it
    named = torch.ones(1)
    named.number = 3
    check_checkpoint(
        {
            "state_dict": nn.Linear(1, 1).state_dict(),
            "values": [None, True, 1, 2.5, "a", b"a", 1j, {1, 2}, bytearray(b"a"), Counter("a"), OrderedDict(a=own)],
            "torch": [torch.float32, torch.device("cpu"), torch.Size([1]), torch.ones(2).to_sparse(), named],
            "parameter": nn.Parameter(torch.ones(1)),
            3: {(1, "a"): 2},
        }
    )
    assert without_numpy(own) is own
    check_checkpoint({"sharded": defaultdict(list, a=[1])}, mappings=True)  # a dict in the file
    monkeypatch.setattr(torch, "save", None)  # a usual checkpoint is not copied
    check_checkpoint({"state_dict": nn.Linear(1, 1).state_dict(), "loops": {"a": {1: [2, "b"]}}, "parts": (own, 1.5)})
