"""What Hydra, OmegaConf and YAML refuse is one line that says what to type; a bug is not explained."""

import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from support.runs import config

from lathe.config.compose import composing, hydra_message
from lathe.errors import UserError

GROUPS: dict[str, list[str]] = {key: [] for key in ("model", "data", "optimizer", "trainer", "seed")}
GROUPS |= {"compile": ["default", "none"], "logger": ["csv", "wandb"], "callbacks": ["default", "early_stopping"]}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("logger=[csv,wandbb]", ["logger=wandbb", "did you mean wandb?"]),
        ("optimizer.rl=1", ["optimizer.rl: unknown key in optimizer", "did you mean lr?", "put a + in front"]),
        ("callbacks.early_stopping.patience=3", ["Add it: callbacks=[default,early_stopping]."]),
        ("seed=1,2", ["Ambiguous value for argument 'seed=1,2'", "add --multirun"]),  # Hydra's own words
        ("model=true", ["must be a string or a list"]),
    ],
)
def test_what_hydra_refuses_is_one_line(override: str, parts: list[str]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of several kinds
        config(override)
    message = str(hydra_message(caught.value, GROUPS))
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message


def test_a_value_without_quotes_is_shown_with_them() -> None:
    override = "data.folder=../Bilder größe/raw $1"
    with pytest.raises(OverrideParseException) as caught:
        config(override)
    (word,) = shlex.split(str(hydra_message(caught.value, GROUPS)).rpartition("quotes: ")[2])
    assert OverridesParser.create().parse_override(word).value() == override.partition("=")[2]


def test_a_bug_is_not_explained() -> None:
    for error in (ValueError("a bug"), KeyError("a bug")):
        assert hydra_message(error, GROUPS) is None


def refusal(folder: Path, text: str) -> str:
    (folder / "experiment").mkdir()
    (folder / "experiment" / "own.yaml").write_text(text, encoding="utf-8")
    words = [f"hydra.searchpath=[file://{folder}]", "experiment=own"]
    with pytest.raises(UserError) as caught, composing("train", words):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    "defaults",
    [
        {"a": "b"},
        [3],
        [{"override /callbacks": ["default", {"x": {"_target_": "mine.X"}}]}],
        [{"override /model": True}],
        [{"/experiment": "own"}],  # includes itself
    ],
    ids=str,
)
def test_a_file_whose_defaults_can_not_be_read(tmp_path: Path, defaults: object) -> None:
    assert "\n" not in refusal(tmp_path, "# @package _global_\n" + yaml.safe_dump({"defaults": defaults}))


def test_a_wrong_choice_in_a_file_is_named(tmp_path: Path) -> None:
    assert "'override model: mlp'" in refusal(tmp_path, "# @package _global_\ndefaults:\n  - /model: mlp\n")
