"""Nodes become what Hydra makes of them."""

import random
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, ListConfig

from lathe.errors import UserError
from lathe.runs.instantiate import instantiate


class Kept:
    """Keeps what it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def drawn(rng: random.Random, depth: int, target: bool = False) -> Any:
    """A value of a configuration: a node of `Kept`, a group of keys, a list, or a plain value."""
    kind = "node" if target else rng.choice(["node", "group", "list", "plain"] if depth else ["plain"])
    if kind == "plain":
        return rng.choice([None, True, 3, 0.5, "word", ""])
    if kind == "list":
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(4))]
    values = {name: drawn(rng, depth - 1) for name in rng.sample(["a", "b", "c"], rng.randrange(4))}
    if kind == "group":
        return values
    words = {
        "_args_": [drawn(rng, depth - 1) for _ in range(rng.randrange(3))],
        "_partial_": rng.choice([True, False]),
        "_convert_": rng.choice(["all", "none", "partial", "object"]),
        "_recursive_": rng.choice([True, False]),
    }
    return {"_target_": f"{__name__}.Kept", **values, **{word: words[word] for word in words if rng.random() < 0.25}}


def seen(value: Any) -> Any:
    """What a part got, with the kinds of what it is made of."""
    if isinstance(value, Kept):
        return "Kept", seen(list(value.args)), seen(value.kwargs)
    if hasattr(value, "keywords"):
        return "partial", type(value), value.func, seen(list(value.args)), seen(value.keywords)
    if isinstance(value, (list, ListConfig)):
        return type(value), [seen(item) for item in value]
    if isinstance(value, (dict, DictConfig)):
        return type(value), {name: seen(item) for name, item in value.items()}
    return type(value), value


@pytest.mark.parametrize("seed", range(10))
def test_a_drawn_node_becomes_what_hydra_makes_of_it(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        node = drawn(rng, 3, target=True)
        expected = hydra.utils.instantiate(node, **({} if "_convert_" in node else {"_convert_": "all"}))
        assert seen(instantiate(node, "model")) == seen(expected), node


def test_lists_and_groups_of_a_part_are_its_own() -> None:
    node = {"_target_": f"{__name__}.Kept", "sizes": [1, 2], "_recursive_": False, "group": {"deep": [3]}}
    made = instantiate(node, "model")
    made.kwargs["sizes"].append(3)
    made.kwargs["group"]["deep"].append(4)
    assert (node["sizes"], node["group"]) == ([1, 2], {"deep": [3]})


def test_a_class_that_is_defined_anew_is_the_one_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"_target_": f"{__name__}.Kept"}
    assert type(instantiate(node, "model")) is Kept
    anew = type("Kept", (), {})
    monkeypatch.setattr(sys.modules[__name__], "Kept", anew)
    assert type(instantiate(node, "model")) is anew


def test_words_that_look_like_an_interpolation_stay_as_they_are() -> None:
    assert instantiate({"_target_": f"{__name__}.Kept", "pattern": "${name}.png"}, "data").kwargs == {
        "pattern": "${name}.png"
    }


@pytest.mark.parametrize(
    ("line", "raised"),
    [("def broken(:", "SyntaxError"), ("width = depht", "NameError: name 'depht'"), ("1 / 0", "ZeroDivisionError")],
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
