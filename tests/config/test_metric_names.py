"""Names of metrics: the one that a sweep optimises, its direction, and keys that change the data or the loss."""

import pytest
from support.runs import config

from lathe.config.metric_names import data_keys, loss_keys, objective_of


def test_keys_that_change_the_data_or_the_loss() -> None:
    data = ["data.source.folder", "data.batch_size", "data.source.skip_bad", "seed"]
    task = ["task.objective", "task.label_smoothing", "task.metrics", "optimizer.lr"]
    assert (data_keys(data + task), loss_keys(data + task)) == (["data.source.folder"], ["task.objective"])


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
