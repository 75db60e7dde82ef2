"""The loggers of a run: points of a resumed one, addresses and missing packages."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lathe.errors import UserError
from lathe.loggers import comet, mlflow, tensorboard, wandb


def points(run_dir: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_hides_points_that_will_be_written_again(tmp_path: Path) -> None:
    first = tensorboard(tmp_path, 0)
    for step in (1, 2, 3, 4):
        first.log_metrics({"train/loss": 0.0}, step=step)
    first.finalize("failed")
    second = tensorboard(tmp_path, 2)
    for step in (3, 4):
        second.log_metrics({"train/loss": 1.0}, step=step)
    second.finalize("success")
    assert points(tmp_path, "train/loss") == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]


# MLflow 3.17 asks SQLAlchemy 2.1 for a deprecated loader
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
@pytest.mark.slow
def test_an_address_that_cant_be_used_is_refused_without_its_login(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^logger\.mlflow\.tracking_uri=.* can't be used") as caught:
        mlflow(tmp_path, 0, tracking_uri="http://me:hush@127.0.0.1:9")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(("make", "name"), [(wandb, "wandb"), (comet, "comet_ml")])
def test_a_missing_package_is_named_with_its_install_command(
    make: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [key for key in sys.modules if key.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"^logger={make.__name__} needs .*pip install"):
        make(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
