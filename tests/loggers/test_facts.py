"""What a run is stands in every logger: its configuration under dotted keys, its directory, its tags; secrets do
not.
"""

from pathlib import Path
from typing import Any

import pytest
from support.interruptions import Interrupted, Interruption, interruption
from support.runs import SMALL, new_run

from lathe.config.composed import flatten
from lathe.errors import UserError
from lathe.loggers import mlflow, run_facts, wandb
from lathe.verbs.train import train

__all__ = ["interruption"]  # a fixture

WORDS = (*SMALL, "trainer.max_epochs=1", "tags=[baseline,seed test]", "callbacks.throughput=null", "scheduler=constant")
# MLflow 3.17 asks SQLAlchemy 2.1 for a loader that it deprecates
quiet = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def run_of(cfg: dict[str, Any]) -> Path:
    return Path(cfg["paths"]["run_dir"])


def test_tensorboard_has_the_configuration_as_hparams(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    cfg = new_run(tmp_path, *WORDS, "logger=tensorboard")
    assert train(cfg)["tags"] == ["baseline", "seed test"]
    events = EventAccumulator(str(run_of(cfg) / "tensorboard"))
    events.Reload()
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    told = HParamsPluginData.FromString(content).session_start_info.hparams
    assert told["optimizer.lr"].number_value == 0.1
    assert told["model.net.width"].number_value == 16
    assert told["test"].number_value == 1
    assert told["paths.run_dir"].string_value == str(run_of(cfg))
    assert told["tags"].string_value == "['baseline', 'seed test']"
    assert "hp_metric" not in events.Tags()["scalars"]


def read_wandb() -> tuple[dict[str, Any], set[str]]:
    """The configuration and tags of the run that this process has open, which ends here."""
    import wandb as package

    run = package.run
    assert run is not None
    told, tags = dict(run.config), set(run.tags or ())
    package.finish()
    return told, tags


@pytest.mark.slow
def test_wandb_has_the_configuration_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cfg = new_run(tmp_path, *WORDS, "logger=wandb", "logger.wandb.tags=[mine]")
    train(cfg)
    told, tags = read_wandb()
    assert (told["optimizer.lr"], told["model.net.width"]) == (0.1, 16)
    assert told["paths.run_dir"] == str(run_of(cfg))
    assert tags == {"mine", "baseline", "seed test"}


@pytest.mark.slow
def test_a_failed_run_leaves_no_wandb_run_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: Interruption
) -> None:
    """The next run of a sweep would end it, after its directory has gone, or go on in it."""
    import wandb as package

    ends: list[int | None] = []
    end = package.finish
    monkeypatch.setattr(package, "finish", lambda exit_code=None: (ends.append(exit_code), end(exit_code)))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    interruption.hook, interruption.step = "on_test_start", 1
    with pytest.raises(Interrupted):
        train(new_run(tmp_path, *WORDS, "logger=wandb"))
    assert (ends, package.run) == ([1], None)


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
        train(cfg)
    client = MlflowClient(cfg["logger"]["mlflow"]["tracking_uri"])
    experiment = client.get_experiment_by_name("lathe")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    told = run.data.params
    assert (told["optimizer.lr"], told["model.net.width"], told["trainer.max_epochs"]) == ("0.1", "16", "1")
    assert told["paths.run_dir"] == str(run_of(cfg))
    assert len(told["data.class_names"]) == 6000
    assert run.data.tags["tags"] == "baseline,seed test"
    changed = {key: value for key, value in run.data.tags.items() if key.startswith("changed.")}
    assert changed == {"changed.trainer.max_epochs": "2"}


@pytest.mark.parametrize("address", ["nonsense", "foo://bar", "sqlite:/x", "http//x", "http://me:hush@127.0.0.1:9"])
@quiet
def test_an_address_that_cant_be_used_is_one_sentence_without_its_login(tmp_path: Path, address: str) -> None:
    with pytest.raises(
        UserError, match=r"^logger\.mlflow\.tracking_uri=.* can't be used \(.*\): give a database file such as"
    ) as caught:
        mlflow(tmp_path, 0, tracking_uri=address)
    assert "hush" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_second_job_in_this_process_has_a_wandb_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    names = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        names.append(wandb(tmp_path / name, 0).experiment.id)  # type: ignore[attr-defined]
    assert names == ["one", "two"]
    read_wandb()


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
