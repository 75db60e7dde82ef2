"""A node of another class replaces a node, a list a group and a group a list: in files, overrides and saved runs."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from support.commands import in_process
from support.runs import ROOT, SMALL, config, runs

from lathe.config.resolve import differences
from lathe.config.validate import check
from lathe.runs.rundir import RunDir

FLIP, ERASE = {"_target_": "lathe.data.RandomFlip"}, {"_target_": "lathe.data.RandomErasing", "p": 0.5}
TYPED = "data.augment=[{_target_: lathe.data.RandomFlip}, {_target_: lathe.data.RandomErasing, p: 0.5}]"


def test_a_list_replaces_a_group_and_a_group_a_list() -> None:
    tree = OmegaConf.create({"a": {"x": {"y": 1}, "z": "${q}"}, "q": {"k": 0}, "none": None, "open": "???"})
    OmegaConf.set_struct(tree, True)
    tree.merge_with({"a": {"x": [1, 2]}}, {"none": [3], "open": {"o": 1}})
    assert tree == {"a": {"x": [1, 2], "z": {"k": 0}}, "q": {"k": 0}, "none": [3], "open": {"o": 1}}
    tree.merge_with({"a": {"x": [4]}})
    assert tree.a.x == [4]
    OmegaConf.update(tree, "a.x", {"y": 5}, merge=True)
    assert tree.a.x == {"y": 5}
    tree.merge_with({"a": {"x": {"y": 6}}})
    OmegaConf.update(tree, "q", [7], merge=True)
    assert (tree.a.x, tree.q, tree.a.z) == ({"y": 6}, [7], [7])
    assert OmegaConf.is_struct(tree)


def test_a_command_line_and_a_file_may_list(tmp_path: Path) -> None:
    assert config(TYPED)["data"]["augment"] == [FLIP, ERASE]
    assert config(TYPED, "data.augment.1.p=0.1")["data"]["augment"][1]["p"] == 0.1
    fields = config("data=cifar10")["data"]["augment"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "listed.yaml").write_text(f"defaults: [digits]\naugment:\n- {FLIP}\n- {ERASE}\n")
    (tmp_path / "data" / "back.yaml").write_text(f"defaults: [listed]\naugment: {fields}\n")
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        here = [f"hydra.searchpath=[file://{tmp_path}]"]
        mine, back = (compose("train", overrides=[f"data={name}", *here]).data.augment for name in ("listed", "back"))
    assert mine == [FLIP, ERASE]
    assert back == fields
    assert differences(config("data=digits"), config(TYPED)) != []


def test_a_node_of_another_class_replaces_one_that_a_file_has(tmp_path: Path) -> None:
    own = {"_target_": "mine.net.SENet", "width": 4}
    assert config("model.net={_target_: mine.net.SENet, width: 4}")["model"]["net"] == own
    assert config("++model.net={_target_: mine.net.SENet}", "+model.net.width=4")["model"]["net"] == own
    checkpoint = config("callbacks.checkpoint={_target_: mine.Checkpoint}")["callbacks"]["checkpoint"]
    assert checkpoint == {"_target_": "mine.Checkpoint"}
    same = config("model.net={_target_: lathe.nets.CifarResNet, depth: 32}")["model"]["net"]
    assert same == config()["model"]["net"] | {"depth": 32}
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\nmodel: {{net: {own}}}\n")
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        overrides = [f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"]
        assert compose("train", overrides=overrides).model.net == own


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("data.augment=[{_target_: lathe.data.RandomErasing, p: 2}]", "data.augment[0].p=2: expected a number from 0"),
        ("data.augment=[1]", "data.augment=[1]: expected a group with a _target_, a list (each a group"),
        ("task.loss={a: {_target_: lathe.tasks.Weighted, weight: x}}", "task.loss.a.weight=x: expected a number"),
    ],
)
def test_nodes_in_lists_and_groups_are_checked(word: str, sentence: str) -> None:
    (message,) = check(config(word))
    assert message.startswith(sentence)


@pytest.mark.law4
def test_a_run_with_a_list_trains_and_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brightening.py").write_text("def brighten(images, rng):\n    return images + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    augment = "data.augment=[{_target_: lathe.data.RandomFlip}, {_target_: brightening.brighten, _partial_: true}]"
    words = [*SMALL, "trainer.max_epochs=1", "logger=none", f"paths.log_dir={tmp_path / 'logs'}", augment]
    assert in_process(str(ROOT / "train.py"), *words) == 0
    (run,) = runs(tmp_path / "logs")
    saved: Any = RunDir(run).config["data"]["augment"]
    assert saved == [FLIP, {"_target_": "brightening.brighten", "_partial_": True}]
    assert in_process(str(ROOT / "scripts" / "evaluate.py"), f"run={run}") == 0
