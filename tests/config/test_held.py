"""Parts built from Python are held against the same tables as those of a configuration."""

import copy
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import get_object
from support.fuzz_draws import wrong
from support.runs import ROOT, config

from lathe.config.schema.check import CLASSES
from lathe.config.schema.held import held
from lathe.errors import ArgumentError, UserError
from lathe.nets import MLP
from lathe.runs.build import make

NETS = sorted({path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")})
SIZES: dict[str, Any] = {"channels": 1, "image_size": 8, "num_classes": 3, "width": 8, "depth": 2}


def net_of(choice: str) -> dict[str, Any]:
    words = "vocab_size" in (ROOT / "configs" / "model" / f"{choice}.yaml").read_text()
    node: dict[str, Any] = config(f"model={choice}", *["data=synthetic_tokens"][:words])["model"]["net"]
    return node


@pytest.mark.parametrize("choice", NETS)
def test_a_net_refuses_what_its_table_does(choice: str) -> None:
    node = net_of(choice)
    name = node.pop("_target_")
    net = get_object(name)
    for key, rule in CLASSES[name].items():
        for value in [value for value in wrong(rule) if not isinstance(value, dict)]:
            with torch.device("meta"), pytest.raises(ArgumentError) as caught:
                net(**{**node, key: value})
            assert caught.value.args == (rule.sentence(key, value),)


DATA = sorted(path.stem for path in (ROOT / "configs" / "data").glob("*.yaml"))
FREE = ("data_dir",)  # of what reads files: empty where the name is an absolute path


@pytest.mark.parametrize("choice", DATA)
def test_data_and_their_sources_refuse_what_their_tables_do(choice: str) -> None:
    words = "vocab_size" in (ROOT / "configs" / "data" / f"{choice}.yaml").read_text()
    facts = ["data.num_classes=2", "data.channels=1", "data.image_size=8"] if choice == "shards" else []
    data = config(f"data={choice}", *["model=gpt_nano"][:words], *facts)["data"]
    for node in [data, data["source"], data.get("augment")]:
        if node is None:
            continue
        part, rules = get_object(node["_target_"]), CLASSES[node["_target_"]]
        given = {
            key: object() if isinstance(value, dict) else value for key, value in node.items() if key != "_target_"
        }
        for key, rule in rules.items():
            if key in FREE or any(one.kind == "node" for one in rule.kinds()):
                continue
            for value in wrong(rule):
                with pytest.raises(ArgumentError) as caught:
                    part(**{**given, key: value})
                assert rule.sentence(key, value) in caught.value.args


def test_numbers_and_lists_of_other_libraries_are_taken() -> None:
    MLP(**{**SIZES, "width": np.int64(8), "dropout": np.float32(0.5)})
    with pytest.raises(ArgumentError, match=r"^dropout=1\.5: expected a number from 0 and below 1, got"):
        MLP(**{**SIZES, "dropout": np.float32(1.5)})


def test_every_wrong_argument_is_told_and_a_caller_adds_the_key() -> None:
    with pytest.raises(ArgumentError) as caught:
        MLP(**{**SIZES, "width": 0, "dropout": 1.0})
    assert [sentence.split("=")[0] for sentence in caught.value.args] == ["width", "dropout"]
    model = {
        "_target_": "lathe.tasks.ClassificationTask",
        "net": {"_target_": "lathe.nets.MLP", **SIZES, "width": 0, "depth": 0},
    }
    with pytest.raises(UserError) as caught_by_make:
        make(model, "model")
    assert [sentence.split(":")[0] for sentence in caught_by_make.value.args] == [
        "model.net.width=0",
        "model.net.depth=0",
    ]
    with pytest.raises(UserError, match=r"^model\.net\.depth=21 is not 6n \+ 2"):
        make({"_target_": "lathe.nets.CifarResNet", "depth": 21}, "model.net")


class Wider(MLP):
    """A subclass with arguments of its own names."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(width=2 * size, **options)


def test_a_subclass_is_held_by_what_it_hands_on() -> None:
    own = {key: value for key, value in SIZES.items() if key != "width"}
    assert Wider(4, **own)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    with pytest.raises(ArgumentError, match=r"^width=0: expected a whole number from 1"):
        Wider(0, **own)


def test_a_class_stays_what_it_was() -> None:
    assert list(inspect.signature(MLP).parameters) == [
        "channels",
        "image_size",
        "num_classes",
        "width",
        "depth",
        "dropout",
    ]
    net = MLP(**SIZES)
    assert type(pickle.loads(pickle.dumps(copy.deepcopy(net)))) is MLP
    with pytest.raises(TypeError, match="unexpected keyword argument 'widht'"):
        MLP(**SIZES, widht=1)  # type: ignore[call-arg]


def test_what_only_python_has_is_taken(tmp_path: Any) -> None:
    @held("lathe.callbacks.Checkpoint")
    def checkpoint(dirpath: Any, monitor: Any = None) -> Any:
        return dirpath

    assert checkpoint(tmp_path) == tmp_path  # a path
    with pytest.raises(
        ArgumentError, match=r"^monitor=5: expected a metric such as val/loss or null, got a whole number"
    ):
        checkpoint(tmp_path, monitor=5)

    @held("lathe.data.ImageDataModule")
    def data(source: Any, mean: Any) -> Any:
        return mean

    assert data(object(), (0.5, 0.5)) == (0.5, 0.5)  # an object where a file has a node, a tuple where it has a list
    with pytest.raises(ArgumentError, match=r"^mean=\[0.5, 'x'\]: expected a list of 1 or more items"):
        data(object(), (0.5, "x"))
