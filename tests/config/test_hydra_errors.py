"""What Hydra, OmegaConf and YAML refuse is one line that says what to type; a bug is not explained."""

import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from support.runs import config

from lathe.config.compose import composing
from lathe.config.hydra_errors import hydra_message
from lathe.errors import UserError

GROUPS = {
    "model": [],
    "data": [],
    "optimizer": [],
    "compile": ["default", "none"],
    "trainer": [],
    "logger": ["csv", "wandb"],
    "callbacks": ["default", "early_stopping"],
    "seed": [],
}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model=rsnet20", ["model=rsnet20", "did you mean resnet20?"]),
        ("model=resnet", ["model=resnet", "did you mean resnet20?"]),
        ("optimizer=adam", ["optimizer=adam", "did you mean adamw?"]),
        ("logger=[csv,wandbb]", ["logger=wandbb", "did you mean wandb?"]),
        ("strategy=ddp_spawn", ["strategy=ddp_spawn", "write strategy=ddp."]),
        ("optimizer.rl=1", ["optimizer.rl: unknown key in optimizer", "did you mean lr?", "put a + in front"]),
        ("modle=mlp", ["modle: unknown key", "did you mean model?"]),
        ("lr=1", ["lr: unknown key", "did you mean optimizer.lr?"]),
        ("model.net.widht=3", ["model.net.widht: unknown key in model.net", "did you mean width?"]),
        ("model.optimizer.lr=1", ["model.optimizer: unknown key in model", "did you mean optimizer?"]),
        ("callbacks.chekpoint.monitor=x", ["callbacks.chekpoint", "did you mean checkpoint?"]),
        ("callbacks.early_stopping.patience=3", ["Add it: callbacks=[default,early_stopping]."]),
        ("logger.wandb.project=x", ["Add it: logger=[csv,wandb]."]),
        ("compile.scope=step", ["compile.scope: compile=none has no keys", "compile=default"]),
        ("trainer.logger=false", ["trainer.logger: unknown key in trainer", "logger=none"]),
        ("optimizer.lr=[1", ["optimizer.lr=[1: invalid override", "close every bracket"]),
        ("seed=1,2", ["Ambiguous value for argument 'seed=1,2'", "add --multirun"]),  # Hydra's own words
        ("+optimizer.lr=3", ["already at 'optimizer.lr'"]),
        ("~optimizer.rl", ["'optimizer.rl' does not exist"]),
        ("data.batch_size=${nope}", ["data.batch_size", "nope"]),
        ("model=true", ["must be a string or a list"]),
    ],
)
def test_what_hydra_refuses_is_one_line(override: str, parts: list[str]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of several kinds
        config(override)
    message = str(hydra_message(caught.value, GROUPS))
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message


def test_hydras_own_keys_are_not_proposed() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own
        config("run=x", "job_name=3", "verbose=true", name="receipt")
    message = str(hydra_message(caught.value, GROUPS))
    assert message.startswith("job_name: unknown key")
    assert "hydra" not in message


@pytest.mark.parametrize("override", ["data.folder=../Bilder größe/raw", "+name=größe $1"])
def test_a_value_without_quotes_is_shown_with_them(override: str) -> None:
    with pytest.raises(OverrideParseException) as caught:
        config(override)
    (word,) = shlex.split(str(hydra_message(caught.value, GROUPS)).rpartition("quotes: ")[2])
    assert OverridesParser.create().parse_override(word).value() == override.partition("=")[2]


def test_a_resumed_run_keeps_its_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "resume=logs/latest", "callbacks.early_stopping.patience=3"])
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of Hydra's
        config("callbacks.early_stopping.patience=3")
    assert "a resumed run keeps its own callbacks" in str(hydra_message(caught.value, GROUPS))


def test_a_broken_yaml_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("net: {depth: 3\ninit: [\n")
    with open(tmp_path / "own.yaml") as file, pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load(file)
    assert str(hydra_message(caught.value, GROUPS)).startswith(f"{tmp_path / 'own.yaml'}, line 2: invalid YAML")


def test_a_launcher_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.errors import MissingConfigException

    monkeypatch.setattr("lathe.config.hydra_errors.find_spec", lambda name: None)
    error = MissingConfigException("x", "hydra/launcher/submitit_slurm")
    assert "pip install -e '.[slurm]'" in str(hydra_message(error, GROUPS))


def test_a_bug_is_not_explained() -> None:
    for error in (ValueError("a bug"), KeyError("a bug")):
        assert hydra_message(error, GROUPS) is None


def refusal(folder: Path, text: str) -> str:
    (folder / "experiment").mkdir()
    (folder / "experiment" / "own.yaml").write_text(text, encoding="utf-8")
    with (
        pytest.raises(UserError) as caught,
        composing("train", [f"hydra.searchpath=[file://{folder}]", "experiment=own"]),
    ):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    "defaults",
    [
        {"a": "b"},
        "callbacks",
        [3],
        [{"a": "b", "c": "d"}],
        [{"override /callbacks": {"x": "y"}}],
        [{"override /callbacks": ["default", {"x": {"_target_": "mine.X"}}]}],
        [{"override /model": True}],
        [{"/experiment": "own"}],  # includes itself
        [{"/callbacks": "ema"}],
    ],
    ids=str,
)
def test_a_file_whose_defaults_can_not_be_read(tmp_path: Path, defaults: object) -> None:
    assert "\n" not in refusal(tmp_path, "# @package _global_\n" + yaml.safe_dump({"defaults": defaults}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# @package _global_\ndefaults:\n  - /model: mlp\n", "'override model: mlp'"),
        ("# @package _global_\ndefaults:\n  - override model: mlp\n", "Could not override 'experiment/model@model'"),
        ("defaults:\n  - override /model: mlp\n", "own.yaml: override /model requires '# @package _global_'"),
    ],
)
def test_a_wrong_choice_in_a_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, text)
