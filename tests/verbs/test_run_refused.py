"""What a run can't do at its end is told before it begins."""

from pathlib import Path
from typing import Any

import pytest
from support.runs import SMALL, new_run

from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.training.train import train

SHORT = (*SMALL, "trainer.limit_train_batches=6", "trainer.max_epochs=2", "compression.receipt=none")


def run_of(cfg: dict[str, Any]) -> RunDir:
    return RunDir(cfg["paths"]["run_dir"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("objective=val/acc",), r"^objective=val/acc: the run reports no such metric; did you mean val/accuracy\?"),
        (
            ("objective=test/accuracy", "test=false"),
            r"^objective=test/accuracy needs the test that test=false leaves out",
        ),
        (
            ("objective=samples_per_s", "callbacks.throughput=null"),
            r"^objective=samples_per_s: the run reports no such metric",
        ),
        (("objective=prune/sparsity",), r"^objective=prune/sparsity: the run reports no such metric"),
        (
            ("callbacks.checkpoint.monitor=test/loss",),
            r"^callbacks\.checkpoint\.monitor=test/loss: the test split is evaluated once",
        ),
        (
            ("callbacks.checkpoint.monitor=val/acuracy",),
            r"^callbacks\.checkpoint\.monitor=val/acuracy: the task reports no such metric; did you mean "
            r"val/accuracy\?",
        ),
        (
            ("callbacks=[default,early_stopping]", "callbacks.early_stopping.monitor=train/loss"),
            r"^callbacks\.early_stopping\.monitor=train/loss is known at the end of a training epoch: add "
            r".*check_on_train_epoch_end=true",
        ),
        (
            ("callbacks=[default,early_stopping]", "trainer.limit_val_batches=0"),
            r"^callbacks\.early_stopping\.monitor=val/accuracy is looked at after a validation",
        ),
        (("trainer.limit_train_batches=0",), r"cannot plan a run of .* steps: .*trainer\.limit_train_batches above 0"),
    ],
)
def test_a_name_that_nothing_can_report_is_told_before_training(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    cfg = new_run(tmp_path, *SHORT, *overrides)
    with pytest.raises(UserError, match=sentence):
        train(cfg)
    assert not run_of(cfg).begun


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("data.class_names=[a,b]",),
            r"^data\.class_names has 2 names for data\.num_classes=10: give one for each class\.$",
        ),
        (
            ("model.net.num_classes=12",),
            r"^data\.num_classes=10, but the net gives 12 logits: let model\.net\.num_classes follow the data",
        ),
        (("model=resnet20", "model.net.num_classes=7"), r"^data\.num_classes=10, but the net gives 7 logits"),
    ],
)
def test_classes_that_do_not_fit_are_told_before_training(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    cfg = new_run(tmp_path, *(word for word in SHORT if "model.net" not in word), *overrides)
    with pytest.raises(UserError, match=sentence):
        train(cfg)
    assert not run_of(cfg).begun


def test_a_net_of_another_size_is_told_by_the_first_weight(tmp_path: Path) -> None:
    """Torch lists all that differ."""
    cfg = new_run(tmp_path, *SHORT, "trainer.max_epochs=1")
    train(cfg)
    cfg["trainer"]["max_epochs"] = 2
    cfg["model"]["net"]["width"] *= 2
    wider = cfg["model"]["net"]["width"]
    sentence = (
        rf"^checkpoint=.*last\.ckpt does not fit this run in `state_dict`: \S+ is \[{wider // 2}.*\] there and \["
    )
    with pytest.raises(UserError, match=sentence + rf"{wider}.*\] here; go on from another checkpoint, or start"):
        train(cfg)
