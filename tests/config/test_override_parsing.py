"""Overrides are translated for Hydra or refused with a message; none is ignored."""

import inspect

import pytest
from lightning.pytorch import Trainer
from support.runs import ROOT, config

from lathe.config.help import choices
from lathe.config.override_parsing import translate
from lathe.config.schema import FILLED_IN
from lathe.config.validate import check
from lathe.errors import UserError

GROUPS: dict[str, list[str]] = {
    **choices(ROOT / "configs"),
    **{key: [] for key in ("seed", "name", "test", "ckpt_path", "hydra")},
}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["+experiment=digits_quickstart"], ["experiment=digits_quickstart"]),
        (["~logger"], ["logger=none"]),
        *[([f"logger={value}"], ["logger=none"]) for value in ("null", "[]", "false", "")],
        (["train=false"], ["trainer.max_epochs=0"]),
        (["callbacks=[default,ema]"], ["callbacks=[default,ema]"]),
        (["~callbacks.ema", "+model.net.width=3", "seed=1"], ["~callbacks.ema", "+model.net.width=3", "seed=1"]),
        *[([f"{sign}optimizer={{_target_: A.B}}"], ["~optimizer", "+optimizer={_target_: A.B}"]) for sign in ("", "+")],
        (
            ["~optimizer", "+optimizer={_target_: A.B}"],
            ["~optimizer", "+optimizer={_target_: A.B}"],
        ),  # as `Next:` has it
        (["optimizer={lr: 1}"], ["optimizer={lr: 1}"]),
        (["data.augment={_target_: mine.Erase, p: 1}"], ["data.augment=[{_target_: mine.Erase, p: 1}]"]),
        (["data.augment={_target_: lathe.data.Augment}"], ["data.augment={_target_: lathe.data.Augment}"]),
        (["strategy=ddp", "-m", "seed=1,2"], ["-m", "strategy=ddp", "seed=1,2"]),
        (["-m", "seed=range(1,3)"], ["-m", "seed=range(1,3)"]),
        (["-p", "optimizer", "--cfg", "job"], ["-p", "optimizer", "--cfg", "job"]),
        (["-m", "logger=[],[csv],null"], ["-m", "logger=none,[csv],none"]),
        (
            ["callbacks=[default,{_target_: a.Big}]", "callbacks.ema=null"],
            ["callbacks=[default]", "+callbacks.big={_target_: a.Big}", "callbacks.ema=null"],
        ),
        (["ckpt_path=a/epoch=4-step=10.ckpt"], ["ckpt_path='a/epoch=4-step=10.ckpt'"]),
        (["ckpt_path='a/epoch=4.ckpt'"], ["ckpt_path='a/epoch=4.ckpt'"]),
        (["-m", "ckpt_path=a=1.ckpt,b=2.ckpt"], ["-m", "ckpt_path=a=1.ckpt,b=2.ckpt"]),
        (["local=none"], ["~local"]),
    ],
)
def test_translated(typed: list[str], meant: list[str]) -> None:
    assert translate(typed, GROUPS) == meant


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--cfg"], ["--cfg", "expected one argument"]),
        (["--cfg", "nosuch"], ["nosuch", "'job'"]),
        (["--experimental-rerun", "x"], ["--experimental-rerun x", "scripts/reproduce.py"]),
        (["-cn", "mine"], ["--config-name mine", "configs/experiment/<name>.yaml"]),
        (["-cp", "mine"], ["--config-path mine", "--config-dir mine"]),
        (["--config-dir=/nowhere"], ["--config-dir=/nowhere", "no such folder"]),
        (["+callbacks=ema"], ["+callbacks=ema", "callbacks=[default,ema]"]),
        (["extras.print_config=true"], ["extras.print_config=true", "leave it out"]),
        (["hydra.run.dir=/x"], ["hydra.run.dir=/x", "paths.log_dir"]),
        (["optimizer=3"], ["optimizer=3", "choose one of "]),
        (["callbacks=[default,null]"], ["callbacks=null: there is no such choice", "default"]),
        (["model=[[mlp]]"], ["model=[mlp]: there is no such choice"]),
        (["precision=16"], ["precision=16", "16-mixed"]),
        (["model=[mlp,resnet20]"], ["model takes one choice. ", "-m model=mlp,resnet20"]),
        (["-m", "sweep=folds,seeds"], ["sweep=folds,seeds: a sweep can't go over its own keys and Hydra's."]),
        *[([f"model={value}"], [f"model={value}: expected a choice; choose one of "]) for value in ("", "[]")],
        (["local=cluster"], ["local=cluster: there is no such choice; write configs/local/cluster.yaml"]),
        (["callbacks={_target_: a.B, c: 1}"], ["replaces the list. Use callbacks=[default,{_target_: a.B, c: 1}]."]),
        (["compression=[prune,prune]"], ["compression=[prune,prune]: prune is there twice. Leave one out."]),
        (["callbacks=[default,none]"], ["leave none out, or use callbacks=none"]),
        (["--lr", "0.1"], ["--lr: keys are written key=value, without dashes"]),
        (["callbacks=[default,{x: 3}]"], ["{x: 3} names no class"]),
        (["-m", "callbacks=[default],[default,{_target_: A}]"], ["a sweep takes names of files"]),
    ],
)
def test_refused(typed: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        translate(typed, GROUPS)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


FORMS = {
    "spaces around =": (
        ["optimizer.lr", "=", "0.1", "seed=", "1"],
        [
            "optimizer.lr = 0.1: write it without spaces around =: optimizer.lr=0.1.",
            "seed= 1: write it without spaces around =: seed=1.",
        ],
    ),
    "values without quotes": (
        ["task.loss={_target_:", "x,", "q:", "-0.5}", "callbacks=[default,", "ema]"],
        [
            "task.loss: the shell split its value. Quote it all: 'task.loss={_target_: x, q: -0.5}'.",
            "callbacks: the shell split its value. Quote it all: 'callbacks=[default, ema]'.",
        ],
    ),
    "a choice alone": (["mlp"], ["mlp: every word has the form key=value: model=mlp."]),
    "a key alone": (["seed"], ["seed: every word has the form key=value: seed=...."]),
    "a flag between keys": (
        ["seed=1", "--cfg", "job", "name=a"],
        ["name=a: put every flag before the first key, or after the last one."],
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_words_that_are_not_overrides(case: str) -> None:
    typed, sentences = FORMS[case]
    with pytest.raises(UserError) as caught:
        translate(typed, GROUPS)
    assert list(caught.value.args) == sentences


def test_a_value_typed_twice_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    translate(["seed=1", "seed=1", "model=mlp", "seed=2"], GROUPS)
    assert capsys.readouterr().out == "seed=1 is replaced by seed=2, which was typed later.\n"


def test_every_argument_of_the_trainer_is_a_key_or_has_a_hint() -> None:
    takes = set(inspect.signature(Trainer).parameters) - {"self"}
    assert takes <= set(config()["trainer"]) | set(FILLED_IN)
    (message,) = check(config("+trainer.precision=1"))
    assert message == f"trainer.precision=1 is not taken from here: {FILLED_IN['precision']}."


@pytest.mark.parametrize("key", ["model.net", "optimizer"])
def test_of_two_nodes_the_later_counts(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = f"{key}={{_target_: a.B}}", f"{key}={{_target_: a.B, width: 3}}"
    assert translate([first, "seed=1", second], GROUPS) == ["seed=1", *translate([second], GROUPS)]
    assert capsys.readouterr().out == f"{first} is replaced by {second}, which was typed later.\n"
    assert translate([second, second], GROUPS) == translate([second], GROUPS)
    assert capsys.readouterr().out == ""


# Nodes in the list of a group: each becomes an override that adds a key


@pytest.mark.parametrize(
    ("value", "new"),
    [
        ("[{_target_: a.b.CSVLog, x: 1}]", ["callbacks=none", "+callbacks.csv_log={_target_: a.b.CSVLog, x: 1}"]),
        ("[ default , {x: {_target_: A}} ]", ["callbacks=[default]", "+callbacks.x={_target_: A}"]),
        ("[{a: {_target_: A}, b: {}}]", ["callbacks=none", "+callbacks.a={_target_: A}", "+callbacks.b={}"]),
        (
            "[{_target_: A},{_target_: A}]",
            ["callbacks=none", "+callbacks.a={_target_: A}", "+callbacks.a_2={_target_: A}"],
        ),
        ("[{_target_: m.EMA}]", ["callbacks=none", "+callbacks.own_ema={_target_: m.EMA}"]),  # a file has that name
        ("[default,{_target_: A]", ["callbacks=[default,{_target_: A]"]),  # Hydra reports it
        ("[{_target_: A, x: '],}'}]", ["callbacks=none", "+callbacks.a={_target_: A, x: '],}'}"]),
    ],
)
def test_each_node_gets_a_key(value: str, new: list[str]) -> None:
    assert translate([f"callbacks={value}"], GROUPS) == new
