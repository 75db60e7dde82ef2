"""What is learned (`task`) stands apart from the net (`model`); earlier configurations have both under `model`."""

from pathlib import Path
from typing import Any

import pytest
from support.runs import SMALL, config, new_run

from lathe.config.composed import differences
from lathe.config.schema import current, moved
from lathe.config.words import earlier
from lathe.runs.build import make_task
from lathe.tasks import ClassificationTask, LanguageModellingTask

CLASSES = "lathe.tasks.ClassificationTask"


def older(cfg: dict[str, Any]) -> dict[str, Any]:
    """The configuration as it was saved when the task's keys stood beside the net."""
    return {key: value for key, value in cfg.items() if key != "task"} | {"model": {**cfg["task"], **cfg["model"]}}


@pytest.mark.parametrize("words", [["model=mlp"], ["model=gpt_nano", "data=synthetic_tokens"]])
def test_an_earlier_configuration_is_the_same_run(words: list[str]) -> None:
    cfg = config(*words)
    before = older(cfg)
    assert "task" not in before
    assert before["model"]["_target_"] == cfg["task"]["_target_"]
    assert differences(current(before), cfg) == []
    assert current(cfg) == cfg


def test_a_model_of_text_brings_its_task_and_the_command_line_wins() -> None:
    assert type(make_task(config("model=gpt_nano", "data=synthetic_tokens"))) is LanguageModellingTask
    assert type(make_task(config("model=mlp"))) is ClassificationTask
    words = ["model=gpt_nano", "data=synthetic_tokens", "task=classification"]
    assert config(*words)["task"]["_target_"] == CLASSES


@pytest.mark.parametrize(
    ("model", "task", "net"),
    [
        ({"net": 1, "init": None}, {"_target_": CLASSES, "label_smoothing": 0.0}, {"net": 1, "init": None}),
        ({"_target_": CLASSES, "net": 1}, {"_target_": CLASSES, "label_smoothing": 0.0}, {"net": 1}),
        ({"label_smoothing": 0.1, "net": 1}, {"_target_": CLASSES, "label_smoothing": 0.1}, {"net": 1}),
        ({"_target_": "mine.Task", "net": 1, "x": 2}, {"_target_": "mine.Task", "x": 2}, {"net": 1}),
        ({"_target_": "mine.Task", "init": "mine"}, {"_target_": "mine.Task", "init": "mine"}, {}),
    ],
)
def test_keys_of_a_models_file_that_are_the_tasks(model: Any, task: Any, net: Any) -> None:
    found = current({"task": {"_target_": CLASSES, "label_smoothing": 0.0}, "model": model})
    assert found == {"task": task, "model": net}
    assert moved("model.x") == "task.x"
    assert [moved(key) for key in ("model", "model.net.x", "model.init", "modelx.y", "data.x")] == [
        *("model", "model.net.x", "model.init", "modelx.y", "data.x")
    ]


def test_an_earlier_override_goes_on_working() -> None:
    cfg = config(earlier("model.label_smoothing=0.2"))
    assert cfg["task"]["label_smoothing"] == 0.2
    assert cfg["model"].keys() == {"init", "net"}
    assert earlier("model.net.width=3") == "model.net.width=3"


def test_an_earlier_run_goes_on(tmp_path: Path) -> None:
    """A saved configuration of before is read as one of now, and resume=auto finds it."""
    from omegaconf import OmegaConf

    from lathe.runs.find import find_unfinished

    cfg = new_run(tmp_path, *SMALL)
    path = Path(cfg["paths"]["run_dir"]) / "config.yaml"
    saved = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(saved, dict)
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(older(saved))))
    assert "task:" not in path.read_text()
    found = find_unfinished(tmp_path, cfg)
    assert found is not None
    assert found.config["task"] == cfg["task"]
