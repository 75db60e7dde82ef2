"""A run writes only checkpoints that are opened again: arguments are plain, and other values are told with a place."""

from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from support.own_lightning import QUICK, LitNet
from support.own_values import ODD
from support.runs import new_run
from torch import nn

from lathe.errors import UserError
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.rundir import RunDir
from lathe.tasks import LightningTask
from lathe.tasks.plain import check_checkpoint
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


@pytest.mark.parametrize("data", ["InFolder", "Listed"])
def test_hyper_parameters_of_the_data_are_told_before_training(tmp_path: Path, data: str) -> None:
    """A default that is a path, and what a user's `_convert_: none` hands over."""
    cfg = run(tmp_path)
    cfg["data"] = {"_target_": f"support.own_values.{data}"}
    if data == "Listed":
        cfg["data"] |= {"folder": [1], "_convert_": "none"}
    kind = "ListConfig" if data == "Listed" else r"\w*Path"
    with pytest.raises(UserError, match=rf"^data: support\.own_values\.{data} keeps folder, a {kind}, by save_hyperp"):
        train(cfg)
    assert not RunDir(cfg["paths"]["run_dir"]).begun


def test_hyper_parameters_that_are_a_configuration_are_told() -> None:
    class Configured(LitNet):
        def __init__(self, options: Any) -> None:
            super().__init__()
            self._set_hparams(options)
            self._hparams_name = "options"

    with pytest.raises(UserError, match=r"^model\.net: .*Configured keeps options, a DictConfig, by save_hyperparamet"):
        LightningTask(Configured(OmegaConf.create({"lr": 0.1})))


def test_all_that_no_checkpoint_holds_is_told_at_once() -> None:
    """As modules of other templates keep what Hydra makes of their nodes."""

    class Keeping(LitNet):
        def __init__(self, net: Any, optimizer: Any, width: int) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    made = instantiate({"_target_": "torch.optim.Adam", "_partial_": True})
    told = (
        r"keeps net, a Linear, and optimizer, a partial, by save_hyperparameters, .*ignore=..net., .optimizer.\]\), "
        r"and what is read as self\.hparams\.net as an attribute of your own, self\.net = net\.$"
    )
    with pytest.warns(UserWarning, match="already saved"), pytest.raises(UserError, match=told):
        LightningTask(Keeping(nn.Linear(2, 2), made, 3))


WRITERS = {
    "state_dict of a callback": ([], {}, "callbacks.Keeping.rates[1]"),
    "in a thread": (["callbacks.checkpoint.async=true"], {}, "callbacks.Keeping.rates[1]"),
    "on_save_checkpoint of the module": ([], {"module": "own_values.KeepingModule"}, "mine.rate"),
    "state_dict of the data": ([], {}, "KeepingData.seen"),
    "get_extra_state": ([], {"module": "own_values.KeepingExtra"}, "state_dict._extra_state"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_value_that_is_not_plain_is_told_at_the_first_write(tmp_path: Path, writer: str) -> None:
    words, options, place = WRITERS[writer]
    cfg = run(tmp_path, *words, **options)
    if "Keeping." in place:
        cfg["callbacks"]["own"] = {"_target_": "support.own_values.Keeping", "what": "scalar"}
    elif "Data" in place:
        cfg["data"]["_target_"] = "support.own_values.KeepingData"
    with pytest.raises(UserError) as caught:
        train(cfg)
    assert str(caught.value).startswith(
        f"checkpoint: {place} is of type {'dict, and w' if 'extra' in place else 'numpy.'}"
    )
    assert not list(Path(cfg["paths"]["run_dir"]).rglob("*.ckpt"))


@pytest.mark.parametrize("kind", ODD)
def test_the_sentence_has_place_kind_and_way_out(kind: str) -> None:
    value, words = ODD[kind]
    with pytest.raises(UserError, match=rf"^checkpoint: callbacks\.Own\[1\]\.rate is of type {words}\(\.\.\.\) there"):
        check_checkpoint({"state_dict": {}, "callbacks": {"Own": [0, {"rate": value}]}})


def test_keys_and_what_tensors_carry_are_looked_at_too() -> None:
    with pytest.raises(UserError, match=r"^checkpoint: the key \S*Path\('x'\) of seen is of type pathlib"):
        check_checkpoint({"seen": {Path("x"): 1}})
    weight = torch.ones(1)
    weight.origin = Path("x")
    with pytest.raises(UserError, match=r"^checkpoint: weights\.a\.origin is of type pathlib"):
        check_checkpoint({"weights": {"a": weight}})
    state = nn.Linear(1, 1).state_dict()
    state._metadata["made"] = Path("x")  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"^checkpoint: state_dict\._metadata\.made is of type pathlib"):
        check_checkpoint({"state_dict": state})


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
    check_checkpoint({"sharded": defaultdict(list, a=[1])}, mappings=True)  # a dict in the file
    monkeypatch.setattr(torch, "save", None)  # nothing is copied for a usual checkpoint
    check_checkpoint({"state_dict": nn.Linear(1, 1).state_dict(), "loops": {"a": {1: [2, "b"]}}, "parts": (own, 1.5)})
