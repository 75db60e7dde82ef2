"""Nodes in the list of a group become overrides that add a key each."""

import json
import random
import re
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lathe.config.override_parsing import expand_nodes, split_items
from lathe.errors import UserError

CHOICES = ("none", "default", "ema", "csv")


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
    assert expand_nodes(f"callbacks={value}", "callbacks", value, CHOICES) == new


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
        expand_nodes(f"callbacks={value}", "callbacks", value, CHOICES)


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["text", "number", "flag"] + ["list", "dict"] * (depth > 0))
    if kind == "list":
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == "dict":
        return {f"k{n}": random_value(rng, depth - 1) for n in range(rng.randrange(3))}
    return {"text": "".join(rng.choices("ab ,:[]{}()'", k=rng.randrange(1, 8))), "number": rng.randrange(9)}.get(
        kind, True
    )


def typed(value: Any) -> str:
    """In the grammar of Hydra."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {typed(item)}' for key, item in value.items())}}}"
    return f"[{', '.join(map(typed, value))}]" if isinstance(value, list) else json.dumps(value)


def test_nodes_with_any_values() -> None:
    """Hydra reads the same node in its override as in the list."""
    parser = OverridesParser.create()
    for seed in range(200):
        rng = random.Random(seed)
        nodes = [
            {"_target_": f"m.P{n}", **{f"x{i}": random_value(rng, 3) for i in range(rng.randrange(4))}}
            for n in range(rng.randrange(1, 4))
        ]
        value = f"[default, {', '.join(map(typed, nodes))}]"
        words = expand_nodes(f"callbacks={value}", "callbacks", value, CHOICES)
        read = [item.value() for item in parser.parse_overrides(words)]
        assert read == [["default"], *nodes], value
        assert split_items(value[1:-1])[0] == "default"
