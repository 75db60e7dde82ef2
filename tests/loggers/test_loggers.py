"""Real TensorBoard, W&B (offline) and MLflow (SQLite) runs. Only this file imports the last two,
which takes seconds.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lathe.errors import UserError
from lathe.loggers import comet, mlflow, tensorboard, wandb

# tensorboard


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


# wandb


# mlflow

# MLflow 3.17 asks SQLAlchemy 2.1 for a deprecated loader
quiet = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of one database, which takes MLflow a second to create. Each test has its own experiment."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def history(store: str, experiment: str) -> list[tuple[str, dict[str, str], list[tuple[int, float]]]]:
    """Return name, tags and train/loss of each run of an experiment."""
    from mlflow import MlflowClient

    client = MlflowClient(store)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return [
        (
            run.info.run_name,
            run.data.tags,
            [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")],
        )
        for run in client.search_runs([found.experiment_id])
    ]


@quiet
@pytest.mark.slow
def test_mlflow_writes_a_run_and_a_continued_run_goes_on_in_it(tmp_path: Path, store: str) -> None:
    run_dir = tmp_path / "2026-01-01_00-00-00_abcdef"
    first = mlflow(run_dir, 0, experiment_name="trial", tracking_uri=store)
    first.log_metrics({"train/loss": 0.5}, step=1)
    first.finalize("failed")
    other = mlflow(
        tmp_path / "2026-01-01_00-00-01_fedcba", 0, experiment_name="trial", tracking_uri=store, run_name="other"
    )
    other.log_metrics({"train/loss": 9.0}, step=1)
    other.finalize("success")
    second = mlflow(run_dir, 1, experiment_name="trial", tracking_uri=store)
    second.log_metrics({"train/loss": 0.25}, step=2)
    second.finalize("success")
    runs = {name: (tags["lathe.run"], points) for name, tags, points in history(store, "trial")}
    assert runs == {
        run_dir.name: (run_dir.name, [(1, 0.5), (2, 0.25)]),
        "other": ("2026-01-01_00-00-01_fedcba", [(1, 9.0)]),
    }


@quiet
@pytest.mark.slow
def test_an_address_that_cant_be_used_is_refused_without_its_login(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^logger\.mlflow\.tracking_uri=.* can't be used") as caught:
        mlflow(tmp_path, 0, tracking_uri="http://me:hush@127.0.0.1:9")
    assert "hush" not in str(caught.value)


# missing packages


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
