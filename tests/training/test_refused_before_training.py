"""Mistakes that a run notices before it trains, with no metrics.csv left."""

from pathlib import Path
from typing import Any

import pytest
from support.runs import SMALL, new_run

from lathe.errors import UserError
from lathe.launch.error_reporting import explain_error
from lathe.runs.rundir import RunDir
from lathe.training.train import train

SHORT = (*SMALL, "trainer.limit_train_batches=6", "trainer.max_epochs=2", "compression.receipt=none")
STOP = "callbacks=[default,early_stopping]"


def run_of(cfg: dict[str, Any]) -> RunDir:
    return RunDir(cfg["paths"]["run_dir"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("objective=val/acc",), r"^objective=val/acc: .*; did you mean val/accuracy\?"),
        (("objective=test/accuracy", "test=false"), r"^objective=test/accuracy needs the test"),
        (("objective=samples_per_s", "callbacks.throughput=null"), r"^objective=samples_per_s: the run reports no"),
        (("callbacks.checkpoint.monitor=test/loss",), r"^callbacks\.checkpoint\.monitor=test/loss: the test split"),
        ((STOP, "trainer.limit_val_batches=0"), r"^callbacks\.early_stopping\.monitor=val/accuracy is looked at after"),
        (("trainer.limit_train_batches=0",), r"cannot plan a run of .* steps: .*trainer\.limit_train_batches above 0"),
        (("data.class_names=[a,b]",), r"^data\.class_names has 2 names for data\.num_classes=10"),
        (("model=resnet20", "model.net.num_classes=7"), r"^data\.num_classes=10, but the net returns 7 logits"),
    ],
)
def test_a_mistake_is_reported_before_training(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    own_net = any(word.startswith("model=") for word in overrides)
    cfg = new_run(tmp_path, *(word for word in SHORT if not (own_net and "model.net" in word)), *overrides)
    with pytest.raises(Exception, match=message) as caught:
        train(cfg)
    assert explain_error(caught.value) is not None
    assert not run_of(cfg).begun


def test_a_checkpoint_of_another_net_names_the_first_weight(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SHORT, "trainer.max_epochs=1")
    train(cfg)
    other = new_run(tmp_path, *SHORT, f"ckpt_path={run_of(cfg).last}", "model.net.width=8")
    with pytest.raises(UserError, match=r"^ckpt_path=.* does not fit this net: \S+ is \[16, .* there and \[8, .* here"):
        train(other)
    cfg["trainer"]["max_epochs"] = 2
    cfg["model"]["net"]["width"] = 32
    with pytest.raises(UserError, match=r"last\.ckpt does not fit this run: .*size mismatch for \S+: .*\[16, .*\[32, "):
        train(cfg)
