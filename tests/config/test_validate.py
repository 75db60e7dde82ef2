"""Each key of a configuration: a wrong value is one message with key, value and what is expected."""

from typing import Any

import pytest
from omegaconf import OmegaConf
from support.runs import config

from lathe.config.resolve import resolve
from lathe.config.validate import check, check_types


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return config()


def changed(cfg: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`cfg` with another value at the dotted `key`."""
    node = OmegaConf.create(cfg)
    OmegaConf.update(node, key, value, force_add=True)
    return resolve(node)


def test_the_defaults_are_right(defaults: dict[str, Any]) -> None:
    assert check(defaults) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", None, "seed=null: expected a whole number from 0 to 4294967295."),
        ("trainer.use_distributed_sampler", True, "trainer.use_distributed_sampler=true: expected false, as Lathe's"),
        ("model", None, "model=null: a run needs this group; choose one of the files in configs/model, in a YAML file"),
    ],
)
def test_a_wrong_value(defaults: dict[str, Any], key: str, value: Any, message: str) -> None:
    (found,) = check(changed(defaults, key, value))
    assert found.startswith(message)


@pytest.mark.parametrize("name", ["resnet20_lr0.1", "größe", "x" * 100, "latest2"])
def test_names_of_runs(name: str, defaults: dict[str, Any]) -> None:
    assert check(defaults | {"name": name}) == []


@pytest.mark.parametrize("name", ["", "../x", "a\\b", ".hidden", "a\nb", "a,b", "-x", "x" * 101, None, 5, "latest"])
def test_names_that_a_folder_or_a_shell_can_not_take(name: Any, defaults: dict[str, Any]) -> None:
    (message,) = check(defaults | {"name": name})
    assert message.startswith("name=")


# Components that the schema does not know: overrides have the types of the defaults that they replace.


@pytest.fixture(scope="module")
def own(defaults: dict[str, Any]) -> dict[str, Any]:
    net = {"_target_": "mine.Net", "width": 16, "rate": 0.1, "on": True, "kinds": ["a"], "how": "x"}
    return changed(defaults, "model.net", net)


@pytest.mark.parametrize(
    ("key", "value"), [("rate", 1), ("rate", 0.5), ("width", None), ("on", False), ("kinds", ["b", 1]), ("how", "y")]
)
def test_values_of_the_default_type(own: dict[str, Any], key: str, value: Any) -> None:
    assert list(check_types([f"model.net.{key}"], changed(own, f"model.net.{key}", value), own)) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("width", "many", "model.net.width=many: expected a whole number, such as 16."),
        ("rate", False, "model.net.rate=false: expected a number, such as 0.1."),
        ("on", 1, "model.net.on=1: expected true or false, such as true."),
        ("kinds", "norm", "model.net.kinds=norm: expected a list, such as ['a']."),
        ("rate", {"x": 1}, "model.net.rate is a group of keys here: expected a number, such as 0.1."),
    ],
)
def test_values_of_another_type(own: dict[str, Any], key: str, value: Any, message: str) -> None:
    wrong = changed(own, f"model.net.{key}", value)
    assert list(check_types([f"model.net.{key}"], wrong, own)) == [(f"model.net.{key}", message)]


def test_each_leaf_of_an_overridden_group_is_checked_and_no_other_key(own: dict[str, Any]) -> None:
    wrong = changed(changed(own, "model.net.width", "wide"), "model.net.on", 1)
    assert [key for key, _ in check_types(["model.net"], wrong, own)] == ["model.net.width", "model.net.on"]
    assert list(check_types(["seed"], wrong, own)) == []
