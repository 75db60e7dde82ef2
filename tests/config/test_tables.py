"""The tables of what each key takes: they cover every key of every YAML file, every default fits, and they name real
arguments.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from support.runs import config

from lathe.config.schema import problems
from lathe.config.schema.check import CLASSES
from lathe.config.schema.names import canonical
from lathe.config.schema.optim import OPTIMIZERS
from lathe.config.schema.trainer import FILLED_IN
from lathe.runs.trainer import OURS


def found(name: str) -> Any:
    """The class or function of a canonical name."""
    root, *_, last = words = name.split(".")
    for module in (
        [f"{root}.{words[1]}"] if root != "lightning" else ["lightning.pytorch", "lightning.pytorch.callbacks"]
    ):
        for place in (
            module,
            *(
                f"{module}.{path.stem}"
                for path in Path(str(importlib.import_module(module).__file__)).parent.glob("*.py")
            ),
        ):
            if root != "lathe" and place != module:
                continue
            value = getattr(importlib.import_module(place), last, None)
            here = str(getattr(value, "__module__", "")).startswith(root)
            if callable(value) and here and canonical(f"{place}.{last}") == name:
                return value
    raise AssertionError(name)


HANDED = {"net", "optimizer", "scheduler", "total_steps", "run_dir", "start_step"}  # what the machinery gives
GIVEN = {"_partial_", "processes", "precisions", "compressions", "kind"}  # read by the launch, not by the class


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_tables_name_the_arguments_that_there_are(name: str) -> None:
    if name == "hydra.utils.get_class":
        return
    parameters = inspect.signature(found(name)).parameters
    named = {key for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    table = set(CLASSES[name]) - GIVEN
    if name == "lightning.Trainer":
        table = (table - (set(OURS) - named)) | set(FILLED_IN)
    if named != set(parameters):  # it hands further options on
        table &= named
    assert table - HANDED == named - HANDED - GIVEN


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_options_of_optimizers_are_theirs(name: str) -> None:
    parameters = set(inspect.signature(found(name)).parameters) - {"params", "lr", "weight_decay"}
    assert set(OPTIMIZERS[name]) == parameters


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["+foo=1"], "foo: there is no such key, and nothing reads it; "),
        (["+launch.foo=1"], "launch.foo: there is no such key in launch; "),
        (["+trainer.foo=1"], "trainer.foo: lightning.pytorch.Trainer takes no such argument; "),
        (["+data.foo=1"], "data.foo: lathe.data.ImageDataModule takes no such argument; "),
        (["+model.net.widht=3"], "model.net.widht: lathe.nets.CifarResNet takes no such argument; did you mean width?"),
        (
            ["+callbacks.ema.x=1"],
            "callbacks.ema sets options of a callback that the run does not have: add ema to callbacks",
        ),
        (["~launch.timeout"], "launch.timeout is missing: leave ~launch.timeout out."),
        (["~trainer.enable_progress_bar"], "trainer.enable_progress_bar is missing"),
        (
            ["+optimizer.amsgrad=maybe"],
            "optimizer.amsgrad: torch.optim.SGD takes no such option; leave it out with optimizer.amsgrad=null; ",
        ),
        (
            ["optimizer.kind.path=torch.optim.NAdam"],
            "optimizer.momentum: torch.optim.NAdam takes no such option; leave it out with "
            "optimizer.momentum=null; did you mean momentum_decay?",
        ),
        (
            ["optimizer=adamw", "+optimizer.amsgrad=maybe"],
            "optimizer.amsgrad=maybe: expected true or false or null, got a word.",
        ),
        (
            ["optimizer.lr={_target_: builtins.print}"],
            "optimizer.lr={'_target_': 'builtins.print'}: expected a number above 0",
        ),
        (["task._target_='a b'"], "task._target_=a b: expected the dotted path of a class or function, got a word."),
        (["scheduler._partial_=false"], "scheduler._partial_=false: expected true"),
        (["~task._target_"], "task has no _target_: leave ~task._target_ out"),
    ],
)
def test_what_nothing_takes_is_one_sentence(change: list[str], sentence: str) -> None:
    key, told = next(problems(config(*change), "train", read=()))
    assert told.startswith(sentence)
    assert told.startswith(key)


def test_a_key_that_others_read_is_no_mistake() -> None:
    cfg = config("+width=24", "model.net.width=${width}")
    assert list(problems(cfg, "train", read={"width"})) == []
    assert list(problems(config("+foo=1"), "train")) == []  # it may have been read before it was resolved


def test_classes_that_no_table_knows_are_left_to_their_constructors() -> None:
    own = config("optimizer.kind.path=mine.Lion", "+optimizer.anything=goes", "callbacks.nan_guard._target_=mine.Guard")
    assert list(problems(own, "train")) == []
