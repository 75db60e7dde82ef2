"""Parts built from Python are held against the same tables as those of a configuration."""

import ast
import copy
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import get_object
from support.fuzz_draws import wrong
from support.runs import ROOT

from lathe.compression.channels.budget import cost_function
from lathe.compression.channels.prune import Options
from lathe.compression.channels.scores import scores
from lathe.compression.masks import maskable
from lathe.compression.masks.lottery import round_sparsities
from lathe.compression.masks.masks import check_options
from lathe.compression.masks.rigl import erdos_renyi_kernel, uniform
from lathe.compression.masks.sparsity_schedules import SparsitySchedule
from lathe.config.schema.held import TABLES, held
from lathe.config.schema.rule import Rule
from lathe.config.schema.verbs import TRAIN
from lathe.errors import ArgumentError, UserError
from lathe.export import get
from lathe.nets import MLP
from lathe.runs.nodes import make
from lathe.strategies import compile_net, precision_plugin

SOURCE = ROOT / "src" / "lathe"
SIZES: dict[str, Any] = {"channels": 1, "image_size": 8, "num_classes": 3, "width": 8, "depth": 2}
# An empty folder: the name is a whole path. The files of a mirror are given as a mapping.
FREE = {
    "lathe.data.Shards": ("data_dir",),
    "lathe.data.TokenFiles": ("data_dir",),
    "lathe.data.FashionMnist": ("files",),
}
TASKS = ("ClassificationTask", "RegressionTask", "MultiLabelTask", "Weighted")  # objects in the place of nodes
FREE |= {f"lathe.tasks.{name}": ("loss", "metrics") for name in TASKS}
HELD = [name for name in TABLES if name.partition(".")[0] in ("lathe", "target")] + ["compile", "precision"]


def part_of(name: str) -> Any:
    """What a table is of."""
    here = {"compile": compile_net, "precision": precision_plugin}
    return here.get(name) or (get(name.removeprefix("target.")).export if "target." in name else get_object(name))


@pytest.mark.parametrize("name", HELD)
def test_a_part_from_python_refuses_what_the_launch_does(name: str) -> None:
    """In the same sentence, but for the key, and before anything of the part itself runs."""
    part = part_of(name)
    taken = {*inspect.signature(part).parameters, "async"}  # which Python keeps for itself
    for key, rule in TABLES[name].items():
        if key not in taken or key in FREE.get(name, ()):
            continue
        for value in wrong(rule):
            if not isinstance(value, dict) and any(one.kind == "node" for one in rule.kinds()):
                continue  # built already
            with pytest.raises(ArgumentError) as caught:
                part(**{key: value})
            assert caught.value.args == (rule.sentence(key, value),)
            assert caught.value.under("a.b").args == (rule.sentence(f"a.b.{key}", value),)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (Options, "PruneChannels"),
        (SparsitySchedule, "Prune"),
        (check_options, "Prune"),
        (cost_function, "PruneChannels"),
        (erdos_renyi_kernel, "RigL"),
        (maskable, "Prune"),
        (round_sparsities, "Lottery"),
        (scores, "PruneChannels"),
        (uniform, "RigL"),
    ],
)
def test_what_a_method_is_made_of_refuses_the_same(part: Any, name: str) -> None:
    free = ("start", "end") if part is SparsitySchedule else ("sparsity",) if part is check_options else ()
    found = 0
    for key, rule in TABLES[f"lathe.callbacks.{name}"].items():
        for value in wrong(rule) if key in inspect.signature(part).parameters and key not in free else []:
            with pytest.raises(ArgumentError) as caught:
                part(**{key: value})
            assert caught.value.args == (rule.sentence(key, value),)
            found += 1
    assert found


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
    @held("lathe.callbacks.TorchProfiler")
    def profiler(dirpath: Any, top_k: Any = 1) -> Any:
        return dirpath

    assert profiler(tmp_path) == tmp_path  # a path
    with pytest.raises(ArgumentError, match=r"^top_k=x: expected .*, got a word"):
        profiler(tmp_path, top_k="x")

    @held("lathe.data.ImageDataModule")
    def data(source: Any, mean: Any) -> Any:
        return mean

    assert data(object(), (0.5, 0.5)) == (0.5, 0.5)  # an object where a file has a node, a tuple where it has a list
    with pytest.raises(ArgumentError, match=r"^mean=\[0.5, 'x'\]: expected a list of 1 or more items"):
        data(object(), (0.5, "x"))


PLAIN = ("nets", "compression", "optim", "measure", "images")  # rooms whose functions are called in notebooks too


@pytest.mark.parametrize("room", PLAIN)
def test_what_a_notebook_can_use_names_no_key_of_a_configuration(room: str) -> None:
    """Whoever calls it for a run puts the key before the sentence."""
    groups = "|".join(key for key, place in TRAIN.items() if not isinstance(place, Rule))
    key = re.compile(rf"(?<![\w./*])({groups})(\.[a-z_]+|=\w)")
    found = []
    for path in sorted((SOURCE / room).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found += [(path.name, node.value) for node in strings if id(node) not in said and key.search(node.value)]
    assert found == []
