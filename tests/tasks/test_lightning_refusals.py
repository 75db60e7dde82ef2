"""Options that an unmodified LightningModule can't have, refused with one message before reading data."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import runs
from tasks.test_lightning_module import QUICK, net, run
from torch import nn

from lathe import trust
from lathe.errors import UserError
from lathe.runs.inference import open_run_net
from lathe.training.train import train

Cli = Callable[..., tuple[int, str]]
NO_DATA = ("data=cifar10", "data.source.download=false")
IT = net(words="features: 3072")

TYPED = {
    "no training_step": (["model.net={_target_: support.own_lightning.Stepless}"], "has no training_step"),
    "no test_step": (["model.net={_target_: support.own_lightning.Untested}"], "test=false"),
    "loaders": ([net("Loading")], "Loading.train_dataloader is not used"),
    "no optimizer": ([net("Plain")], "has no configure_optimizers"),
    "an optimizer too many": ([IT, "optimizer=adamw"], "has configure_optimizers"),
    "a stop without a monitor": ([IT, "callbacks=[default,early_stopping]"], "callbacks.early_stopping.monitor=auto"),
    "a core": ([IT, "model.core=nett"], "did you mean net?"),
    "a strategy that spreads a net": ([IT, "strategy=fsdp", "trainer.devices=2"], "use strategy=ddp"),
    "a class of pytorch_lightning": (["model.net={_target_: mine_of_old.Net}"], "pytorch_lightning"),
}


@pytest.fixture
def of_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with Lightning's old name, and a module that imports it."""
    theirs, mine = types.ModuleType("pytorch_lightning.core.module"), types.ModuleType("mine_of_old")
    base: Any = type("LightningModule", (nn.Module,), {"__module__": theirs.__name__})
    mine.Net = type("Net", (base,), {"__module__": "mine_of_old"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine_of_old", mine)


@pytest.mark.usefixtures("of_old")
@pytest.mark.parametrize("mistake", TYPED)
def test_a_mistake_costs_one_line(cli: Cli, mistake: str, tmp_path: Path) -> None:
    words, sentence = TYPED[mistake]
    code, errors = cli(*QUICK, *NO_DATA, *words)
    lines = [line for line in errors.splitlines() if line.strip()]
    assert (code, len(lines)) == (1, 1), errors
    assert sentence in lines[0]
    assert runs(tmp_path / "logs") == []


def test_what_asks_for_a_nets_outputs_is_refused(tmp_path: Path) -> None:
    cfg = run(tmp_path / "logs", "trainer.max_epochs=1", "test=false")
    train(cfg)
    directory = cfg["paths"]["run_dir"]
    trust.allow({"trusted": ["support"]})
    sentence = "it has trained a LightningModule as it is, whose inputs are not declared"
    with pytest.raises(UserError, match=sentence):
        open_run_net(directory)
