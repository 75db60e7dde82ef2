"""A value is parsed alike on the command line, in all keys of sweep, and from Python."""

import json
import math
import shlex
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from support.runs import ROOT

from lathe.config.override_parsing import as_typed
from lathe.launch.sweep.search_space import entry_of, planned, repeats_of, word

KEY = "name"
VALUES: list[Any] = [
    *(0, -3, 0.1, 1e-5, 1e16, -0.0, math.inf, True, False, None),
    *("resnet20", "a b", "1", "1e-3", "true", "null", "None", "it's", 'a "quote"', "a=b,c", "[x]", "{x: 1}", "stem.*"),
    *("", " x ", "back\\slash", "ends\\", "é", "$HOME", "#1", "a:b", "*", "/a/b-c_d"),
    *(["stem.*"], ["bias", "a b"], [1, 2.5, None, True], [[1, 2], [3]], []),
    *({"a": 1}, {"a": ["b", {"c": None}]}, {}),
]


def loader() -> Any:
    return ConfigLoaderImpl(create_config_search_path(str(ROOT / "configs")))


def read(words: list[str]) -> Any:
    """Return the value that Hydra gives the key of the only override."""
    (item,) = OverridesParser.create(config_loader=loader()).parse_overrides(words)
    return item.value()


def jobs(**options: Any) -> list[list[str]]:
    return planned([], {"axes": None, "runs": None, "remove": None, **options}, {}, loader())


def same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_the_same_by_every_door(value: Any) -> None:
    override = f"{KEY}={as_typed(value)}"
    assert same(read([override]), value)
    assert same(read(jobs(runs=[[override]])[0]), value)
    assert same(read(jobs(runs=[shlex.quote(override)])[0]), value)
    assert same([read(job) for job in jobs(axes={KEY: [value, 7]})], [value, 7])
    assert same([read(repeat) for repeat in repeats_of({KEY: [value, 7]}, [], [])], [value, 7])
    if value != math.inf:
        entry = entry_of(KEY, [value, 7])
        stored = json.loads(json.dumps(entry.choices))  # a study stores them as JSON
        assert same([read([word(KEY, drawn, entry)]) for drawn in stored], [value, 7])
