"""Nodes become what Hydra's instantiate makes of them; one that can't be built is reported with its key."""

import random
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, ListConfig
from support.runs import ROOT

from lathe.errors import UserError
from lathe.runs.instantiate import instantiate


class Kept:
    """Keeps its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def drawn(rng: random.Random, depth: int, target: bool = False) -> Any:
    """A random value: a node of `Kept`, a dict, a list, or a plain value."""
    kind = "node" if target else rng.choice(["node", "dict", "list", "plain"] if depth else ["plain"])
    if kind == "plain":
        return rng.choice([None, True, 3, 0.5, "word", ""])
    if kind == "list":
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(4))]
    values = {name: drawn(rng, depth - 1) for name in rng.sample(["a", "b", "c"], rng.randrange(4))}
    if kind == "dict":
        return values
    words = {
        "_args_": [drawn(rng, depth - 1) for _ in range(rng.randrange(3))],
        "_partial_": rng.choice([True, False]),
        "_convert_": rng.choice(["all", "none", "partial", "object"]),
        "_recursive_": rng.choice([True, False]),
    }
    return {"_target_": f"{__name__}.Kept", **values, **{word: words[word] for word in words if rng.random() < 0.25}}


def described(value: Any) -> Any:
    """The classes and values of what was built."""
    if isinstance(value, Kept):
        return "Kept", described(list(value.args)), described(value.kwargs)
    if hasattr(value, "keywords"):
        return "partial", type(value), value.func, described(list(value.args)), described(value.keywords)
    if isinstance(value, (list, ListConfig)):
        return type(value), [described(item) for item in value]
    if isinstance(value, (dict, DictConfig)):
        return type(value), {name: described(item) for name, item in value.items()}
    return type(value), value


def test_a_random_node_becomes_what_hydra_makes_of_it() -> None:
    rng = random.Random(0)
    for _ in range(50):
        node = drawn(rng, 3, target=True)
        expected = hydra.utils.instantiate(node, **({} if "_convert_" in node else {"_convert_": "all"}))
        assert described(instantiate(node, "model")) == described(expected), node


def test_arguments_are_added_to_a_node() -> None:
    layer = instantiate({"_target_": "torch.nn.Linear", "in_features": 3}, "model.net", out_features=2, bias=False)
    assert (layer.weight.shape, layer.bias) == ((2, 3), None)
    assert instantiate({"_target_": "builtins.pow"}, "x", 2, 5) == 32


def test_lists_and_dicts_are_copies() -> None:
    node = {"_target_": f"{__name__}.Kept", "sizes": [1, 2], "_recursive_": False, "group": {"deep": [3]}}
    built = instantiate(node, "model")
    built.kwargs["sizes"].append(3)
    built.kwargs["group"]["deep"].append(4)
    assert (node["sizes"], node["group"]) == ([1, 2], {"deep": [3]})


LINEAR = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({**LINEAR, "biass": True}, "model.biass: torch.nn.Linear takes no such argument; did you mean bias?"),
        (
            {"_target_": "torch.nn.Sequential", "_args_": [{**LINEAR, "in_features": "three"}]},
            "model._args_[0] can't be built: ",
        ),
        ({"_target_": f"{__name__}.Kept", "net": {**LINEAR, "widht": 3}}, "model.net.widht: torch.nn.Linear takes no"),
        ({"_target_": "torch.nn.Linearr"}, "model can't be built: the module torch.nn has no Linearr; did you mean"),
        (
            {"_target_": "no_such_package.Thing"},
            f"model can't be built: No module named 'no_such_package'. Put your own modules into {ROOT}/src/",
        ),
        ({**LINEAR, "in_features": 10**8, "out_features": 10**8}, "model can't be built: "),
    ],
)
def test_a_node_that_cant_be_built_is_reported_with_its_key(node: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        instantiate(node, "model")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "raised"),
    [("def broken(:", "SyntaxError"), ("width = depht", "NameError: name 'depht'")],
)
def test_an_error_in_a_users_module_names_file_and_line(
    line: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_broken.py"
    file.write_text(f"depth = 2\n\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as caught:
        instantiate({"_target_": "own_broken.Net"}, "model.net")
    assert str(caught.value).startswith(f"model.net can't be built: {raised}")
    assert str(caught.value).endswith(f"({file}:3)")
