"""Every logger gets the chosen groups and overrides first, then the configuration; secrets are hidden."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.interruptions import Interrupted, Interruption, interruption
from support.runs import SMALL, new_run
from support.wandb_file import read_wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lathe.config.resolve import flatten
from lathe.errors import UserError
from lathe.loggers import comet, mlflow, run_facts, tensorboard, wandb
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture

WORDS = (*SMALL, "trainer.max_epochs=1", "tags=[baseline,seed test]", "callbacks.throughput=null", "scheduler=constant")
# MLflow 3.17 asks SQLAlchemy 2.1 for a loader that it deprecates
quiet = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def run_of(cfg: dict[str, Any]) -> Path:
    return Path(cfg["paths"]["run_dir"])


def test_tensorboards_hparams_are_the_chosen_groups_and_what_was_typed(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    cfg = new_run(tmp_path, *WORDS, "logger=tensorboard")
    result = train(cfg)
    assert result["tags"] == ["baseline", "seed test"]
    events = EventAccumulator(str(run_of(cfg) / "tensorboard"))
    events.Reload()
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    told = HParamsPluginData.FromString(content).session_start_info.hparams
    assert told["optimizer.lr"].number_value == 0.1
    assert told["model.net.width"].number_value == 16
    assert [told[key].string_value for key in ("model", "scheduler")] == ["mlp", "constant"]
    assert told["seed"].number_value == 42
    assert told["run_dir"].string_value == str(run_of(cfg))
    assert not [key for key in told if key.startswith(("callbacks.checkpoint", "paths.", "logger"))]
    assert len(told) < 24
    assert told["tags"].string_value == "['baseline', 'seed test']"
    assert [event.value for event in events.Scalars("result/objective")] == pytest.approx([result["objective"]])
    assert [event.step for event in events.Scalars("result/test/loss")] == [result["steps"]]
    assert "hp_metric" not in events.Tags()["scalars"]


@pytest.mark.slow
def test_wandbs_offline_file_has_configuration_tags_and_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: Interruption
) -> None:
    """Also of an interrupted run: the same id, in the same folder, and its result once."""
    import wandb as package

    ends: list[int | None] = []
    end = package.finish
    monkeypatch.setattr(package, "finish", lambda exit_code=None: (ends.append(exit_code), end(exit_code)))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    words = (
        "logger.wandb.tags=[mine]",
        "logger.wandb.group=many",
        "logger.wandb.entity=lab",
        "logger.wandb.log_model=true",
    )
    cfg = new_run(tmp_path, *WORDS, "logger=wandb", *words)
    interruption.hook, interruption.step = "on_test_start", 1
    with pytest.raises(Interrupted):
        train(cfg)
    # else the next run of a sweep would end it, after its directory was removed, or continue in it
    assert (ends, package.run) == ([1], None)
    cfg["trainer"]["max_epochs"], interruption.step = 2, 10**9
    result = train(cfg)
    assert package.run is None
    found = read_wandb(run_of(cfg))
    told, summary, run = found.config, found.summary, found.run
    assert (told["model"], told["optimizer.lr"], told["model.net.width"]) == ("mlp", 0.1, 16)
    assert told["run_dir"] == told["config"]["paths.run_dir"] == str(run_of(cfg))
    assert "callbacks.checkpoint._target_" in told["config"].keys() - told.keys()
    assert set(run.tags) >= {"mine"}
    assert (run.run_id, run.run_group, run.entity) == (run_of(cfg).name, "many", "lab")
    assert summary["result/test/accuracy"] == result["test/accuracy"]
    assert summary["result/steps"] == result["steps"]
    assert found.artifacts[-1] == f"{run_of(cfg).name}-best"
    assert len(list((run_of(cfg) / "wandb").glob(f"offline-run-*-{run_of(cfg).name}"))) == 2


@pytest.mark.slow
@quiet
def test_mlflow_has_the_configuration_and_a_longer_continuation_does_not_contradict_it(
    tmp_path: Path, interruption: Interruption
) -> None:
    from mlflow import MlflowClient

    cfg = new_run(tmp_path, *WORDS, "logger=mlflow")
    cfg["data"]["class_names"] = ["long" * 200 + str(number) for number in range(10)]
    cfg["logger"]["mlflow"]["tracking_uri"] = f"sqlite:///{tmp_path}/mlflow.db"
    interruption.hook, interruption.step = "on_test_start", 1
    with (
        pytest.warns(UserWarning, match="logger=mlflow: data.class_names cut at 6000 characters"),
        pytest.raises(Interrupted),
    ):
        train(cfg)
    cfg["trainer"]["max_epochs"], interruption.step = 2, 10**9
    with pytest.warns(UserWarning, match="cut at 6000"):
        result = train(cfg)
    client = MlflowClient(cfg["logger"]["mlflow"]["tracking_uri"])
    experiment = client.get_experiment_by_name("lathe")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["lathe.run"] == run_of(cfg).name
    told = run.data.params
    assert run.data.metrics["result/test/accuracy"] == result["test/accuracy"]
    assert run.info.status == "FINISHED"
    assert (told["model"], told["run_dir"]) == ("mlp", str(run_of(cfg)))
    assert (told["optimizer.lr"], told["model.net.width"], told["trainer.max_epochs"]) == ("0.1", "16", "1")
    assert told["paths.run_dir"] == str(run_of(cfg))
    assert len(told["data.class_names"]) == 6000
    assert run.data.tags["tags"] == "baseline,seed test"
    changed = {key: value for key, value in run.data.tags.items() if key.startswith("changed.")}
    assert changed == {"changed.trainer.max_epochs": "2"}


def test_secrets_are_hidden() -> None:
    cfg = {
        "hydra": {"run": 1},
        "resume": "x",
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]},
        "logger": {
            "hub": {
                "api_key": "abc",
                "API-Token": 5,
                "password": None,
                "user": "me",
                "tokenizer": "bpe",
                "max_tokens": 3,
            }
        },
        "data": {
            "url": "https://me:pw@host/x",
            "header": "s3cr3t-value",
            "list": ["postgres://u:p@h/x", {"secret": 1}],
            "plain": "word",
        },
    }
    assert run_facts(flatten(cfg), {"HF_TOKEN": "s3cr3t-value", "X_TOKEN": "word", "HOME": "me"}) == {
        "optimizer.lr": 0.1,
        "optimizer.betas": [0.9, 0.99],
        "logger.hub.api_key": "hidden",
        "logger.hub.API-Token": "hidden",
        "logger.hub.password": None,
        "logger.hub.user": "me",
        "logger.hub.tokenizer": "bpe",
        "logger.hub.max_tokens": 3,
        "data.url": "https://hidden@host/x",
        "data.header": "hidden",
        "data.list": ["postgres://hidden@h/x", {"secret": "hidden"}],
        "data.plain": "word",
    }


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


@quiet
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
