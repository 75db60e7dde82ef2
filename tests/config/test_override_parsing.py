"""Overrides are translated for Hydra or refused with a message; none is ignored."""

import inspect
import re

import pytest
from lightning.pytorch import Trainer
from support.runs import ROOT, config

from lathe.config.help import choices
from lathe.config.override_parsing import KEYS, REPLACED, SEVERAL, UNUSED, expand_nodes, translate
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
        (["++model=mlp"], ["model=mlp"]),
        (["~logger"], ["logger=none"]),
        *[
            ([f"{group}={word}"], [f"{group}=none"])
            for group in ("logger", "callbacks")
            for word in ("null", "[]", "false", "")
        ],
        (["train=false"], ["trainer.max_epochs=0"]),
        (["compile=null"], ["compile=none"]),
        (["optimizer=null"], ["optimizer=none"]),
        (["~compression"], ["compression=none"]),
        (["callbacks=[default,ema]"], ["callbacks=[default,ema]"]),
        (["~callbacks.ema", "+model.net.width=3", "seed=1"], ["~callbacks.ema", "+model.net.width=3", "seed=1"]),
        *[
            (
                [f"{sign}optimizer={{_target_: mine.Lion, lr: 1}}"],
                ["~optimizer", "+optimizer={_target_: mine.Lion, lr: 1}"],
            )
            for sign in ("", "+", "++")
        ],
        (
            ["~optimizer", "+optimizer={_target_: A.B}"],
            ["~optimizer", "+optimizer={_target_: A.B}"],
        ),  # as `Next:` has it
        (["optimizer={lr: 1}"], ["optimizer={lr: 1}"]),
        (["data.augment={_target_: mine.Erase, p: 1}"], ["data.augment=[{_target_: mine.Erase, p: 1}]"]),
        (["data.augment={_target_: lathe.data.Augment}"], ["data.augment={_target_: lathe.data.Augment}"]),
        (["strategy=ddp", "-m", "seed=1,2"], ["-m", "strategy=ddp", "seed=1,2"]),
        (["--cfg", "job", "seed=1"], ["--cfg", "job", "seed=1"]),
        (["-m", "seed=range(1,3)"], ["-m", "seed=range(1,3)"]),
        (["-m", "seed=sort(choice(3,1))"], ["-m", "seed=sort(choice(3,1))"]),
        (["-m", "seed=tag(a,choice(3,1))"], ["-m", "seed=tag(a,choice(3,1))"]),
        (["+x='1,choice(1)'"], ["+x='1,choice(1)'"]),
        (["-p", "optimizer", "--cfg", "job"], ["-p", "optimizer", "--cfg", "job"]),
        *[([word], [word]) for word in ("hydra/sweeper=basic", "hydra.sweeper={a: 1}", "hydra.sweeper.params={a: 1}")],
        (["-m", "model=glob(ml*)"], ["-m", "model=glob(ml*)"]),
        (["-m", "logger=[],[csv],null"], ["-m", "logger=none,[csv],none"]),
        (
            ["callbacks=[default,{_target_: a.Big}]", "callbacks.ema=null"],
            ["callbacks=[default]", "+callbacks.big={_target_: a.Big}", "callbacks.ema=null"],
        ),
        (["-m", "hydra/launcher=glob(*)"], ["-m", "hydra/launcher=glob(*)"]),
        (["ckpt_path=a/epoch=4-step=10.ckpt"], ["ckpt_path='a/epoch=4-step=10.ckpt'"]),
        (["ckpt_path='a/epoch=4.ckpt'"], ["ckpt_path='a/epoch=4.ckpt'"]),
        (["-m", "ckpt_path=a=1.ckpt,b=2.ckpt"], ["-m", "ckpt_path=a=1.ckpt,b=2.ckpt"]),
        *[([f"local={word}"], ["~local"]) for word in ("none", "null")],
        (["experiment=[a,b]"], ["experiment=[a,b]"]),
        (["model=[mlp]"], ["model=[mlp]"]),
        (
            ["callbacks=[default,{_target_: a.Big},{_target_: a.Big}]"],
            [
                "callbacks=[default]",
                "+callbacks.big={_target_: a.Big}",
                "+callbacks.big_2={_target_: a.Big}",
            ],
        ),
        (["hydra.job.env_set.X=1"], ["hydra.job.env_set.X=1"]),
    ],
)
def test_translated(typed: list[str], meant: list[str]) -> None:
    assert translate(typed, GROUPS) == meant


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--cfg"], ["--cfg", "expected one argument"]),
        (["--cfg", "nosuch"], ["nosuch", "'job'"]),
        (["--nosuch"], ["--nosuch"]),
        (["--experimental-rerun", "x"], ["--experimental-rerun x", "scripts/reproduce.py"]),
        (["hydra.sweeper=basic"], ["hydra.sweeper=basic", "hydra/sweeper=basic, or leave it out"]),
        (["-m", "+hydra.launcher=joblib", "seed=1,2"], ["+hydra.launcher=joblib", "hydra/launcher=joblib"]),
        (["-cn", "mine"], ["--config-name mine", "experiment=<name>"]),
        (["-cp", "mine"], ["--config-path mine", "--config-dir mine"]),
        (["--config-dir=/nowhere"], ["--config-dir=/nowhere", "no such folder"]),
        (["+callbacks=ema"], ["+callbacks=ema", "callbacks=[default,ema]"]),
        (["-m", "seed=range(1,1)"], ["seed=range(1,1)", "no job"]),
        (["-m", "optimizer=glob(x*)"], ["optimizer=glob(x*)", "no job"]),
        (["-m", "seed=glob(*)"], ["seed=glob(*)", "no job"]),
        *[([f"{word}=3"], [f"{word}=3", "unknown key"]) for word in KEYS],
        (["~hydra"], ["~hydra", "leave it out"]),
        (["trainer.strategy=ddp_spawn"], ["trainer.strategy=ddp_spawn", "Write strategy=ddp"]),
        (["extras.print_config=true"], ["extras.print_config=true", "leave it out"]),
        *[([f"{key}=/x"], [f"{key}=/x", "paths.log_dir"]) for key in UNUSED],
        *[([f"optimizer={word}"], [f"optimizer={word}", "choose one of "]) for word in ("3", "true")],
        (["callbacks=[default,null]"], ["callbacks=null: there is no such choice", "default"]),
        (["model=[[mlp]]"], ["model=[mlp]: there is no such choice"]),
        (["precision=16"], ["precision=16", "16-mixed"]),
        (["="], ["'='", "key=value"]),
        *[
            ([f"{key}=[{','.join(GROUPS[key][:2])}]"], [f"{key} takes one choice, ", f"-m {key}="])
            for key in GROUPS
            if len(GROUPS[key]) > 1 and key not in (*SEVERAL, *REPLACED, "sweep")
        ],
        (["-m", "sweep=[folds,seeds]"], ["sweep=[folds,seeds]: sweep takes one choice, folds or seeds"]),
        (["-m", "sweep=folds,seeds"], ["sweep=folds,seeds: a sweep can't go over its own keys"]),
        (["-m", "hydra.job.name=a,b"], ["hydra.job.name=a,b: a sweep can't go over Hydra's keys"]),
        *[
            ([f"{key}={value}"], [f"{key}={value}: expected a choice; choose one of "])
            for key in ("precision", "model", "strategy", "target")
            for value in ("", "[]")
        ],
        (["local=cluster"], ["local=cluster: there is no such choice; write configs/local/cluster.yaml"]),
        (["-m", "local=a,b"], ["local=a: there is no such choice"]),
        (["model@other=mlp"], ["model@other=...: the package of a group is fixed. Write model="]),
        (["callbacks={_target_: a.B, c: 1}"], ["replaces the list. Use callbacks=[default,{_target_: a.B, c: 1}]."]),
        (["callbacks=[default,none]"], ["leave none out, or use callbacks=none"]),
        (["logger=[csv,wandb,csv]"], ["has csv twice"]),
        (["--trainer.max_epochs", "3"], ["--trainer.max_epochs 3: ", "without dashes: trainer.max_epochs=3."]),
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
        ["optimizer.lr", "=", "0.1", "seed=1"],
        ["optimizer.lr = 0.1: write it without spaces around =: optimizer.lr=0.1."],
    ),
    "a space after =": (["seed=", "1"], ["seed= 1: write it without spaces around =: seed=1."]),
    "a space before =": (["seed", "=1"], ["seed =1: write it without spaces around =: seed=1."]),
    "two of them": (
        ["seed", "=", "1", "name", "=", "a"],
        [
            f"{key} = {value}: write it without spaces around =: {key}={value}."
            for key, value in (("seed", 1), ("name", "a"))
        ],
    ),
    "a value without quotes": (
        ["task.loss={_target_:", "x,", "q:", "-0.5}", "seed=1"],
        ["task.loss: the shell split its value. Quote it all: 'task.loss={_target_: x, q: -0.5}'."],
    ),
    "a list without quotes": (
        ["-m", "callbacks=[default,", "ema]", "seed", "=", "1"],
        [
            "callbacks: the shell split its value. Quote it all: 'callbacks=[default, ema]'.",
            "seed = 1: write it without spaces around =: seed=1.",
        ],
    ),
    "braces that bash expands": (
        ["model.net=_target_:a.B", "model.net=width:3", "seed=1"],
        ["model.net: the shell split its value. Quote it all: 'model.net={_target_:a.B,width:3}'."],
    ),
    "a choice alone": (["mlp"], ["mlp: every word has the form key=value: model=mlp."]),
    "a key alone": (["seed"], ["seed: every word has the form key=value: seed=...."]),
    "a word alone": (
        ["list"],
        ["list: every word has the form key=value: seed=1, for example. Quote a value with spaces."],
    ),
    "a flag": (
        ["model=mlp", "--lr", "0.1", "trainer.max_epochs=1"],
        ["--lr 0.1: keys are written key=value, without dashes: optimizer.lr=0.1."],
    ),
    "a flag with =": (["--seed=3"], ["--seed 3: keys are written key=value, without dashes: seed=3."]),
    "flags": (
        ["--multirun", "seed=1,2", "--batch-size", "8", "name=a", "--nosuch", "test=true"],
        [
            "--batch-size 8: keys are written key=value, without dashes: data.batch_size=8.",
            "--nosuch: keys are written key=value, without dashes; --help lists the keys, --hydra-help the flags.",
        ],
    ),
    "a flag between keys": (
        ["seed=1", "--cfg", "job", "name=a"],
        ["name=a: put every flag before the first key, or after the last one."],
    ),
}


@pytest.mark.parametrize("key", ["run", "runs"])
def test_a_path_without_a_key_is_a_run(key: str) -> None:
    for typed in (["logs/small"], ["--run", "logs/small"]):
        with pytest.raises(UserError, match=f"^logs/small: every word has the form key=value: {key}=logs/small.$"):
            translate(typed, {key: [], "split": []})


@pytest.mark.parametrize("case", FORMS)
def test_words_that_are_not_overrides(case: str) -> None:
    typed, sentences = FORMS[case]
    with pytest.raises(UserError) as caught:
        translate(typed, GROUPS)
    assert list(caught.value.args) == sentences


@pytest.mark.parametrize("values", ["null,1.0", "null,[1,6]", "null,null", "''", "0,1", "false,true"])
def test_a_sweep_may_begin_with_null(values: str) -> None:
    typed = ["-m", f"trainer.gradient_clip_val={values},2"]
    assert translate(typed, GROUPS) == typed


def test_a_value_typed_twice_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    translate(["seed=1", "seed=1", "model=mlp", "seed=2"], GROUPS)
    assert capsys.readouterr().out == "seed=1 is replaced by seed=2, which was typed later.\n"


def test_every_argument_of_the_trainer_is_a_key_or_has_a_hint() -> None:
    takes = set(inspect.signature(Trainer).parameters) - {"self"}
    assert takes <= set(config()["trainer"]) | set(FILLED_IN)
    assert set(FILLED_IN) <= takes
    for name, way in FILLED_IN.items():
        assert check(config(f"+trainer.{name}=1")) == [f"trainer.{name}=1 is not taken from here: {way}."]


def test_ckpt_path_of_a_command_on_a_run() -> None:
    with pytest.raises(UserError, match=r"^ckpt_path=a/best\.ckpt: unknown key; .* run=a/best\.ckpt\.$"):
        translate(["ckpt_path=a/best.ckpt"], {"run": [], "checkpoint": []})


@pytest.mark.parametrize("key", ["model.net", "data", "optimizer"])
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
        ("[default,ema]", ["callbacks=[default,ema]"]),
        ("[default,{_target_: a.Largest}]", ["callbacks=[default]", "+callbacks.largest={_target_: a.Largest}"]),
        ("[{_target_: a.b.CSVLog, x: 1}]", ["callbacks=none", "+callbacks.csv_log={_target_: a.b.CSVLog, x: 1}"]),
        ("[ default , {x: {_target_: A}} ]", ["callbacks=[default]", "+callbacks.x={_target_: A}"]),
        ("[{a: {_target_: A}, b: {}}]", ["callbacks=none", "+callbacks.a={_target_: A}", "+callbacks.b={}"]),
        # names that a file has, or that are there twice
        ("[{_target_: m.EMA}]", ["callbacks=none", "+callbacks.own_ema={_target_: m.EMA}"]),
        ("[{ema: {_target_: m.EMA}}]", ["callbacks=none", "+callbacks.ema={_target_: m.EMA}"]),
        (
            "[{_target_: A},{_target_: A},{_target_: A}]",
            ["callbacks=none", *(f"+callbacks.{name}={{_target_: A}}" for name in ("a", "a_2", "a_3"))],
        ),
        ("[default,{_target_: A]", ["callbacks=[default,{_target_: A]"]),  # Hydra reports it
        ("{a: {_target_: A}}", ["callbacks={a: {_target_: A}}"]),
        ("[{_target_: A, x: '],}'}]", ["callbacks=none", "+callbacks.a={_target_: A, x: '],}'}"]),
    ],
)
def test_each_node_gets_a_key(value: str, new: list[str]) -> None:
    assert expand_nodes(f"callbacks={value}", "callbacks", value, ("none", "default", "ema", "csv")) == new


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[default,{x: 3}]", r"{x: 3} names no class: write {_target_: package.module.Class, ...}."),
        ("[default,{}]", "{} names no class"),
        (
            "[default],[default,{_target_: A}]",
            "a sweep takes names of files. Write the nodes as configs/callbacks/",
        ),
        ("choice([default],[{_target_: A}])", "a sweep takes names of files"),
    ],
)
def test_nodes_without_a_class_are_refused(value: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        expand_nodes(f"callbacks={value}", "callbacks", value, ("none", "default", "ema", "csv"))
