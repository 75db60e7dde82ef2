"""metrics.csv line by line, and real TensorBoard, Weights & Biases (offline) and MLflow (SQLite) runs."""

import builtins
import csv as csv_module
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lathe.errors import UserError
from lathe.loggers import CSVLogger, csv, mlflow, tensorboard, wandb


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def lines(path: Path) -> list[str]:
    return path.read_bytes().decode().splitlines()


def begun(path: Path, start_step: int = 0) -> CSVLogger:
    logger = CSVLogger(path, start_step)
    logger.begin()
    return logger


# metrics.csv


def test_a_line_per_step_with_the_step_first(path: Path) -> None:
    logger = begun(path)
    logger.log_metrics({"train/loss": 0.5}, step=1)
    logger.log_metrics({"train/loss": 0.25}, step=2)
    logger.save()
    assert lines(path) == ["step,train/loss", "1,0.5", "2,0.25"]


def test_figures_of_one_step_share_a_line(path: Path) -> None:
    logger = begun(path)
    logger.log_metrics({"train/loss": 0.5}, step=3)
    logger.log_metrics({"val/loss": 0.75, "val/accuracy": 1.0}, step=3)
    logger.log_metrics({"train/loss": 0.125}, step=3)
    logger.save()
    assert lines(path) == ["step,train/loss,val/loss,val/accuracy", "3,0.125,0.75,1.0"]


def test_a_new_figure_adds_a_column_and_leaves_older_lines_blank_there(path: Path) -> None:
    logger = begun(path)
    logger.log_metrics({"a": 1}, step=1)
    logger.log_metrics({"b": 2}, step=2)
    logger.log_metrics({"a": 3, "c": 4}, step=3)
    logger.log_metrics({"c": 5}, step=4)
    logger.finalize("success")
    assert lines(path) == ["step,a,b,c", "1,1,,", "2,,2,", "3,3,,4", "4,,,5"]


def test_numbers_come_back_exactly(path: Path) -> None:
    logger = begun(path)
    values = {"float": 0.1 + 0.2, "tiny": 5e-324, "tensor": torch.tensor(1 / 3), "whole": 7, "nan": float("nan"), "inf": float("inf")}
    logger.log_metrics(values, step=1)
    logger.save()
    with open(path, newline="") as file:
        row = next(csv_module.DictReader(file))
    assert float(row["float"]) == 0.1 + 0.2
    assert float(row["tiny"]) == 5e-324
    assert torch.tensor(float(row["tensor"])) == torch.tensor(1 / 3)
    assert (row["whole"], row["nan"], row["inf"]) == ("7", "nan", "inf")


def test_names_with_commas_and_quotes_come_back(path: Path) -> None:
    logger = begun(path)
    logger.log_metrics({'odd, "name"': 1.0}, step=1)
    logger.save()
    with open(path, newline="") as file:
        assert list(csv_module.DictReader(file)) == [{"step": "1", 'odd, "name"': "1.0"}]


def test_save_brings_the_open_line_to_disk_and_it_stays_open(path: Path) -> None:
    logger = begun(path)
    logger.log_metrics({"a": 1.0, "b": 2.0}, step=1)
    logger.log_metrics({"a": 3.0}, step=2)
    logger.save()
    assert lines(path) == ["step,a,b", "1,1.0,2.0", "2,3.0,"]
    logger.log_metrics({"b": 4.0}, step=2)
    logger.log_metrics({"a": 0.0}, step=2)  # the line gets shorter
    logger.save()
    logger.save()
    assert lines(path) == ["step,a,b", "1,1.0,2.0", "2,0.0,4.0"]
    logger.log_metrics({"a": 5.0}, step=3)
    logger.finalize("success")
    assert lines(path) == ["step,a,b", "1,1.0,2.0", "2,0.0,4.0", "3,5.0,"]


def test_the_open_line_reaches_the_disk_when_the_next_step_comes(path: Path) -> None:
    logger = begun(path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.log_metrics({"a": 2.0}, step=2)
    assert lines(path)[:2] == ["step,a", "1,1.0"]


def test_begin_makes_the_file_and_nothing_is_made_before(path: Path) -> None:
    logger = CSVLogger(path)
    logger.save()
    logger.finalize("failed")
    assert not path.exists()
    logger.begin()
    assert lines(path) == ["step"]
    logger.log_metrics({"a": 1.0}, step=1)
    logger.begin()
    logger.save()
    assert lines(path) == ["step,a", "1,1.0"]


def write(logger: CSVLogger, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": 1 / step, "epoch": step // 4}, step=step)
        if step % 4 == 0:
            logger.log_metrics({"val/accuracy": step / 100}, step=step)
        if step == 6:
            logger.log_metrics({"late": 1.5}, step=step)


@pytest.mark.parametrize("checkpoint", [1, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("torn", [b"", b"9,0.11", b"9,0.1111,2,\n10,"])
def test_a_continued_file_is_the_uninterrupted_one(tmp_path: Path, checkpoint: int, torn: bytes) -> None:
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    logger = begun(whole)
    write(logger, range(1, 13))
    logger.finalize("success")

    first = begun(broken)
    write(first, range(1, 9))
    first.save()
    with open(broken, "ab") as file:
        file.write(torn)  # and killed
    second = begun(broken, start_step=checkpoint)
    assert max((int(line.split(",")[0]) for line in lines(broken)[1:]), default=0) == checkpoint
    write(second, range(checkpoint + 1, 13))
    second.finalize("success")

    def rows(path: Path) -> list[dict[str, str]]:
        with open(path, newline="") as file:
            return list(csv_module.DictReader(file))

    assert rows(broken) == rows(whole)
    assert broken.read_bytes() == whole.read_bytes()


def test_figures_of_the_step_of_the_checkpoint_join_its_line(path: Path) -> None:
    first = begun(path)
    first.log_metrics({"train/loss": 0.5, "val/accuracy": 0.1}, step=4)
    first.log_metrics({"train/loss": 0.25}, step=5)
    first.save()
    second = begun(path, start_step=5)
    second.log_metrics({"val/accuracy": 0.75}, step=5)  # validation follows the checkpoint
    second.finalize("success")
    assert lines(path) == ["step,train/loss,val/accuracy", "4,0.5,0.1", "5,0.25,0.75"]


def test_a_fresh_run_starts_a_fresh_file(path: Path) -> None:
    path.write_text("step,old\n1,2\n")
    logger = begun(path)
    logger.log_metrics({"new": 1.0}, step=1)
    logger.save()
    assert lines(path) == ["step,new", "1,1.0"]


def test_nothing_half_written_stays_when_the_disk_is_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = begun(path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.save()
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        logger.log_metrics({"b": 1.0}, step=1)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["metrics.csv"]


def test_csv_writes_metrics_csv_of_the_run(tmp_path: Path) -> None:
    logger = csv(tmp_path, 0)
    assert isinstance(logger, CSVLogger)
    assert (logger.name, logger.version, logger.log_dir) == ("csv", "", str(tmp_path))
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"a": 1.0}, step=1)
    logger.finalize("success")
    assert lines(tmp_path / "metrics.csv") == ["step,a", "1,1.0"]


# tensorboard


def points(run_dir: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    logger = tensorboard(tmp_path, 0)
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": step / 4}, step=step)
    logger.finalize("success")
    assert points(tmp_path, "train/loss") == [(1, 0.25), (2, 0.5), (3, 0.75)]


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


def test_wandb_writes_a_run_offline_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_dir = tmp_path / "2026-01-01_00-00-00_abcdef"
    run_dir.mkdir()
    logger: Any = wandb(run_dir, 0, project="trial", tags=["one"], group="many")
    logger.log_metrics({"train/loss": 0.5}, step=1)
    run = logger.experiment
    assert (run.id, run.name, run.project, run.group, run.tags) == (run_dir.name, run_dir.name, "trial", "many", ("one",))
    assert run.offline
    run.finish()
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert file.name == f"run-{run_dir.name}.wandb"
    assert b"train/loss" in file.read_bytes()


# mlflow


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"


def history(store: str, experiment: str) -> list[tuple[str, dict[str, str], list[tuple[int, float]]]]:
    """Name, tags and train/loss of each run of an experiment."""
    from mlflow import MlflowClient

    client = MlflowClient(store)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return [
        (run.info.run_name, run.data.tags, [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")])
        for run in client.search_runs([found.experiment_id])
    ]


# MLflow 3.17 asks SQLAlchemy 2.1 for a loader that it deprecates
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_mlflow_writes_a_run_and_a_continued_run_goes_on_in_it(tmp_path: Path, store: str) -> None:
    run_dir = tmp_path / "2026-01-01_00-00-00_abcdef"
    first = mlflow(run_dir, 0, experiment_name="trial", tracking_uri=store)
    first.log_metrics({"train/loss": 0.5}, step=1)
    first.finalize("failed")
    other = mlflow(tmp_path / "2026-01-01_00-00-01_fedcba", 0, experiment_name="trial", tracking_uri=store, run_name="other")
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


# what is not installed


@pytest.mark.parametrize(("make", "name"), [(wandb, "wandb"), (mlflow, "mlflow")])
def test_a_missing_package_is_one_sentence(make: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(wanted: str, *args: Any, **kwargs: Any) -> Any:
        if wanted.split(".")[0] == name:
            raise ImportError(f"No module named {wanted!r}")
        return real(wanted, *args, **kwargs)

    for module in [key for key in sys.modules if key.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UserError, match=rf"^logger={name} needs the {name} package: pip install -e \.\[{name}\]\.$"):
        make(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
