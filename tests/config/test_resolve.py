"""Resolved configurations: leaves, interpolations, differences."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from lathe.config.resolve import differences, resolve
from lathe.errors import UserError, did_you_mean


def test_did_you_mean() -> None:
    assert did_you_mean("adamv", ["sgd", "adamw", "muon"]) == "did you mean adamw?"
    assert did_you_mean("adam", ["radam", "adamw", "sgd"]) == "did you mean adamw?"
    assert did_you_mean("xyz", ["sgd", "adamw"]) == "choose one of adamw, sgd"
    assert did_you_mean("xyz", []) == ""
    assert did_you_mean("@@", [f"name{i}" for i in range(41)]) == ""


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": "${nope}"}}, "a.b: it follows nope, which is not there; give either."),
        ({"a": {"b": "???"}}, "a.b: a value has to be given, a.b=...; --help a.b says what it takes."),
    ],
)
def test_a_missing_value_is_reported_with_its_key(tree: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(OmegaConf.create(tree))
    assert str(caught.value) == message


def test_differences_name_each_leaf() -> None:
    old = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}
    new = {"a": 1, "b": {"c": 4, "x": 5}, "e": [1, 2]}
    assert differences(old, new) == ["b.c: 2 -> 4", "b.d: 3 -> absent", "b.x: absent -> 5", "e: [1] -> [1, 2]"]
    assert differences(old, old) == []
    assert differences({"a": {"b": 1}, "ab": 1}, {"a": {"b": 2}, "ab": 2}, ignore=["a"]) == ["ab: 1 -> 2"]
    assert differences({"b": 1}, {"a": None, "b": 1}) == []  # null is as good as absent
