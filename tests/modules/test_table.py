"""The table of docs/own_modules.md: what each of the public styles of LightningModules can do here."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exports import request
from support.interruptions import NEVER, Interrupted, Interruption, interruption
from support.module_runs import MODULES, cfg_of, directory
from support.runs import ROOT, weights

from lathe import trust
from lathe.compression.quantization import describe
from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.tasks.core import core_of
from lathe.training.train import train
from lathe.verbs import export as parity
from lathe.verbs import export_probe
from lathe.verbs.evaluate import evaluate
from lathe.verbs.export import ship
from lathe.verbs.load import load

__all__ = ["interruption"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PRUNE = ("compression.prune.head=true", "compression.prune.sparsity=0.5", "compression.prune.start=0")
ALL = "to the bit | yes | yes | yes | yes"
# what a refusal says, in a few words
WORDS = {
    "draws random numbers": "refused: draws random numbers",
    "can't take this net": "refused: torch can't trace it",
    "could not run the file": "refused: a batch size in its graph",
    "have no length": "refused: set trainer.max_steps",
}


def resumed(folder: Path, name: str, whole: dict[str, Any], interruption: Interruption) -> str:
    cut = cfg_of(folder / "cut", name)
    interruption.hook, interruption.step = "on_train_epoch_end", 1
    with pytest.raises(Interrupted):
        train(cut)
    interruption.step = NEVER
    train(cut)
    again = weights(directory(cut))
    assert all(torch.equal(again[key], value) for key, value in weights(directory(whole)).items())
    return "to the bit"


def mixed(folder: Path, name: str) -> str:
    found = train(cfg_of(folder / "bf16", name, "precision=bf16-mixed"))
    return "yes" if math.isfinite(found["val_loss"]) else "not finite"


def evaluated(cfg: dict[str, Any], result: dict[str, Any]) -> str:
    words = ("split=val", "trusted=[support]")
    found = evaluate(request(RunDir(directory(cfg)), *words, name="evaluate"))["val_loss"]
    return "yes" if found == pytest.approx(result["val_loss"], rel=1e-5) else "draws anew"


def compressed(folder: Path, name: str) -> str:
    cfg = cfg_of(folder / "small", name, "compression=[prune,qat]", "compression.qat.start=0.3", *PRUNE)
    result = train(cfg)
    assert result["prune/sparsity"] == pytest.approx(0.5, abs=0.05)
    assert len(describe(core_of(load(directory(cfg), trusted=["support"]).task))) >= result["qat/layers"] > 0
    return "yes"


def exported(cfg: dict[str, Any]) -> str:
    ship(request(RunDir(directory(cfg)), "target=onnx", "trusted=[support]"))
    return "yes"


def probe(words: list[str]) -> None:
    """Run an export in this process, with the error of the fresh process that stands here otherwise."""
    try:
        export_probe.main(Path(words[3]))
    except Exception as error:
        raise UserError("a fresh process could not run the file") from error


def outcome(column: Callable[[], str]) -> str:
    """Return what a column finds, or what the refusal says."""
    try:
        return column()
    except UserError as error:
        said = str(error)
        return next((words for part, words in WORDS.items() if part in said), f"refused: {said}")


def row_of(folder: Path, name: str, interruption: Interruption) -> str:
    trust.allow({"trusted": ["support"]})
    whole = cfg_of(folder / "whole", name)
    result = train(whole)
    cells = (
        lambda: resumed(folder, name, whole, interruption),
        lambda: mixed(folder, name),
        lambda: evaluated(whole, result),
        lambda: compressed(folder, name),
        lambda: exported(whole),
    )
    return " | ".join(outcome(cell) for cell in cells)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "Prepared"])
def test_a_row_of_the_table(
    tmp_path: Path, name: str, interruption: Interruption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write the table anew: put what the failure shows into docs/own_modules.md."""
    monkeypatch.setattr(parity, "_run", probe)
    row = row_of(tmp_path, name, interruption)
    page = (ROOT / "docs" / "own_modules.md").read_text()
    if row == ALL:
        (line,) = (line for line in page.splitlines() if line.startswith("All of that: "))
        assert f"`{name}`" in line
    else:
        assert f"| `{name}` | {row} |" in page.splitlines()
