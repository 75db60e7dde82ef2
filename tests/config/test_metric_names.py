"""Names of metrics: the one that a sweep optimises, its direction, and keys that change the data or the loss."""

import pytest
from support.runs import config

from lathe.config.metric_names import data_keys, loss_keys, objective_of


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("data.source.folder", True),
        ("data.batch_size", False),
        ("data.source.skip_bad", False),
        ("model.net.width", False),
    ],
)
def test_keys_that_change_the_data(key: str, other: bool) -> None:
    assert data_keys(["seed", key]) == [key] * other


def test_keys_that_change_the_loss() -> None:
    keys = ["task.objective", "task.label_smoothing", "task.metrics", "optimizer.lr"]
    assert loss_keys(keys) == ["task.objective"]


@pytest.mark.parametrize(
    ("overrides", "name", "is_lower_better"),
    [
        ([], "val/accuracy", False),
        (["objective=val/loss"], "val/loss", True),
        (["objective=test/accuracy"], "test/accuracy", False),
        (["callbacks.checkpoint.monitor=val/loss"], "val/loss", True),
        (["callbacks.checkpoint.monitor=val/accuracy", "callbacks.checkpoint.mode=min"], "val/accuracy", True),
        (["model=gpt_nano", "data=synthetic_tokens"], "val/loss", True),
        (["objective=step_ms"], "step_ms", None),
        (["callbacks=none"], None, None),
    ],
)
def test_the_direction_follows_what_the_run_returns(
    overrides: list[str], name: str | None, is_lower_better: bool | None
) -> None:
    assert objective_of(config(*overrides)) == (name, is_lower_better)
