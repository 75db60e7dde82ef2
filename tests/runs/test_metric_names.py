"""Keys that change the data or the loss of a run."""

import pytest

from lathe.config.metric_names import data_keys, loss_keys


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("data.source.folder", True),
        ("data.source.split_seed", True),
        ("data.share", True),
        ("data.folds", True),
        ("data.image_size", True),
        ("data.batch_size", False),
        ("data.augment.crop", False),
        ("data.num_workers", False),
        ("data.source.skip_bad", False),
        ("data.source.data_dir", False),
        ("model.net.width", False),
    ],
)
def test_keys_that_change_the_data(key: str, other: bool) -> None:
    assert data_keys(["seed", key]) == [key] * other


def test_keys_that_change_the_loss() -> None:
    keys = ["task.objective", "task.label_smoothing", "task.metrics", "optimizer.lr"]
    assert loss_keys(keys) == ["task.objective"]
