"""Which keys make runs' data, and their losses, different ones."""

import pytest

from lathe.runs.metric_names import data_keys, loss_keys


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
def test_what_makes_the_data_other_data(key: str, other: bool) -> None:
    assert data_keys(["seed", key]) == [key] * other


def test_what_makes_a_loss_another() -> None:
    keys = ["task.objective", "task.label_smoothing", "task.metrics", "optimizer.lr"]
    assert loss_keys(keys) == ["task.objective"]
