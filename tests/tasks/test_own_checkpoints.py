"""A user's ModelCheckpoint resumes its state; Lathe's answers to the names of Lightning's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_lightning import QUICK
from support.runs import column, new_run, weights

from lathe.training.train import train

KIND = "lightning.pytorch.callbacks.ModelCheckpoint"
# the worst epoch, which is the first: decisions before an interruption count after it
WORST = f'+callbacks.mine={{_target_: {KIND}, monitor: val_loss, mode: max, save_top_k: 1, filename: "x{{epoch}}"}}'


def run(folder: Path, *words: str, module: str = "LitNet") -> dict[str, Any]:
    monitor = ("callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=min", "test=false")
    net = f"model.net={{_target_: support.own_lightning.{module}, width: 16}}"
    return new_run(folder, *QUICK, *monitor, net, "data.batch_size=100", *words)


def kept(cfg: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the callback's files and its state in last.ckpt, without the run's folder."""
    home = Path(cfg["paths"]["run_dir"])
    state = torch.load(home / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]
    own = next(value for key, value in state.items() if key.startswith("ModelCheckpoint"))
    # current_score belongs to the newest file that it wrote, and Lightning does not restore it
    plain = {name: str(value).replace(str(home), "") for name, value in own.items() if name != "current_score"}
    return sorted(path.name for path in (home / "checkpoints" / "own").iterdir()), plain


@pytest.mark.parametrize(("words", "module"), [((WORST,), "LitNet"), ((), "Checkpointing")])
def test_it_goes_on_where_it_was(tmp_path: Path, words: tuple[str, ...], module: str) -> None:
    whole = run(tmp_path / "whole", *words, "trainer.max_epochs=3", module=module)
    train(whole)
    begun = run(tmp_path / "begun", *words, "trainer.max_epochs=1", module=module)
    train(begun)
    train({**begun, "trainer": {**begun["trainer"], "max_epochs": 3}})
    assert kept(begun) == kept(whole)
    if words:
        assert kept(whole)[0] == ["xepoch=0.ckpt"]
    last = [weights(Path(cfg["paths"]["run_dir"])) for cfg in (begun, whole)]
    assert all(torch.equal(value, last[1][name]) for name, value in last[0].items())


def test_one_that_it_wrote_is_evaluated(tmp_path: Path, cli: Callable[..., tuple[int, str]]) -> None:
    cfg = run(tmp_path, WORST, "trainer.max_epochs=2")
    train(cfg)
    home = Path(cfg["paths"]["run_dir"])
    trusted, script = f"trusted=[{KIND},support.own_lightning.LitNet]", "scripts/evaluate.py"
    for words in ((f"run={home}/checkpoints/own/xepoch=0.ckpt",), (f"run={home}", "checkpoint=own/xepoch=0")):
        assert cli(*words, trusted, "split=val", "output=found.json", script=script) == (0, "")
        found = json.loads(Path("found.json").read_text())
        assert found["val_loss"] == pytest.approx(column(home, "val_loss")[0])
    code, error = cli(f"run={home}", "checkpoint=own/none", trusted, script=script)
    assert (code, error.count("\n")) == (1, 1)
    assert "no checkpoint 'own/none': it has best, last, own/xepoch=0; checkpoint=own/xepoch=0 takes that." in error
