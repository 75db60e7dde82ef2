"""A report of runs of other tools: two rates with three seeds each, as each tool records them, and damaged files."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.verbs.report import report, runs_frame
from lathe.verbs.report.page import page_data
from lathe.verbs.runs.other_tools import find_all_runs

Config = dict[str, Any]
SCORES = {(0.1, 1): 0.5, (0.1, 2): 0.6, (0.1, 3): 0.7, (0.2, 1): 0.625, (0.2, 2): 0.6875, (0.2, 3): 0.8125}
RUNS: list[tuple[Config, float]] = [({"lr": lr, "seed": seed}, score) for (lr, seed), score in SCORES.items()]
REQUEST = {
    **dict.fromkeys(("metric", "by", "baseline", "direction", "columns", "output")),
    **{"interval": "t", "confidence": 0.95, "seed": 0, "formats": []},
}


def lightning_csv(folder: Path) -> Path:
    from lightning.pytorch.loggers import CSVLogger

    for config, score in RUNS:
        logger = CSVLogger(folder)
        logger.log_hyperparams({**config, "act": Path.exists})  # an object, as many modules save
        logger.log_metrics({"train_loss": 1.0}, 0)
        logger.log_metrics({"val_accuracy": score / 2}, 1)
        logger.log_metrics({"val_accuracy": score, "epoch": 1}, 2)
        logger.save()
    return folder / "lightning_logs"


def lightning_tensorboard(folder: Path) -> Path:
    from lightning.pytorch.loggers import TensorBoardLogger

    for config, score in RUNS:
        logger = TensorBoardLogger(folder)
        logger.log_hyperparams(config)
        logger.log_metrics({"val_accuracy": score / 2}, 1)
        logger.log_metrics({"val_accuracy": score}, 2)
        logger.finalize("success")
    return folder


def tensorboard(folder: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    for config, score in RUNS:
        with SummaryWriter(str(folder / f"{config['lr']}-{config['seed']}")) as writer:
            for step in (1, 2):
                writer.add_scalar("val_accuracy", score * step / 2, step)
            writer.add_hparams(config, {"final": score})  # writes into a folder below
    return folder


def wandb(folder: Path) -> Path:
    package = pytest.importorskip("wandb")
    for config, score in RUNS:
        settings = package.Settings(mode="offline", silent=True, x_disable_stats=True)
        with package.init(project="p", dir=str(folder), config=config, settings=settings) as run:
            for step in (1, 2):
                run.log({"val_accuracy": score * step / 2}, step=step)
    return folder


def mlflow(folder: Path) -> Path:
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment("e")
    for config, score in RUNS:
        run = client.create_run(experiment).info.run_id
        for key, value in config.items():
            client.log_param(run, key, value)
        for step in (1, 2):
            client.log_metric(run, "val_accuracy", score * step / 2, step=step)
        client.set_terminated(run)
    return folder


def mlflow_database(folder: Path) -> Path:
    """The tables of MLflow that a report reads."""
    with sqlite3.connect(folder / "mlflow.db") as base:
        base.execute("CREATE TABLE runs (run_uuid, name, status, lifecycle_stage, start_time)")
        base.execute("CREATE TABLE params (run_uuid, key, value)")
        base.execute("CREATE TABLE tags (run_uuid, key, value)")
        base.execute("CREATE TABLE metrics (run_uuid, key, value, step, timestamp, is_nan)")
        for at, (config, score) in enumerate(RUNS):
            base.execute("INSERT INTO runs VALUES (?, 'r', 'FINISHED', 'active', ?)", (f"id{at}", at))
            for key, value in config.items():
                base.execute("INSERT INTO params VALUES (?, ?, ?)", (f"id{at}", key, str(value)))
            for step in (1, 2):
                base.execute("INSERT INTO metrics VALUES (?, 'val_accuracy', ?, ?, 0, 0)", (f"id{at}", score, step))
        base.execute("INSERT INTO runs VALUES ('x', 'r', 'FINISHED', 'deleted', 9)")
    return folder / "mlflow.db"


def mlflow_files(folder: Path) -> Path:
    for at, (config, score) in enumerate(RUNS):
        run = folder / "mlruns" / "0" / f"id{at}"
        (run / "metrics").mkdir(parents=True)
        (run / "params").mkdir()
        (run / "meta.yaml").write_text("status: 3\nlifecycle_stage: active\n")
        (run / "metrics" / "val_accuracy").write_text(f"1795856833 {score / 2} 1\n1795856834 {score} 2\n")
        for key, value in config.items():
            (run / "params" / key).write_text(str(value))
    return folder / "mlruns"


def table(folder: Path) -> Path:
    lines = ["run,step,lr,seed,val_accuracy"]
    for at, (config, score) in enumerate(RUNS):
        lines += [f"r{at},{step},{config['lr']},{config['seed']},{score * step / 2}" for step in (1, 2)]
    (folder / "all.csv").write_text("\n".join(lines))
    return folder / "all.csv"


QUICK = [lightning_csv, lightning_tensorboard, tensorboard, mlflow_database, mlflow_files, table]
SLOW = [pytest.param(tool, marks=pytest.mark.slow) for tool in (wandb, mlflow)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's and wandb's imports
@pytest.mark.parametrize("make", [*QUICK, *SLOW], ids=lambda make: make.__name__)
def test_a_report_of_another_tools_runs_has_means_and_paired_differences(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    found = report({**REQUEST, "runs": str(make(tmp_path)), "metric": "val_accuracy"})
    data = page_data(found)
    assert data["counts"]["complete"] == len(RUNS) == len(runs_frame(str(tmp_path / "*")))
    groups = {group["factors"]["lr"]: group for group in data["groups"]}
    assert [groups[rate]["mean"] for rate in (0.1, 0.2)] == pytest.approx([0.6, 0.7083333], rel=1e-5)
    (pair,) = data["pairs"]
    assert pair["n"] == 3
    assert abs(pair["difference"]) == pytest.approx(0.1083333, rel=1e-5)
    assert pair["p"] == pytest.approx(0.0102, abs=1e-4)  # t = 9.83 of the differences 0.125, 0.0875 and 0.1125
    assert all(run["curves"]["val_accuracy"][0] == [1, 2] for run in data["runs"])
    assert {run["seed"] for run in data["runs"]} == {1, 2, 3}


def test_runs_without_a_seed_are_independent_and_in_no_pair(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("run,step,net,test_loss\na,1,mlp,1\nb,1,mlp,2\nc,1,cnn,3\nd,1,cnn,5\n")
    data = page_data(report({**REQUEST, "runs": [str(tmp_path / "t.csv")]}))
    groups = {group["label"]: (group["n"], group["mean"]) for group in data["groups"]}
    assert groups == {"net=cnn": (2, 4), "net=mlp": (2, 1.5)}
    assert data["pairs"][0]["n"] == 0


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("lr: 0.1\nact: !!python/object/apply:os.system [touch ran]\n", {"lr": 0.1, "act": "os.system"}),
        (BOMB, {"b": ["*a"] * 10}),
        ("[" * 400, None),
        ("x" * 1_000_001, None),
    ],
    ids=["object", "bomb", "depth", "size"],
)
def test_hyper_parameters_build_nothing(
    text: str, config: Config | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "version_0").mkdir()
    (tmp_path / "version_0" / "metrics.csv").write_text("step,val_loss\n1,0.5\n")
    (tmp_path / "version_0" / "hparams.yaml").write_text(text)
    (run,) = find_all_runs(".")
    assert not Path("ran").exists()
    if config is None:
        assert (run.state, run.metrics) == ("failed", {})
        assert "can't be read" in str(run.sentence)
    else:
        assert {key: run.leaves[key] for key in config} == config
        assert run.metrics == {"val_loss": 0.5}


def test_damaged_files_end_where_they_are_cut_or_fail_with_the_reason(tmp_path: Path) -> None:
    events = next(tensorboard(tmp_path / "tb").rglob("events*"))
    events.write_bytes(events.read_bytes()[:-40])
    (tmp_path / "wb").mkdir()
    (tmp_path / "wb" / "run-x.wandb").write_bytes(b":W&B\xe1\xbe\x00" + b"\xff" * 100)
    states = {run.label: run.state for run in find_all_runs([str(tmp_path / "tb"), str(tmp_path / "wb")])}
    assert len(states) == len(RUNS) + 1
    assert states["wb"] in ("failed", "unfinished")
    (tmp_path / "no.db").write_bytes(b"not a database" * 100)
    (tmp_path / "wb.csv").write_text("a,b\n1,2\n")
    (tmp_path / "no.csv").write_bytes(b"run,step\n\xff\xfe,1\n")
    for path, said in (("no.db", "MLflow"), ("wb.csv", "run and step"), ("no.csv", "as a table")):
        with pytest.raises(UserError, match=said):
            find_all_runs(str(tmp_path / path))


def test_runs_of_lathe_come_before_what_their_loggers_wrote(tmp_path: Path) -> None:
    run = tmp_path / "logs" / "name" / "2026-11-20_10-00-00_aaaaaa"
    (run / "wandb" / "run-x").mkdir(parents=True)
    (run / "wandb" / "run-x" / "run-x.wandb").write_bytes(b"")
    (run / "config.yaml").write_text("name: name")
    (run / "environment.json").write_text(json.dumps({}))
    (found,) = find_all_runs(str(tmp_path / "logs"))
    assert found.path == run
